"""The loss as a function of the weights near those of a model: values, gradients and directions, on copies."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from curvoscope import checks
from curvoscope.autodiff.batches import Batch, Batches
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.graph import unless_unbatched
from curvoscope.blocks import Blocks
from curvoscope.curvature import ModelHessian
from curvoscope.errors import DtypeError, LossError, NonFiniteError, RangeError, ShapeError
from curvoscope.estimate import Estimate, lanczos
from curvoscope.families.block_maps import chosen_blocks
from curvoscope.losses import LossFunction, Objective, objective_of
from curvoscope.settings import chosen_seed

_WORKSPACE = 2**28  # bytes for points at once
_MOST_AT_ONCE = 64
_AGREE = 1e3  # units of rounding that a batched and a single evaluation may differ by
_NAMED = re.compile(r"(top|bottom)([1-9][0-9]*)?")


@dataclass(frozen=True, eq=False)
class Direction:
    """A unit vector (P,) in float64, over the blocks in their order, and its original `length`."""

    name: str
    vector: Tensor
    length: float
    eigenvalue: Estimate | None = None


class Surface:
    """L(w + δ), the mean over all loss terms of all batches, for δ (P,) in the blocks of a model that has weights w.

    The model runs at copies of its weights, in its own precision (float32 at least); sums over batches are float64.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        batches: Iterable[Any],
        blocks: Blocks | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        blocks = chosen_blocks(model, blocks)
        self.engine = Autodiff(model, objective_of(loss_fn), Batches(batches), blocks, device=device)
        self.hessian = ModelHessian(self.engine)
        self.blocks, self.size = blocks, self.hessian.shape[0]
        self.names = sorted(blocks.parameters)
        weights = {name: self.engine.snapshot.weight(name) for name in self.names}
        self.weights = blocks.gather(weights).double()
        self.epsilon = torch.finfo(self.engine.dtype).eps
        self._gradient: Tensor | None = None
        self._can_batch, self._is_checked = True, False

    @property
    def loss(self) -> float:
        """L(w)."""
        return self.engine.survey.loss

    def objective_of_rows(self) -> Objective:
        """The objective, for functions that ask for the loss of single rows."""
        objective = self.engine.objective
        if objective.summed or objective.couples_rows or objective.reads_parameters:
            found = "is a sum" if objective.summed else "compares rows" if objective.couples_rows else "has a penalty"
            raise LossError("loss_fn", f"{found}; here it must be a mean over terms of single rows, without a penalty")
        return objective

    # ---- values and gradients

    def losses(self, displacements: Tensor) -> Tensor:
        """L(w + δ) for displacements (n, P): (n,) in float64."""
        found = torch.zeros(len(displacements), dtype=torch.float64)

        def visit(weight: float, batch: Batch) -> None:
            def loss(outputs: Any) -> Tensor:
                return self.engine.objective(outputs, batch.targets)

            found.add_(self.evaluate(displacements, batch, loss), alpha=weight)

        self.engine.walk(visit)
        return found

    def gradient(self, displacement: Tensor | None = None) -> Tensor:
        """∇L(w + δ), (P,) in float64; that of δ = 0 is kept."""
        if displacement is None and self._gradient is not None:
            return self._gradient
        total = torch.zeros_like(self.weights)

        def visit(weight: float, batch: Batch) -> None:
            total.add_(self.batch_gradient(batch, displacement), alpha=weight)

        self.engine.walk(visit)
        if displacement is None:
            self._gradient = total
        return total

    def batch_gradient(self, batch: Batch, displacement: Tensor | None = None) -> Tensor:
        """The gradient of one batch's mean loss, (P,) in float64; inside `engine.walk` only."""
        weights, leaves = self.engine.snapshot.leaves(self.names)
        if displacement is not None:
            leaves = {name: leaf.requires_grad_() for name, leaf in self.moved(displacement).items()}
            weights |= {self.engine.snapshot.paths[name]: leaf for name, leaf in leaves.items()}
        value = self.engine.loss(weights, batch)
        found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        return self.blocks.gather(dict(zip(leaves, found, strict=True))).double()

    def moved(self, displacement: Tensor) -> dict[str, Tensor]:
        """The parameters of the blocks at w + δ by name: δ (P,), or (n, P) for tensors with a leading axis n."""
        snapshot, lead = self.engine.snapshot, displacement.shape[:-1]
        change = {}
        for name in self.names:
            weight = snapshot.weight(name)
            change[name] = torch.zeros(*lead, *weight.shape, dtype=torch.float64, device=weight.device)
        self.blocks.scatter(displacement.to(self.engine.device, torch.float64), change)
        return {name: (snapshot.weight(name).double() + move).to(self.engine.dtype) for name, move in change.items()}

    def evaluate(self, displacements: Tensor, batch: Batch, function: Callable[[Any], Tensor]) -> Tensor:
        """function(what the loss reads at w + δ), of shape (...), for displacements (n, P): (n, ...) in float64.

        Several points at once if they fit the workspace; inside `engine.walk` only.
        """

        def value(moved: dict[str, Tensor]) -> Tensor:
            paths, weights = self.engine.snapshot.paths, dict(self.engine.snapshot.weights)
            weights.update({paths[name]: tensor for name, tensor in moved.items()})
            outputs = self.engine.snapshot(weights, batch)
            return function(self.engine.objective.seen(outputs, self.engine.snapshot.parameters(weights)))

        found = []
        with torch.no_grad():
            step = self._points_at_once(batch) if len(displacements) > 1 and self._can_batch else 1
            for start in range(0, len(displacements), step):
                found.append(self._values(displacements[start : start + step], value).double().cpu())
        return torch.cat(found)

    def _values(self, displacements: Tensor, value: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        if len(displacements) > 1 and self._can_batch:
            many: Tensor | None = unless_unbatched(lambda: torch.func.vmap(value)(self.moved(displacements)))
            if many is not None and (self._is_checked or self._agrees(many[0], value(self.moved(displacements[0])))):
                self._is_checked = True
                return many
            self._can_batch = False
        return torch.stack([value(self.moved(one)) for one in displacements])

    def _agrees(self, one: Tensor, other: Tensor) -> bool:
        return float((one - other).abs().max()) <= _AGREE * self.epsilon * float(other.abs().max())

    def _points_at_once(self, batch: Batch) -> int:
        """The number of points that fit the workspace, from what the graph of one forward pass would keep."""
        held = sum(self.engine.snapshot.weight(name).nbytes for name in self.names)

        def count(tensor: Tensor) -> Tensor:
            nonlocal held
            held += tensor.nbytes
            return tensor

        weights, _ = self.engine.snapshot.leaves(self.names)
        with torch.enable_grad(), saved_tensors_hooks(count, lambda tensor: tensor):
            self.engine.loss(weights, batch)
        return max(1, min(_MOST_AT_ONCE, _WORKSPACE // max(1, held)))

    # ---- directions

    def direction(self, wanted: str | Tensor, seed: int | None = None, argument: str = "direction") -> Direction:
        """A direction by name or by its vector.

        "gradient": downhill, -∇L; its length is |∇L|. "top", "top2", ...: eigenvectors of the largest eigenvalues of
        the Hessian, "bottom", "bottom2", ... of the smallest; both turned downhill. "random": normal, so uniform on the
        sphere. A tensor (P,): for example an optimizer's step, over the blocks in their order.
        """
        if isinstance(wanted, Tensor):
            return self._given(wanted, argument)
        named = _NAMED.fullmatch(wanted)
        if named:
            return self._eigenvector(wanted, named.group(1), int(named.group(2) or 1), seed, argument)
        checks.choice(argument, wanted, ("gradient", "top", "bottom", "random"))
        if wanted == "random":
            generator = torch.Generator().manual_seed(chosen_seed(seed))
            vector = torch.randn(self.size, generator=generator, dtype=torch.float64).to(self.engine.device)
            return Direction("random", vector / vector.norm(), 1.0)
        gradient = self.gradient()
        length = float(gradient.norm())
        if not length:
            raise RangeError(argument, "the gradient is zero here: it has no direction; give another")
        return Direction("gradient", -gradient / length, length)

    def _given(self, vector: Tensor, argument: str) -> Direction:
        if not vector.is_floating_point():
            raise DtypeError(argument, f"expected floating point, got {vector.dtype}")
        if tuple(vector.shape) != (self.size,):
            order = ", ".join(self.blocks.names[:3])
            raise ShapeError(argument, f"got {tuple(vector.shape)}, expected ({self.size},) over the blocks {order}...")
        checks.floating(argument, vector)
        length = float(vector.double().norm())
        if not length:
            raise RangeError(argument, "is the zero vector: it has no direction")
        return Direction("given", vector.detach().to(self.engine.device, torch.float64) / length, length)

    def _eigenvector(self, name: str, end: str, rank: int, seed: int | None, argument: str) -> Direction:
        if rank > self.size:
            raise RangeError(argument, f"got {name!r}, but the Hessian has {self.size} eigenvalues")
        found = lanczos(self.hessian.total, rank, "LA" if end == "top" else "SA", seed=seed, vectors=True)
        column = 0 if end == "top" else rank - 1  # values ascend: the k-th largest of k is the first
        assert found.vectors is not None
        vector = found.vectors[:, column].double()
        vector = vector / vector.norm()
        if float(self.gradient() @ vector) > 0:
            vector = -vector
        return Direction(name, vector, 1.0, found[column])


def positions(argument: str, values: Iterable[float] | Tensor) -> Tensor:
    """Check that distances or learning rates are positive, finite and ascending, and return them as (n,) in float64."""
    found = torch.as_tensor(values if isinstance(values, Tensor) else list(values), dtype=torch.float64).cpu()
    if found.ndim != 1 or not found.numel():
        raise ShapeError(argument, f"got shape {tuple(found.shape)}, expected a list of positive numbers")
    if not bool(torch.isfinite(found).all()):
        raise NonFiniteError(argument, "has entries that are NaN or infinite")
    if float(found[0]) <= 0 or bool((found.diff() <= 0).any()):
        raise RangeError(argument, f"starts with {float(found[0]):g}; expected positive numbers in ascending order")
    return found


def finite(losses: Tensor, argument: str, places: Tensor) -> Tensor:
    """Check that `losses` are finite and return them; the error names the first place at which they are not."""
    bad = ~torch.isfinite(losses)
    if bool(bad.any()):
        place = float(places.expand_as(losses)[bad][0])
        raise NonFiniteError(
            argument, f"the loss is {float(losses[bad][0])} at distance {place:.3g}; use a smaller one"
        )
    return losses
