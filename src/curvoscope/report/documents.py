"""What table.json and spectrum.json hold, as far as a report shows it; keys that no report shows are not named."""

from dataclasses import dataclass
from typing import Literal

from curvoscope.analysis.advice import Advice
from curvoscope.analysis.heterogeneity import BlockRow
from curvoscope.analysis.measurements import Measurement
from curvoscope.estimate import Estimate


@dataclass(frozen=True)
class Common:
    """Of every document."""

    title: str
    question: str
    answer: str
    about: list[str]
    advice: list[Advice]
    command: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Pairs(Common):
    """`curvoscope analyze`: exact numbers of all pairs of blocks."""

    kind: Literal["analyze"]
    rows: list[BlockRow]


@dataclass(frozen=True)
class Whole:
    """The ends of the spectrum of the whole Hessian."""

    parameters: int
    largest_eigenvalue: Estimate
    smallest_eigenvalue: Estimate
    critical_learning_rate: Estimate | None


@dataclass(frozen=True)
class Blocks(Common):
    """`curvoscope analyze MODEL`."""

    kind: Literal["analyze MODEL"]
    rounding: float
    rows: list[Measurement]
    hessian: Whole


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of one block."""

    block: str
    size: int
    largest_eigenvalue: Estimate
    smallest_eigenvalue: Estimate
    quantiles: dict[str, float | None]
    negative_share: Estimate
    near_zero_share: Estimate
    near_zero: float


@dataclass(frozen=True)
class JensenShannon:
    """Distances (k, k) between k spectra, and the size above which they are compared."""

    names: list[str]
    distance: list[list[float]]
    threshold: list[list[float]]


@dataclass(frozen=True)
class Spectra(Common):
    """`curvoscope spectrum`."""

    kind: Literal["spectrum"]
    blocks: list[Spectrum]
    jensen_shannon: JensenShannon
    hessian: Whole
