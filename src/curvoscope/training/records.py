"""What a monitor writes down: one record a measurement, one incident for whatever kept it from measuring."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

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
    condition: as in `analysis.scaling`, None where P is above 400. negative_share: Σ_{λ<0} |λ| / Σ |λ|, the share of
    negative curvature. blocks: norms of the two parts of each diagonal block.
    """

    smallest_eigenvalue: Estimate
    trace: Estimate
    frobenius_norm: Estimate
    effective_rank: Estimate | None  # None for H = 0
    condition: float | None
    negative_share: Estimate | None  # None for H = 0
    blocks: dict[str, BlockNorms]

    @property
    def functional_share(self) -> float | None:
        """Σ_b |H_f,bb|_F² / Σ_b (|H_o,bb|_F² + |H_f,bb|_F²) over the diagonal blocks."""
        outer, functional = (
            sum(getattr(norms, part).value ** 2 for norms in self.blocks.values()) for part in ("outer", "functional")
        )
        return functional / (outer + functional) if outer + functional else None


@dataclass(frozen=True)
class Record:
    """Curvature on the probe after `step` steps.

    loss: the one given to `step()`, of the training batch; probe_loss: that of the probe, where everything else is
    measured. largest_eigenvalue: λ_max, the sharpness. gradient_curvature: g·Hg/g·g. critical_sharpness: 2/η_c, η_c
    the smallest learning rate at which the optimizer's last step would not have lowered the probe's loss; None where
    no step was recorded, or the step leads uphill or downhill as far as one looks. attention: of each layer. seconds:
    what the measurement took.
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

    def scalars(self) -> dict[str, float]:
        """The finite numbers by name, without error bars: what a TensorBoard shows."""
        found: dict[str, Any] = {
            "probe_loss": self.probe_loss,
            "largest_eigenvalue": self.largest_eigenvalue,
            "edge": self.edge,
            "edge_ratio": self.edge_ratio,
            "gradient_norm": self.gradient_norm,
            "gradient_curvature": self.gradient_curvature,
            "critical_sharpness": self.critical_sharpness,
        }
        for layer, summary in self.attention.items():
            found[f"attention_entropy/{layer}"] = summary.entropy
            found[f"attention_variance/{layer}"] = summary.variance
        if self.details is not None:
            names = ("smallest_eigenvalue", "trace", "frobenius_norm", "effective_rank", "condition", "negative_share")
            found |= {name: getattr(self.details, name) for name in names}
            for block, norms in self.details.blocks.items():
                found |= {f"outer_norm/{block}": norms.outer, f"functional_norm/{block}": norms.functional}
        numbers = {name: float(value) for name, value in found.items() if value is not None}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

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
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _estimate(facts: Mapping[str, Any] | None) -> Estimate | None:
    if facts is None:
        return None
    return Estimate(**{**facts, "degrees": math.inf if facts["degrees"] is None else facts["degrees"]})
