"""A model evaluated at copies of its weights, and a first look at its loss on all batches."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvoscope.blocks import Blocks
from curvoscope.errors import DeviceError, EmptyError, LossError, NonFiniteError
from curvoscope.operators.batches import Batch
from curvoscope.operators.distributed import Ranks
from curvoscope.operators.objectives import CrossEntropy, MeanSquaredError, Objective

_SAME_LOSS = 1e-5  # relative: models may add up in another order, and in float32
_ROUNDING = 64  # times epsilon: what two identical calls may differ by, with threads adding in different orders


class Snapshot:
    """The model at the weights that it has now: copies, on one device, in the precision of the computation.

    The precision is that of the widest parameter of the blocks, float32 at least.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, device: torch.device) -> None:
        self._model, self.device = model, device
        named = dict(model.named_parameters())
        structural = list(nn.Module.named_parameters(model, remove_duplicate=True))
        places = {id(tensor): path for path, tensor in structural}
        # Where parameters stand in the tree of modules, by the names that the model gives them; mostly the same.
        self.paths = {name: places[id(tensor)] for name, tensor in named.items() if id(tensor) in places}
        self.dtype = torch.float32
        for name in blocks.parameters:
            self.dtype = torch.promote_types(self.dtype, named[name].dtype)
        self.weights = {path: self._copy(tensor) for path, tensor in structural}
        self._buffers = {path: self._copy(tensor) for path, tensor in nn.Module.named_buffers(model)}

    def weight(self, name: str) -> Tensor:
        """The copy of a parameter."""
        return self.weights[self.paths[name]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that the model's function depends on, by path."""
        return {**self.weights, **self._buffers}

    def moved(self, batch: Batch) -> Batch:
        """The batch where the copies are."""
        return batch.to(self.device, self.dtype)

    def leaves(self, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All weights by path, and those of `names`, which alone have derivatives."""
        chosen = {self.paths[name] for name in names}
        weights = {path: tensor.detach().requires_grad_(path in chosen) for path, tensor in self.weights.items()}
        return weights, {name: weights[self.paths[name]] for name in names}

    def __call__(self, weights: Mapping[str, Tensor], batch: Batch) -> Any:
        """The model's outputs at these weights. Tied parameters are one."""
        buffers = {path: buffer.clone() for path, buffer in self._buffers.items()}
        return functional_call(self._model, {**weights, **buffers}, batch.arguments, batch.keywords, tie_weights=True)

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to(self.device, copy=True)
        return copy.to(self.dtype) if copy.is_floating_point() else copy


@dataclass(frozen=True)
class Survey:
    """The loss, the mean over all terms, and the number of terms of each micro-batch.

    `total` is their sum, over those of other processes too. `written`: bytes that the forward pass of the largest
    micro-batch writes.
    """

    loss: float
    terms: tuple[float, ...]
    total: float
    written: int = 0

    @property
    def weights(self) -> list[float]:
        """Share of each micro-batch in the mean."""
        return [count / self.total for count in self.terms]


def survey(model: Snapshot, objective: Objective, batches: Iterable[Batch], ranks: Ranks) -> Survey:
    """The losses of all micro-batches, of those of the other ranks too."""
    with ranks.together(), Written() as written:
        losses, counts = _losses(model, objective, batches, written)
    summed = sum(value * count for value, count in zip(losses, counts, strict=True))
    shares = ranks.exchange((summed, sum(counts)))
    total = float(sum(count for _, count in shares))
    if not total:
        raise EmptyError("batches", "every target is ignored, or no rank has batches: the mean has no terms")
    return Survey(sum(share for share, _ in shares) / total, tuple(counts), total, written.most)


class Written(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make inside; `most` is the largest count between two `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0

    def begin(self) -> None:
        """Count from zero."""
        self._now = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; what it wrote into its arguments, or returns a view of, is not new."""
        found = func(*args, **(kwargs or {}))
        held = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = (leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and _storage(leaf) not in held)
        self._now += sum(leaf.nbytes for leaf in made)
        self.most = max(self.most, self._now)
        return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _losses(
    model: Snapshot, objective: Objective, batches: Iterable[Batch], written: Written
) -> tuple[list[float], list[float]]:
    """Loss and number of terms of each micro-batch; the first one is run twice, to see whether its loss changes."""
    losses, counts = [], []
    for position, batch in enumerate(batches):
        written.begin()
        value, count = _value(model, objective, batch)
        written.begin()
        if position == 0:
            check_same(value, _value(model, objective, batch)[0], model.dtype)
        losses.append(value)
        counts.append(float(count))
    return losses, counts


def check_same(value: float, again: float, dtype: torch.dtype) -> None:
    """Raise where the loss of two identical calls differs by more than rounding."""
    if abs(again - value) > _ROUNDING * torch.finfo(dtype).eps * abs(value):
        raise LossError(
            "model",
            f"two identical calls gave the losses {value:.8g} and {again:.8g}; call model.eval(), and remove what is "
            "random in it",
        )


def _value(model: Snapshot, objective: Objective, batch: Batch) -> tuple[float, int | float]:
    batch = model.moved(batch)
    with torch.no_grad():
        outputs = model(model.weights, batch)
    return loss_of(outputs, objective, batch)


def loss_of(outputs: Any, objective: Objective, batch: Batch) -> tuple[float, int | float]:
    """The loss of one batch, checked, and its number of terms."""
    count = objective.terms(outputs, batch.targets)
    if not count:
        return 0.0, 0
    value = objective(outputs, batch.targets)
    if value.requires_grad:
        raise LossError(
            "loss_fn", "uses parameters directly, beside the model's outputs: let the model return what it needs"
        )
    if not bool(torch.isfinite(value)):
        raise NonFiniteError("loss_fn", f"the loss is {float(value)} on batch {batch.index}")
    return float(value), count


def objective_of_model(model: Snapshot, batch: Batch) -> Objective:
    """The objective that agrees with the loss which the model itself computes from its labels."""
    batch = model.moved(batch)
    labelled = Batch(batch.arguments, {**batch.keywords, "labels": batch.targets}, None, batch.index)
    with torch.no_grad():
        try:
            outputs = model(model.weights, labelled)
        except TypeError as error:
            message = f"is None, and the model takes no `labels` ({error}); give loss_fn(outputs, targets)"
            raise LossError("loss_fn", message) from error
        expected = getattr(outputs, "loss", None)
        if not isinstance(expected, Tensor):
            raise LossError("loss_fn", "is None, and the model returns no `loss`; give loss_fn(outputs, targets)")
        errors: dict[Objective, float] = {}
        for candidate in (CrossEntropy(shift=True), CrossEntropy(), MeanSquaredError()):
            try:
                value = candidate(outputs, batch.targets)
            except (ValueError, TypeError, RuntimeError):  # targets of another kind
                continue
            errors[candidate] = abs(float(value) - float(expected))
    ranked = sorted(errors, key=errors.__getitem__)
    size = abs(float(expected))
    # Before training all words are nearly alike, and so are the losses of different targets: one must stand out.
    if not ranked or errors[ranked[0]] > _SAME_LOSS * size:
        raise LossError("loss_fn", "is None, and the model's loss is none that is known; give loss_fn(outputs, labels)")
    if len(ranked) > 1 and errors[ranked[1]] <= 10 * max(errors[ranked[0]], torch.finfo(torch.float32).eps * size):
        raise LossError("loss_fn", "is None, and two losses agree with the model's here; give CrossEntropy(...)")
    return ranked[0]


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device given, else the one where all parameters are."""
    found = {tensor.device for tensor in model.parameters()}
    if len(found) > 1 and device is None:
        seen = ", ".join(sorted(map(str, found)))
        raise DeviceError("model", f"has parameters on {seen}; move it with model.to(...), or give device=")
    if torch.device("meta") in found:
        raise DeviceError("model", "has parameters on the meta device, with no data; load its weights first")
    return found.pop() if device is None else torch.device(device)
