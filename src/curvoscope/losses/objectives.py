"""What is differentiated: losses that are means over loss terms, and how many terms a batch has.

The loss of several batches is the mean over all their terms. A loss function alone returns the mean over one batch,
so the number of terms behind it must be known: cross-entropy has one for each target that is not ignored, the mean
squared error one for each entry. For any other function it is found on the data (`counting`), unless `MeanLoss` says
it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvoscope.errors import LossError, RangeError, ShapeError
from curvoscope.losses.counting import SUM, Count, Inquiry, measure, number_of_terms
from curvoscope.losses.cross_entropy import CrossEntropyGradient, mean_loss
from curvoscope.losses.outputs import flatten
from curvoscope.operations import Operation, operations

LossFunction = Callable[[Any, Any], Tensor]
Terms = Callable[[Any, Any], int | float]

_REDUCTIONS = ("mean", "sum", "batchmean")


class Objective(ABC):
    """A mean over loss terms of a model's outputs and targets."""

    summed = False  # a sum over terms: batches add up
    couples_rows = False  # rows of a batch meet in the loss
    reads_parameters = False  # the loss depends on the parameters directly, too

    @abstractmethod
    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The mean over the terms of one batch."""

    @abstractmethod
    def terms(self, outputs: Any, targets: Any) -> int | float:
        """Their number, or the sum of their weights."""

    @abstractmethod
    def gradient(self, outputs: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors F that the loss reads, and G = dl/dF as a function of F that can be differentiated: its
        vector-Jacobian product is the product with S = d2l/dF2."""

    def seen(self, outputs: Any, parameters: Mapping[str, Tensor]) -> Any:
        """What the loss reads, made of the model's outputs and its parameters by name: the outputs alone."""
        return outputs

    def operations(self, outputs: Any, targets: Any) -> frozenset[Operation]:
        """The operations of the loss that autograd differentiates; none if G and S are in closed form."""
        return frozenset()

    def inquiry(self) -> Inquiry | None:
        """What finds out how the terms are counted; None if it is known."""
        return None

    def counted_by(self, count: Count) -> "Objective":
        """The same loss, its terms counted so."""
        return self


class CrossEntropy(Objective):
    """Mean over the targets of -log softmax(logits)[target]; targets equal to `ignore_index` do not count.

    Classes are the last axis of the logits, targets (integers) have the others; `axis=1` is the layout of
    `torch.nn.functional.cross_entropy`. With `shift`, position i predicts target i + 1, as in a causal language model.
    Floating-point targets of the shape of the logits are probabilities of the classes: the mean over positions of
    -sum_c target_c log softmax(logits)_c.
    """

    def __init__(self, ignore_index: int = -100, shift: bool = False, axis: int = -1) -> None:
        self.ignore_index, self.shift, self.axis = ignore_index, shift, axis

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The mean over the targets that count."""
        logits = logits_of(outputs)
        if self._soft(logits, targets):
            axis = self._axis(logits)
            return -(targets * logits.log_softmax(axis)).sum() * (logits.shape[axis] / logits.numel())
        return mean_loss(*self._flat(logits, targets))

    def terms(self, outputs: Any, targets: Any) -> int:
        """Targets that count."""
        logits = logits_of(outputs)
        if self._soft(logits, targets):
            return logits.numel() // logits.shape[self._axis(logits)]
        counted = targets[..., 1:] if self.shift else targets
        return int((counted != self.ignore_index).sum())

    def gradient(self, outputs: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """G in closed form."""
        logits = logits_of(outputs)
        if self._soft(logits, targets):
            axis = self._axis(logits)
            errors = targets.sum(axis, keepdim=True) * logits.softmax(axis) - targets
            return [logits], [errors * (logits.shape[axis] / logits.numel())]
        found = CrossEntropyGradient.apply(*self._flat(logits, targets))
        moved = logits.movedim(self._axis(logits), -1).shape
        return [logits], [found.view(moved).movedim(-1, self._axis(logits))]

    def _axis(self, logits: Tensor) -> int:
        return self.axis if logits.ndim > 1 else -1

    def _soft(self, logits: Tensor, targets: Any) -> bool:
        """Whether the targets are probabilities."""
        if not isinstance(targets, Tensor):
            raise LossError("targets", f"expected a tensor, got {type(targets).__name__}; pass a function of your own")
        if not targets.is_floating_point():
            return False
        if self.shift:
            raise LossError("targets", f"expected integers, got {targets.dtype}: `shift` is for words that follow")
        if targets.shape != logits.shape:
            shapes = f"{tuple(targets.shape)} of {targets.dtype} for logits {tuple(logits.shape)}"
            raise ShapeError("targets", f"got {shapes}; expected integers, or probabilities of the shape of the logits")
        return True

    def _flat(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (T, V), targets (T,) with some word where they are ignored, weights (T,)."""
        logits = logits.movedim(self._axis(logits), -1)
        if targets.shape != logits.shape[:-1]:
            raise ShapeError("targets", f"got {tuple(targets.shape)} for logits {tuple(logits.shape)}")
        if self.shift:
            targets = functional.pad(targets[..., 1:], (0, 1), value=self.ignore_index)
        counted = targets != self.ignore_index
        seen = targets[counted]
        if seen.numel() and (int(seen.min()) < 0 or int(seen.max()) >= logits.shape[-1]):
            worst = int(seen.min()) if int(seen.min()) < 0 else int(seen.max())
            raise RangeError("targets", f"{worst} is outside the vocabulary 0 to {logits.shape[-1] - 1}")
        weights = counted.to(logits.dtype) / counted.sum().clamp_min(1)
        return logits.reshape(-1, logits.shape[-1]), targets.where(counted, 0).flatten(), weights.flatten()


class MeanSquaredError(Objective):
    """Mean over all entries of (output - target)^2. With `squeeze`, axes of length one do not matter."""

    def __init__(self, squeeze: bool = False) -> None:
        self.squeeze = squeeze

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The mean over the entries."""
        return self._residual(logits_of(outputs), targets).square().mean()

    def terms(self, outputs: Any, targets: Any) -> int:
        """Entries."""
        return logits_of(outputs).numel()

    def gradient(self, outputs: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """G = 2/n (F - Y), so S = 2/n I."""
        values = logits_of(outputs)
        return [values], [self._residual(values, targets) * (2.0 / values.numel())]

    def _residual(self, values: Tensor, targets: Tensor) -> Tensor:
        if self.squeeze and values.squeeze().shape == targets.squeeze().shape:
            targets = targets.reshape(values.shape)
        if values.shape != targets.shape:
            raise ShapeError("targets", f"got {tuple(targets.shape)} for outputs {tuple(values.shape)}")
        return values - targets


class BinaryCrossEntropy(Objective):
    """Mean over all entries of the cross-entropy of sigmoid(output) with targets between 0 and 1."""

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The mean over the entries."""
        return functional.binary_cross_entropy_with_logits(logits_of(outputs), targets)

    def terms(self, outputs: Any, targets: Any) -> int:
        """Entries."""
        return logits_of(outputs).numel()

    def gradient(self, outputs: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """G = (sigmoid(F) - Y) / n."""
        logits = logits_of(outputs)
        return [logits], [(logits.sigmoid() - targets) / logits.numel()]


class MeanLoss(Objective):
    """Any loss function(outputs, targets) that returns the mean over `terms(outputs, targets)` terms.

    Without `terms` their number is found on the data. G and S are found by differentiating the function twice.

    Args:
        function: takes outputs and targets of a batch and returns a scalar.
        terms: takes the same and returns the number that the mean divides by.

    Example:
        >>> def masked(outputs, targets):
        ...     mask, values = targets
        ...     return ((outputs - values).square() * mask).sum() / mask.sum()
        >>> loss = cv.losses.MeanLoss(masked, lambda outputs, targets: float(targets[0].sum()))
    """

    def __init__(self, function: LossFunction, terms: Terms | None = None, summed: bool = False) -> None:
        self.function, self._terms, self.summed = function, terms, summed

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The function itself, once it has returned a scalar."""
        value = self.function(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise LossError("loss_fn", f"must return a scalar tensor, the mean over its terms; got {seen}")
        return value.reshape(())

    def terms(self, outputs: Any, targets: Any) -> int | float:
        """What `terms` says."""
        if self._terms is None:
            raise LossError("loss_fn", "its terms have not been counted")
        return self._terms(outputs, targets)

    def inquiry(self) -> Inquiry | None:
        """An inquiry, if `terms` was not given."""
        return Inquiry(self) if self._terms is None else None

    def counted_by(self, count: Count) -> Objective:
        """The same function, with its terms."""
        return MeanLoss(self.function, partial(number_of_terms, self.function, count), count == SUM)

    def operations(self, outputs: Any, targets: Any) -> frozenset[Operation]:
        """Those of the function."""
        leaves, rebuild = flatten(outputs)
        with torch.enable_grad():
            floating = [
                leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
                for leaf in leaves
            ]
            value = self(rebuild(floating), targets)
        return frozenset() if value.grad_fn is None else operations([value.grad_fn])

    def gradient(self, outputs: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """G by differentiating the loss in an alias of each output, so that outputs made of one another count once."""
        leaves, rebuild = flatten(outputs)
        found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        aliases = {i: leaves[i].view_as(leaves[i]) for i in found}
        value = self(rebuild([aliases.get(i, leaf) for i, leaf in enumerate(leaves)]), targets)
        if not value.requires_grad:
            raise LossError("loss_fn", "does not depend on the model's outputs, or detaches them")
        opaque = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | None)}
        _check_only_through(value, list(aliases.values()), sorted(opaque))
        gradients = torch.autograd.grad(value, list(aliases.values()), create_graph=True, allow_unused=True)
        used = [(alias, G) for alias, G in zip(aliases.values(), gradients, strict=True) if G is not None]
        return [alias for alias, _ in used], [G for _, G in used]


def _check_only_through(value: Tensor, aliases: Iterable[Tensor], opaque: list[str]) -> None:
    """Raise if the loss depends on a leaf of the graph in any other way than through the aliases."""
    seen = {alias.grad_fn for alias in aliases}
    stack = [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            where = f"inside {', '.join(opaque)}" if opaque else "that is a parameter or an attribute of the model"
            raise LossError(
                "loss_fn",
                f"depends on the parameters other than through the model's outputs: through a tensor {where}. Let the "
                "model return its tensors in tuples, lists, dicts or dataclasses; for a penalty on parameters use "
                "cv.losses.Regularised(loss, penalty)",
            )
        stack.extend(following for following, _ in node.next_functions)


def logits_of(outputs: Any) -> Tensor:
    """The tensor that the loss reads: the output itself, its `logits`, or its first entry."""
    found = outputs.get("logits", outputs) if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, Tensor):
        raise LossError("loss_fn", f"the model returned {type(outputs).__name__}, expected a tensor or `logits`")
    return found


def objective_of(loss_fn: LossFunction | None) -> Objective | None:
    """The objective behind a loss function; torch's own cross-entropy and squared error are recognised."""
    if loss_fn is None or isinstance(loss_fn, Objective):
        return loss_fn
    reduction = getattr(loss_fn, "reduction", "mean")
    if reduction not in _REDUCTIONS:
        raise LossError("loss_fn", f"has reduction={reduction!r}; expected {' or '.join(map(repr, _REDUCTIONS))}")
    if loss_fn is functional.mse_loss or (type(loss_fn) is nn.MSELoss and reduction == "mean"):
        return MeanSquaredError()
    if loss_fn is functional.cross_entropy:
        return CrossEntropy(axis=1)
    if type(loss_fn) is nn.CrossEntropyLoss and reduction == "mean":
        if loss_fn.weight is None and loss_fn.label_smoothing == 0:
            return CrossEntropy(loss_fn.ignore_index, axis=1)
        return MeanLoss(loss_fn, partial(_weights, loss_fn))
    return MeanLoss(loss_fn, getattr(loss_fn, "terms", None))


def _weights(loss: nn.CrossEntropyLoss, outputs: Any, targets: Tensor) -> float:
    """The mean divides by the sum of the targets' class weights; with probabilities as targets, by the positions."""
    found = measure(loss, outputs, targets).tally
    return found.outputs / outputs.shape[1 if outputs.ndim > 1 else 0] if found.observed is None else found.observed
