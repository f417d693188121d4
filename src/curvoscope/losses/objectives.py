"""What is differentiated: losses that are means over loss terms, and how many terms a batch has.

The loss of several batches is the mean over all their terms. A loss function alone returns the mean over one batch,
so the number of terms behind it must be known: cross-entropy has one for each target that is not ignored, the mean
squared error one for each entry. For any other function it is found on the data (`counting`), unless `MeanLoss` says
it.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional

from curvoscope import checks
from curvoscope.errors import LossError, RangeError
from curvoscope.losses.counting import SUM, Count, Inquiry, number_of_terms
from curvoscope.losses.curvatures import Curvature, LossAt
from curvoscope.losses.outputs import flatten, tensors

LossFunction = Callable[..., Tensor]  # of a layer's output, or of a model's outputs and targets
NumberOfTerms = Callable[[Any, Any], int | float]

_REDUCTIONS = ("mean", "sum", "batchmean")


class Objective(ABC):
    """A mean over loss terms of a model's outputs and targets."""

    summed = False  # a sum over terms: batches add up
    couples_rows = False  # rows of a batch meet in the loss
    reads_parameters = False  # the loss depends on the parameters directly, too
    convex = False  # known to be convex in the outputs: S is positive semidefinite

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

    def at(self, F: Tensor) -> LossAt:
        """Value, G and S at a layer's output F (N, L, m)."""
        raise LossError(
            "loss",
            f"is {type(self).__name__}, a function of outputs and targets; give the layer lambda F: loss(F, targets)",
        )

    def seen(self, outputs: Any, parameters: Mapping[str, Tensor]) -> Any:
        """What the loss reads, made of the model's outputs and its parameters by name: the outputs alone."""
        return outputs

    def node(self, outputs: Any, targets: Any) -> Node | None:
        """The end of the graph of the loss that autograd differentiates; None if G and S are in closed form."""
        return None

    def inquiry(self) -> Inquiry | None:
        """What finds out how the terms are counted; None if it is known."""
        return None

    def counted_by(self, count: Count) -> "Objective":
        """The same loss, its terms counted so."""
        return self


class ClosedLoss(Objective):
    """A loss with G and S in closed form.

    With targets of its own it is a function of the outputs alone, as a layer takes it. Without, the targets come with
    each batch of a model.
    """

    def __init__(self, targets: Tensor | None) -> None:
        self.targets = targets

    @abstractmethod
    def __call__(self, outputs: Any, targets: Any = None) -> Tensor:
        """The mean over the terms."""

    @abstractmethod
    def gradient(self, outputs: Any, targets: Any = None) -> tuple[list[Tensor], list[Tensor]]:
        """F and G in closed form."""

    @classmethod
    def of_torch(cls, loss_fn: LossFunction) -> Objective | None:
        """The objective of a loss function of torch that is this loss; None: it is another one."""
        return None

    @abstractmethod
    def bound(self, targets: Tensor) -> "ClosedLoss":
        """The same loss with these targets, for a layer."""

    @abstractmethod
    def curvature(self, F: Tensor) -> Curvature:
        """S at F (N, L, m), for targets of its own."""

    def at(self, F: Tensor) -> LossAt:
        """Value, G and S at a layer's output F (N, L, m)."""
        if self.targets is None:
            name = type(self).__name__
            raise LossError("loss", f"is {name} without targets; pass {name}(targets) or loss.bound(targets)")
        with torch.no_grad():  # targets or an unembedding may require gradients
            _, (gradient,) = self.gradient(F)
            return LossAt(float(self(F)), gradient, self.curvature(F))

    def wanted(self, targets: Any, F: Tensor) -> Tensor:
        """The targets: those given, or the loss's own. If there are both, they must be the same."""
        own = self.targets
        found = own if targets is None else targets
        if not isinstance(found, Tensor):
            seen = "none" if found is None else type(found).__name__
            raise LossError("targets", f"expected a tensor, got {seen}; pass a function of your own")
        if own is not None and found is not own:
            if own.shape != found.shape or not torch.equal(own.to(found), found):
                raise LossError(
                    "loss_fn",
                    "has its own targets, which differ from those of the batch; construct it without targets",
                )
            return found
        axes = F.ndim if found.is_floating_point() else F.ndim - 1
        return found[None] if found is own and found.ndim == axes - 1 else found


class BinaryCrossEntropy(Objective):
    """Mean over all entries of the cross-entropy of sigmoid(output) with targets between 0 and 1."""

    convex = True

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

    G and S are found by differentiating the function twice.

    Args:
        function: takes outputs and targets of a batch and returns a scalar.
        terms: takes the same and returns the number that the mean divides by; None: it is found on the data.
        summed: whether the function is a sum over the terms.

    Example:
        >>> import torch, curvoscope as cv
        >>> def masked(outputs, targets):
        ...     mask, values = targets
        ...     return ((outputs - values).square() * mask).sum() / mask.sum()
        >>> loss = cv.losses.MeanLoss(masked, lambda outputs, targets: float(targets[0].sum()))
        >>> values, mask = torch.zeros(3, 1).double(), torch.tensor([[1.0], [0.0], [1.0]]).double()
        >>> cv.hessian(torch.nn.Linear(1, 1).double(), loss, [(values, (mask, values))]).terms
        2.0
    """

    def __init__(self, function: LossFunction, terms: NumberOfTerms | None = None, summed: bool = False) -> None:
        if not takes(function, 2):
            raise LossError(
                "loss_fn",
                f"must accept (outputs, targets), got {described(function)}; pass lambda outputs, targets: ...",
            )
        if terms is not None and not takes(terms, 2):
            raise LossError("terms", f"must accept (outputs, targets), got {described(terms)}")
        self.function, self._terms, self.summed = function, terms, summed

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Call the function, and check that it returns a scalar."""
        return scalar("loss_fn", self.function(outputs, targets), ", the mean over its terms")

    def terms(self, outputs: Any, targets: Any) -> int | float:
        """The number of terms of a batch, from the `terms` that the loss was made with.

        Args:
            outputs: what the model returned.
            targets: those of the batch.

        Returns:
            The number; raises `LossError` if `terms` is None, because the terms have not been counted, and `RangeError`
            if it returns no number or a negative one.
        """
        if self._terms is None:
            raise LossError("loss_fn", "its terms have not been counted")
        found = self._terms(outputs, targets)
        checks.real("terms", found, "the number of terms of a batch")
        if not 0 <= found < math.inf:
            raise RangeError("terms", f"got {found}, expected the number of terms of a batch")
        return found

    def inquiry(self) -> Inquiry | None:
        """An inquiry, if `terms` was not given."""
        return Inquiry(self) if self._terms is None else None

    def counted_by(self, count: Count) -> Objective:
        """The same function, with a known way to count its terms.

        Args:
            count: the way, as an inquiry finds it on the data.

        Returns:
            A `MeanLoss` whose `terms` counts so; it is `summed` if the function was found to be a sum.
        """
        return MeanLoss(self.function, partial(number_of_terms, self.function, count), count == SUM)

    def node(self, outputs: Any, targets: Any) -> Node | None:
        """The node of the autograd graph that ends at the loss, when it is called on copies of the outputs.

        Args:
            outputs: what the model returned.
            targets: those of the batch.

        Returns:
            The `grad_fn` of the loss; None if the loss cannot be differentiated in the outputs.
        """
        leaves, rebuild = flatten(outputs)
        with torch.enable_grad():
            floating = [
                leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
                for leaf in leaves
            ]
            return self(rebuild(floating), targets).grad_fn

    def gradient(self, outputs: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """G by differentiating the loss in an alias of each output, so that outputs made of one another count once.

        Args:
            outputs: what the model returned, with its graph.
            targets: those of the batch.

        Returns:
            The aliases that the loss depends on, and the gradient G in each of them, which can be differentiated again;
            none if no output has a graph.
            Raises `LossError` unless the loss depends on the parameters through the outputs, and only so.
        """
        leaves, rebuild = flatten(outputs)
        found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        aliases = {i: leaves[i].view_as(leaves[i]) for i in found}
        value = self(rebuild([aliases.get(i, leaf) for i, leaf in enumerate(leaves)]), targets)
        if not value.requires_grad and not found:  # no chosen parameter acts on the outputs
            return [], []
        if not value.requires_grad:
            raise LossError("loss_fn", "does not depend on the model's outputs, or detaches them")
        opaque = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | None)}
        _check_only_through(value, list(aliases.values()), sorted(opaque))
        gradients = torch.autograd.grad(value, list(aliases.values()), create_graph=True, allow_unused=True)
        used = [(alias, G) for alias, G in zip(aliases.values(), gradients, strict=True) if G is not None]
        return [alias for alias, _ in used], [G for _, G in used]


def objective_of(loss_fn: LossFunction | None) -> Objective | None:
    """The objective behind a loss function; torch's own are recognised by the losses in closed form."""
    if loss_fn is None or isinstance(loss_fn, Objective):
        return loss_fn
    if isinstance(loss_fn, type):
        raise LossError("loss_fn", f"is the class {loss_fn.__name__}; pass an instance, {loss_fn.__name__}()")
    reduction = getattr(loss_fn, "reduction", "mean")
    if reduction not in _REDUCTIONS:
        raise LossError("loss_fn", f"has reduction={reduction!r}; expected {' or '.join(map(repr, _REDUCTIONS))}")
    altered = isinstance(loss_fn, nn.Module) and not checks.is_plain(loss_fn)  # a hook may change its value
    kinds = () if altered else ClosedLoss.__subclasses__()  # all of them: `losses` imports each
    known = (kind.of_torch(loss_fn) for kind in kinds)
    return next((one for one in known if one is not None), None) or MeanLoss(loss_fn, getattr(loss_fn, "terms", None))


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


def scalar(argument: str, value: object, what: str = "") -> Tensor:
    """Check that what a function returned is a tensor of one number and return it, as a tensor without axes."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise LossError(argument, f"must return a scalar tensor{what}; got {seen}")
    if value.is_complex():
        raise LossError(argument, f"must return a real number{what}; got {value.dtype}")
    return value.reshape(())


def takes(function: object, arguments: int) -> bool:
    """Whether a function can be called with so many arguments, as far as its signature tells."""
    if not callable(function):
        return False
    try:
        signature = _signature(function)
    except (TypeError, ValueError):  # it has none
        return True
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def described(function: object) -> str:
    """A value for which `takes` is False, for an error: its name and the arguments it takes, or its type."""
    if not callable(function):
        return type(function).__name__
    return f"{getattr(function, '__name__', type(function).__name__)}({', '.join(_signature(function).parameters)})"


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function.forward if isinstance(function, nn.Module) else function)


def logits_of(outputs: Any) -> Tensor:
    """The tensor that the loss reads: the output itself, its `logits`, or its first entry."""
    found = outputs.get("logits", outputs) if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, Tensor):
        raise LossError("loss_fn", f"the model returned {type(outputs).__name__}, expected a tensor or `logits`")
    return found


class Contrastive(MeanLoss):
    """A loss(outputs, targets) that compares the rows of a batch with each other, as InfoNCE does; a mean over rows.

    A batch is a unit: its rows meet each other, and never those of another batch. Several batches are weighted by their
    rows. With `micro_batch` the model runs on a few rows at a time, and the result is that of the whole batch: outputs
    of all rows first, then the loss and its derivatives at them, then products through the model, part by part.

    Args:
        function: takes the outputs and targets of a whole batch and returns a scalar.

    Example:
        >>> import torch, curvoscope as cv
        >>> def info_nce(embeddings, targets):
        ...     return torch.nn.functional.cross_entropy(embeddings @ embeddings.T, targets)
        >>> model, batches = torch.nn.Linear(2, 3).double(), [(torch.ones(4, 2).double(), torch.arange(4))]
        >>> cv.hessian(model, cv.losses.Contrastive(info_nce), batches, micro_batch=3).terms
        4.0
    """

    couples_rows = True

    def __init__(self, function: LossFunction) -> None:
        super().__init__(function, _rows)


def _rows(outputs: Any, targets: Any) -> int:
    first: Tensor | None = next(iter([*tensors(targets), *tensors(outputs)]), None)
    return 1 if first is None else first.shape[0]
