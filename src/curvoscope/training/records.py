"""What a monitor writes down: one record per measurement, one incident for whatever prevented one."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from curvoscope.analysis.propagation import AttentionSummary
from curvoscope.estimate import Estimate
from curvoscope.training.updates import Update


@dataclass(frozen=True)
class BlockNorms:
    """Frobenius norms of the two parts of one diagonal block.

    Args:
        outer: |H_o,bb|_F.
        functional: |H_f,bb|_F.

    Example:
        >>> import torch
        >>> from curvoscope.training import CurvatureMonitor
        >>> probe = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.ones(2, 1))]
        >>> monitor = CurvatureMonitor(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), probe)
        >>> norms = monitor.measure().details.blocks["weight"]  # H is diag(4, 1)
        >>> round(float(norms.outer), 4), round(float(norms.functional), 4)
        (4.1231, 0.0)
    """

    outer: Estimate
    functional: Estimate


@dataclass(frozen=True)
class Details:
    """Quantities that take many products with the Hessian H (P, P), and so are measured less often than the rest.

    Args:
        smallest_eigenvalue: λ_min.
        trace: tr H.
        frobenius_norm: |H|_F.
        effective_rank: the stable rank |H|_F²/|H|_2²; None for H = 0.
        condition: as in `analysis.scaling`, None if P is above 400.
        negative_curvature_share: Σ_{λ<0} |λ| / Σ |λ| (not the share of eigenvalues that are negative); None for H = 0.
            Off by some hundredths beyond its standard error, as a few Lanczos steps do not resolve the smallest
            eigenvalues.
        blocks: norms of the two parts of each diagonal block.

    Example:
        >>> import torch
        >>> from curvoscope.training import CurvatureMonitor
        >>> probe = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.ones(2, 1))]
        >>> monitor = CurvatureMonitor(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), probe)
        >>> found = monitor.measure().details  # H is diag(4, 1)
        >>> round(float(found.smallest_eigenvalue), 4), round(float(found.trace), 4), found.functional_share
        (1.0, 5.0, 0.0)
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

    Args:
        step: the number of training steps so far.
        loss: of the training batch, as given to `CurvatureMonitor.step`.
        lr: the learning rate of the step.
        probe_loss: the loss of the probe, on which everything else is measured.
        largest_eigenvalue: λ_max, the sharpness.
        gradient_norm: |g|.
        gradient_curvature: g·Hg/g·g; None for g = 0.
        critical_sharpness: 2/η_c, η_c the smallest learning rate found at which the optimizer's last step would not
            have lowered the probe's loss; None if no step was recorded, or if no such learning rate was found.
        attention: entropy and spread of the rows, per layer.
        details: quantities that are measured less often; None if they were not measured.
        seconds: the duration of the measurement.
        update: the effect of the optimizer's last step on the probe's loss, by block; None if no step was recorded.

    Example:
        >>> import torch
        >>> from curvoscope.training import CurvatureMonitor
        >>> probe = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.ones(2, 1))]
        >>> monitor = CurvatureMonitor(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), probe)
        >>> record = monitor.measure(lr=0.1)  # λ_max is 4
        >>> record.edge, round(record.edge_ratio, 3), round(record.scalars()["largest_eigenvalue"], 3)
        (20.0, 0.2, 4.0)
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
    update: Update | None = None

    @property
    def edge(self) -> float | None:
        """2/lr: gradient descent on a quadratic diverges if λ_max is above it."""
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
        if self.update is not None:
            whole = ("change", "predicted", "sharpness", "functional")
            found |= {(f"update_{name}", ""): getattr(self.update, name) for name in whole}
            for name, one in (self.update.blocks | self.update.heads).items():
                found |= {("update_curvature", name): one.curvature, ("update_share", name): one.predicted}
        for (quantity, of), number in found.items():
            if number is not None and math.isfinite(number):
                yield RecordedValue(
                    quantity, of, float(number), number.stderr if isinstance(number, Estimate) else None
                )

    def scalars(self) -> dict[str, float]:
        """The numbers by name, without error bars, as loggers get them.

        No name is a folder of another, as some of them keep a file per name.
        """
        return {f"{one.quantity}/{one.of}".removesuffix("/"): one.value for one in self.values()}

    def facts(self) -> dict[str, Any]:
        """The record as JSON values; `from_facts` reads it back."""
        found: dict[str, Any] = _plain(asdict(self))
        return found

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "Record":
        """A record from the JSON values that `facts` returned; `update` may be missing.

        Args:
            facts: the values by name.

        Returns:
            The record, with its Estimates.
        """
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
        if known.get("update") is not None:  # records of earlier versions have none
            known["update"] = Update.from_facts(known["update"])
        return cls(**known)


@dataclass(frozen=True)
class Incident:
    """Why a measurement was not made, or why the monitor paused.

    Args:
        step: the number of training steps so far.
        kind: "paused", "resumed" or "failed".
        message: the reason.

    Example:
        >>> import torch
        >>> from curvoscope.training import CurvatureMonitor
        >>> probe = [(torch.ones(1, 2), torch.ones(1, 1))]
        >>> monitor = CurvatureMonitor(torch.nn.Linear(2, 1), torch.nn.MSELoss(), probe)
        >>> monitor.step(loss=float("nan"), lr=0.1)
        >>> monitor.incidents
        [Incident(step=1, kind='paused', message='the loss is nan')]
    """

    step: int
    kind: str
    message: str = field(default="")

    def facts(self) -> dict[str, Any]:
        """The incident as JSON values."""
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
