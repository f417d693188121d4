"""What a monitor writes down: one record a measurement, one incident for whatever kept it from measuring."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from curvoscope.analysis.propagation import AttentionSummary
from curvoscope.estimate import Estimate


@dataclass(frozen=True)
class BlockNorms:
    """Frobenius norms of the outer and of the functional part of one diagonal block."""

    outer: Estimate
    functional: Estimate


@dataclass(frozen=True)
class Details:
    """What takes many products with the Hessian H (P, P), so it is measured more seldom than the rest.

    smallest_eigenvalue: λ_min. trace: tr H. frobenius_norm: |H|_F. effective_rank: the stable rank |H|_F²/|H|_2².
    condition: as in `analysis.scaling`, None where P is above 400. negative_curvature_share:
    Σ_{λ<0} |λ| / Σ |λ|; not the share of eigenvalues that are negative; off by some hundredths beyond its standard
    error, as few steps of Lanczos do not resolve the smallest eigenvalues. blocks: norms of the two parts of each
    diagonal block.
    """

    smallest_eigenvalue: Estimate
    trace: Estimate
    frobenius_norm: Estimate
    effective_rank: Estimate | None  # None for H = 0
    condition: float | None
    negative_curvature_share: Estimate | None  # None for H = 0
    blocks: dict[str, BlockNorms]

    @property
    def functional_share(self) -> float | None:
        """Σ_b |H_f,bb|_F² / Σ_b (|H_o,bb|_F² + |H_f,bb|_F²) over the diagonal blocks."""
        outer, functional = (
            sum(getattr(norms, part).value ** 2 for norms in self.blocks.values()) for part in ("outer", "functional")
        )
        return functional / (outer + functional) if outer + functional else None


class RecordedValue(NamedTuple):
    """One number of a record; `of`: the block or layer that it belongs to, "" for the whole; stderr: None if exact."""

    quantity: str
    of: str
    value: float
    stderr: float | None


@dataclass(frozen=True)
class Record:
    """Curvature on the probe after `step` steps.

    loss: the one given to `step()`, of the training batch; probe_loss: that of the probe, where everything else is
    measured. largest_eigenvalue: λ_max, the sharpness. gradient_curvature: g·Hg/g·g. critical_sharpness: 2/η_c, η_c
    the smallest learning rate found at which the optimizer's last step would not have lowered the probe's loss; None
    where no step was recorded, or the step leads uphill or downhill as far as one looks. attention: of each layer.
    seconds: what the measurement took.
    """

    step: int
    loss: float | None
    lr: float | None
    probe_loss: float
    largest_eigenvalue: Estimate
    gradient_norm: float
    gradient_curvature: float | None  # None for g = 0
    critical_sharpness: Estimate | None
    attention: dict[str, AttentionSummary]
    details: Details | None
    seconds: float

    @property
    def edge(self) -> float | None:
        """2/lr: gradient descent on a quadratic diverges where λ_max is above it."""
        return 2 / self.lr if self.lr else None

    @property
    def edge_ratio(self) -> float | None:
        """λ_max lr/2: above 1, beyond the edge of stability of plain gradient descent."""
        return None if self.lr is None else self.largest_eigenvalue.value * self.lr / 2

    def values(self) -> Iterator["RecordedValue"]:
        """The finite numbers, one by one."""
        found: dict[tuple[str, str], Any] = {
            (name, ""): getattr(self, name)
            for name in (
                *("loss", "lr", "probe_loss", "largest_eigenvalue", "edge", "edge_ratio"),
                *("gradient_norm", "gradient_curvature", "critical_sharpness"),
            )
        }
        for layer, summary in self.attention.items():
            found |= {(f"attention_{name}", layer): value for name, value in asdict(summary).items()}
        if self.details is not None:
            numbers = [one.name for one in fields(Details) if one.name != "blocks"]
            found |= {(name, ""): getattr(self.details, name) for name in (*numbers, "functional_share")}
            for block, norms in self.details.blocks.items():
                found |= {("outer_norm", block): norms.outer, ("functional_norm", block): norms.functional}
        for (quantity, of), number in found.items():
            if number is not None and math.isfinite(number):
                yield RecordedValue(
                    quantity, of, float(number), number.stderr if isinstance(number, Estimate) else None
                )

    def scalars(self) -> dict[str, float]:
        """The numbers by name, without error bars: what a TensorBoard shows."""
        return {f"{one.quantity}/{one.of}".removesuffix("/"): one.value for one in self.values()}

    def facts(self) -> dict[str, Any]:
        """For JSON; `from_facts` reads it back."""
        found: dict[str, Any] = _plain(asdict(self))
        return found

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "Record":
        """The inverse of `facts`."""
        known: dict[str, Any] = dict(facts)
        known["largest_eigenvalue"] = _estimate(known["largest_eigenvalue"])
        known["critical_sharpness"] = _estimate(known["critical_sharpness"])
        known["attention"] = {name: AttentionSummary(**one) for name, one in known["attention"].items()}
        if known["details"] is not None:
            details = dict(known["details"])
            blocks = details.pop("blocks")
            details = {name: _estimate(value) if name != "condition" else value for name, value in details.items()}
            details["blocks"] = {
                name: BlockNorms(*(_estimate(norms[part.name]) for part in fields(BlockNorms)))  # type: ignore[arg-type]
                for name, norms in blocks.items()
            }
            known["details"] = Details(**details)
        return cls(**known)


@dataclass(frozen=True)
class Incident:
    """Why a measurement was not made, or the monitor paused: "paused", "resumed" or "failed"."""

    step: int
    kind: str
    message: str = field(default="")

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _plain(value: Any) -> Any:
    """Infinity has no word in JSON: the infinite degrees of freedom of an Estimate become null."""
    if isinstance(value, Estimate):
        value = value.facts()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _estimate(facts: Mapping[str, Any] | None) -> Estimate | None:
    if facts is None:
        return None
    return Estimate(**{**facts, "degrees": math.inf if facts["degrees"] is None else facts["degrees"]})
