"""The keys of the documents of runs that a report shows."""

from dataclasses import dataclass, field
from typing import Any, Literal

from curvoscope.analysis.advice import Advice
from curvoscope.analysis.attention_heads import HeadMoments
from curvoscope.analysis.audit_table import AuditRow
from curvoscope.analysis.entries import EntryHistogram
from curvoscope.analysis.heterogeneity import BlockRow
from curvoscope.analysis.ledger import ScaledChange
from curvoscope.analysis.measurements import Measurement
from curvoscope.analysis.pair_norms import PairNorm
from curvoscope.estimate import Estimate
from curvoscope.training.records import Incident


@dataclass(frozen=True)
class Depth:
    """Curvature at the output of one layer."""

    layer: str
    spectral: Estimate
    functional_spectral: Estimate
    jacobian: Estimate | None
    largest_block: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Common:
    """Of every document. `missing`: what was not measured, and why."""

    title: str
    question: str
    answer: str
    about: list[str]
    advice: list[Advice]
    command: str | None
    versions: dict[str, str]
    seed: int | None
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """Of the layers of a model."""

    attention: list[HeadMoments] = field(default_factory=list)
    depth: list[Depth] = field(default_factory=list)


@dataclass(frozen=True)
class Whole:
    """The ends of the spectrum of the whole Hessian."""

    parameters: int
    largest_eigenvalue: Estimate
    smallest_eigenvalue: Estimate
    critical_learning_rate: Estimate | None


@dataclass(frozen=True)
class Cumulative:
    """The share of eigenvalues below each of some numbers x, with the ends of its 95 % band."""

    x: list[float]
    value: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class SpectrumRow:
    """The eigenvalues of one block."""

    block: str
    size: int
    largest_eigenvalue: Estimate
    smallest_eigenvalue: Estimate
    quantiles: dict[str, float | None]
    negative_share: Estimate
    near_zero_share: Estimate
    near_zero: float
    cumulative: Cumulative | None = None


@dataclass(frozen=True, kw_only=True)
class ModelAnalysis(Common, PerLayer):
    """`curvoscope analyze`. `dense`: exact numbers of all pairs of blocks, of a Hessian that is small enough;
    `spectra`: of its weight matrices."""

    kind: Literal["analyze", "analyze MODEL"]
    rounding: float
    rows: list[Measurement]
    hessian: Whole
    pairs: list[PairNorm] = field(default_factory=list)
    dense: list[BlockRow] = field(default_factory=list)
    spectra: list[SpectrumRow] = field(default_factory=list)
    verdict: str | None = None
    histograms: list[EntryHistogram] = field(default_factory=list)


@dataclass(frozen=True)
class Bounds:
    """Two bounds of a number."""

    lower: Estimate
    upper: Estimate


@dataclass(frozen=True, kw_only=True)
class SweptBlock:
    """The Gauss-Newton part of a block, or of one of its heads."""

    block: str
    frobenius_norm: Estimate
    trace: Estimate
    effective_rank: Estimate
    largest_eigenvalue: Bounds
    head: str | None = None
    shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class LargestEigenvalue:
    """That of the whole Hessian."""

    largest_eigenvalue: Estimate


@dataclass(frozen=True)
class SweptPairs:
    """Norms (k, k) of the Gauss-Newton part for all pairs of k blocks, and their standard errors."""

    names: list[str]
    frobenius_norm: list[list[float]]
    stderr: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class SweepDocument(Common):
    """`curvoscope analyze` of a large model."""

    kind: Literal["sweep"]
    samples: int
    rows: list[SweptBlock]
    heads: list[SweptBlock]
    hessian: LargestEigenvalue | None
    pairs: SweptPairs | None = None


@dataclass(frozen=True, kw_only=True)
class AuditDocument(Common):
    """`curvoscope audit`; `samples` is None if all numbers are exact, up to `rounding`.

    `groups`: several weights as one.
    """

    kind: Literal["audit"]
    samples: int | None
    rows: list[AuditRow]
    outside_diagonal_blocks: Estimate | None
    rounding: float = 0.0
    groups: list[AuditRow] = field(default_factory=list)


@dataclass(frozen=True)
class JensenShannon:
    """Distances (k, k) between k spectra, and the size above which they are compared."""

    names: list[str]
    distance: list[list[float]]
    threshold: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class SpectrumDocument(Common, PerLayer):
    """`curvoscope spectrum`."""

    kind: Literal["spectrum"]
    blocks: list[SpectrumRow]
    jensen_shannon: JensenShannon
    hessian: Whole


@dataclass(frozen=True, kw_only=True)
class Training(Common):
    """`curvoscope watch`; the records are the facts of `training.Record`."""

    kind: Literal["watch"]
    steps: int
    records: list[dict[str, Any]]
    incidents: list[Incident]


@dataclass(frozen=True)
class Verdict:
    """A prediction compared with the measurement.

    Args:
        statement: what was predicted, as a sentence.
        block, part, layer: which block of which layer it is about.
        predicted, fitted: for a growth rate, the exponents; None if there is no number.
        low, high: the 95 % interval of the fit.
        agrees: None if nothing was predicted.
        depth: the number of layers.

    Example:
        >>> from curvoscope.papers.experiments import Verdict
        >>> found = Verdict("V grows as sigma^2", "V", "outer", 1, 2.0, fitted=2.01, low=1.98, high=2.04, agrees=True)
        >>> found.low < found.predicted < found.high
        True
    """

    statement: str
    block: str
    part: str
    layer: int
    predicted: float | None
    fitted: float | None
    low: float | None
    high: float | None
    agrees: bool | None
    depth: int = 1


@dataclass(frozen=True)
class Reproduced:
    """One of the papers' figures."""

    name: str
    title: str
    question: str
    remarks: str
    points: int
    seeds: int
    verdicts: list[Verdict]


@dataclass(frozen=True, kw_only=True)
class Reproduction(Common):
    """`curvoscope reproduce`."""

    kind: Literal["reproduce"]
    figures: list[Reproduced]


@dataclass(frozen=True)
class CostRow:
    """A `LedgerRow`; `relative` and `share` are None if they are not finite."""

    block: str
    relative: float | None
    first: Estimate
    outer: Estimate
    functional: Estimate
    second: Estimate
    share: float | None
    alone: Estimate | None
    measured: Estimate | None


@dataclass(frozen=True)
class PairCost:
    """½ d·H d' of two blocks."""

    row: str
    column: str
    second: Estimate


@dataclass(frozen=True)
class RankedScore:
    """The rank correlation of a score with the measured changes."""

    score: str
    correlation: Estimate


@dataclass(frozen=True)
class AllocationRow:
    """Formats for a budget, chosen by one kind of cost."""

    by: str
    bits: float
    predicted: float
    measured: Estimate


@dataclass(frozen=True)
class ChosenFormat:
    """The format of one block."""

    block: str
    format: str


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Common):
    """`curvoscope sensitivity`."""

    kind: Literal["sensitivity"]
    rows: list[CostRow]
    scaled: list[ScaledChange]
    pairs: list[PairCost] = field(default_factory=list)
    ranks: list[RankedScore] = field(default_factory=list)
    budget: float | None = None
    allocations: list[AllocationRow] = field(default_factory=list)
    formats: list[ChosenFormat] = field(default_factory=list)


Document = ModelAnalysis | SweepDocument | AuditDocument | SpectrumDocument | Training | Reproduction | Sensitivity
