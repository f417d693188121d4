"""What is differentiated: losses that are means over loss terms, and how many terms a batch has.

The loss of several batches is the mean over all their terms. A loss function alone returns the mean over one batch,
so the number of terms behind it must be known: cross-entropy has one for each target that is not ignored, the mean
squared error one for each entry. For any other loss rows are counted, unless it says better (`MeanLoss`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvoscope.errors import LossError, RangeError, ShapeError
from curvoscope.operators.cross_entropy import CrossEntropyGradient, mean_loss

LossFunction = Callable[[Any, Any], Tensor]
Terms = Callable[[Any, Any], int | float]


class Objective(ABC):
    """A mean over loss terms of a model's outputs and targets."""

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


class CrossEntropy(Objective):
    """Mean over the targets of -log softmax(logits)[target]; targets equal to `ignore_index` do not count.

    Classes are the last axis of the logits, targets (integers) have the others; `axis=1` is the layout of
    `torch.nn.functional.cross_entropy`. With `shift`, position i predicts target i + 1, as in a causal language model.
    """

    def __init__(self, ignore_index: int = -100, shift: bool = False, axis: int = -1) -> None:
        self.ignore_index, self.shift, self.axis = ignore_index, shift, axis

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The mean over the targets that count."""
        return mean_loss(*self._flat(logits_of(outputs), targets))

    def terms(self, outputs: Any, targets: Any) -> int:
        """Targets that count."""
        counted = targets[..., 1:] if self.shift else targets
        return int((counted != self.ignore_index).sum())

    def gradient(self, outputs: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """G in closed form."""
        logits = logits_of(outputs)
        found = CrossEntropyGradient.apply(*self._flat(logits, targets))
        moved = logits.movedim(self._axis(logits), -1).shape
        return [logits], [found.view(moved).movedim(-1, self._axis(logits))]

    def _axis(self, logits: Tensor) -> int:
        return self.axis if logits.ndim > 1 else -1

    def _flat(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (T, V), targets (T,) with some word where they are ignored, weights (T,)."""
        logits = logits.movedim(self._axis(logits), -1)
        if targets.shape != logits.shape[:-1]:
            raise ShapeError("targets", f"got {tuple(targets.shape)} for logits {tuple(logits.shape)}")
        if targets.is_floating_point():
            raise LossError("targets", f"expected integers, got {targets.dtype}; pass a loss function of your own")
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
    """Mean over all entries of (output - target)^2."""

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
        if values.shape != targets.shape:
            raise ShapeError("targets", f"got {tuple(targets.shape)} for outputs {tuple(values.shape)}")
        return values - targets


class MeanLoss(Objective):
    """Any loss function(outputs, targets) that returns the mean over `terms(outputs, targets)` terms.

    Without `terms` each row (entry of the targets' first axis) is one. G and S are found by differentiating it twice.
    """

    def __init__(self, function: LossFunction, terms: Terms | None = None) -> None:
        self.function, self._terms = function, terms

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The function itself, once it has returned a scalar."""
        value = self.function(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise LossError("loss_fn", f"must return a scalar tensor, the mean over its terms; got {seen}")
        return value.reshape(())

    def terms(self, outputs: Any, targets: Any) -> int | float:
        """What `terms` says, or the number of rows."""
        if self._terms is not None:
            return self._terms(outputs, targets)
        for tree in (targets, outputs):
            for leaf in tree_flatten(tree)[0]:
                if isinstance(leaf, Tensor) and leaf.ndim:
                    return leaf.shape[0]
        return 1

    def gradient(self, outputs: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """G by differentiating the loss in an alias of each output, so that outputs made of one another count once."""
        leaves, structure = tree_flatten(outputs)
        found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        aliases = {i: leaves[i].view_as(leaves[i]) for i in found}
        value = self(tree_unflatten([aliases.get(i, leaf) for i, leaf in enumerate(leaves)], structure), targets)
        if not value.requires_grad:
            raise LossError("loss_fn", "does not depend on the model's outputs, or detaches them")
        gradients = torch.autograd.grad(value, list(aliases.values()), create_graph=True, allow_unused=True)
        used = [(alias, G) for alias, G in zip(aliases.values(), gradients, strict=True) if G is not None]
        if not used:
            raise LossError("loss_fn", "does not depend on the model's outputs, but on parameters directly")
        return [alias for alias, _ in used], [G for _, G in used]


def logits_of(outputs: Any) -> Tensor:
    """The tensor that the loss reads: the output itself, its `logits`, or its first entry."""
    found = getattr(outputs, "logits", outputs)
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, Tensor):
        raise LossError("loss_fn", f"the model returned {type(outputs).__name__}, expected a tensor or `logits`")
    return found


def objective_of(loss_fn: LossFunction | None) -> Objective | None:
    """The objective behind a loss function; torch's own cross-entropy and squared error are recognised."""
    if loss_fn is None or isinstance(loss_fn, Objective):
        return loss_fn
    if getattr(loss_fn, "reduction", "mean") != "mean":
        raise LossError("loss_fn", f"has reduction={loss_fn.reduction!r}; expected 'mean'")  # type: ignore[attr-defined]
    if loss_fn is functional.mse_loss or type(loss_fn) is nn.MSELoss:
        return MeanSquaredError()
    if loss_fn is functional.cross_entropy:
        return CrossEntropy(axis=1)
    if type(loss_fn) is nn.CrossEntropyLoss:
        if loss_fn.weight is None and loss_fn.label_smoothing == 0:
            return CrossEntropy(loss_fn.ignore_index, axis=1)
        return MeanLoss(loss_fn, _weighted_terms(loss_fn))
    return MeanLoss(loss_fn, getattr(loss_fn, "terms", None))


def _weighted_terms(loss: nn.CrossEntropyLoss) -> Terms:
    """The mean with class weights divides by the sum of the targets' weights."""

    def terms(outputs: Any, targets: Tensor) -> float:
        if targets.is_floating_point():
            raise LossError("targets", "class probabilities: wrap the loss in MeanLoss(loss, terms)")
        counted = targets[targets != loss.ignore_index]
        return float(counted.numel() if loss.weight is None else loss.weight[counted].sum())

    return terms
