"""The first-order graph of one batch, kept so that each product with the Hessian is one more backward pass.

With F the tensors at which the network is cut (its output, or the output of one layer), G = dl/dF and J = dF/dtheta,
the gradient g = J^T G is made once, with its graph. G passes a gate on its way in, and so

    H v             = d<g, v>/dtheta, gate open
    functional v    = d<g, v>/dtheta, gate shut: G is a constant, no difference of two products is taken
    outer v         = J^T S J v:  J v = d<g, v>/dG,  S u = d<G, u>/dF,  then one backward pass from F

The pass that gives the functional part comes by J v at the gate: both parts together cost it and one backward pass.
J v alone needs only what leads to G. Autograd does not tell functions written in Python which of their results it uses,
so ours ask `tangents_alone()`, and leave out derivatives of g in activations and weights.

Torch differentiates each operation of a graph by a formula, and that formula by another one. The second is seldom used,
and some are wrong. `CHECKED` lists the operations for which a test of ours compares both with differences
(`torch.autograd.gradgradcheck`); a graph with any other operation is tested as a whole (`guard`) when it is first used.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from curvoscope.errors import CurvoscopeError, ModelError

Edges = list[GradientEdge | None]

_NO_SECOND_DERIVATIVE = "torch::autograd::Error"
_SAID_BY_TORCH = re.compile(r"derivative for .* is not implemented|ouble.?backwards? is not supported")
_NO_MEMORY = re.compile("out of memory|allocate memory|not enough memory", re.IGNORECASE)
_OWN = "curvoscope."  # functions of this package: their tests are ours

_saved_names: dict[type, list[str]] = {}


class _Purpose(threading.local):
    """What the passes of this thread are for. Other threads, such as those of a GPU, compute everything."""

    tangents_alone = False


_purpose = _Purpose()


@contextmanager
def for_tangents() -> Iterator[None]:
    """Inside, passes back through gradients are for J v alone."""
    before, _purpose.tangents_alone = _purpose.tangents_alone, True
    try:
        yield
    finally:
        _purpose.tangents_alone = before


def tangents_alone() -> bool:
    """Whether this pass is for J v alone."""
    return _purpose.tangents_alone


class SecondDerivativeError(ModelError):
    """Autograd cannot differentiate the model twice, or does so incorrectly."""


class Operation(NamedTuple):
    """A node of a graph: its name, and which of its inputs have derivatives."""

    name: str
    inputs: tuple[bool, ...]


def operations(roots: Iterable[Node]) -> frozenset[Operation]:
    """The operations from which the roots were computed."""
    stack = list(roots)
    seen = set(stack)
    found = set()
    while stack:
        node = stack.pop()
        following = [before for before, _ in node.next_functions]
        found.add(Operation(_name(node), tuple(before is not None for before in following)))
        for before in following:
            if before is not None and before not in seen:
                seen.add(before)
                stack.append(before)
    return frozenset(found)


def unchecked(found: Iterable[Operation]) -> frozenset[Operation]:
    """Those of the operations whose second derivatives no test of ours has compared."""
    return frozenset(one for one in found if one.name not in CHECKED and not one.name.startswith(_OWN))


def _name(node: Node) -> str:
    """Torch's name of the operation; for a function written in Python its module and class."""
    function = getattr(type(node), "_forward_cls", None)
    return node.name() if function is None else f"{function.__module__}.{function.__qualname__}"


_NAMES = """
    AdaptiveAvgPool2D Add Addmm Addmv Alias Amax AsStrided AvgPool2D Baddbmm BinaryCrossEntropyWithLogits Bmm Cat
    ClampBackward1 ClampMax ClampMin Clone ConstantPadNd Convolution Cos Cumsum DiagEmbed Diagonal Div Dot Elu
    Embedding Erf Exp Expand Expm1 Flip Gather Gelu Glu Hardtanh HuberLoss IndexAdd Index IndexCopy IndexPut
    IndexSelect LeakyRelu LinalgVectorNorm Log1P Log LogSigmoid LogSoftmax Logsumexp MaskedFill Max MaxBackward1
    MaxPool2DWithIndices Maximum Mean MeanBackward1 Min Minimum Mish Mm MseLoss Mul MulBackward1 Mv NativeGroupNorm
    NativeLayerNorm Neg NllLoss2D NllLoss Permute Pow PowBackward1 PowBackward2 ProdBackward1 Reciprocal Relu Repeat
    ReshapeAlias Roll Rsqrt RsubBackward1 SafeSoftmax ScatterAdd Scatter Select Sigmoid Silu Sin Slice SmoothL1Loss
    Softmax Softplus Sort Split SplitWithSizes Sqrt Squeeze SqueezeBackward1 Stack Std Sub Sum SumBackward1 T Tanh
    ToCopy Topk Transpose Tril Triu Unbind Unfold UnsafeView Unsqueeze Var ViewAsReal View Where
"""  # those without an ending stand for ...Backward0

CHECKED = frozenset(name if "Backward" in name else f"{name}Backward0" for name in _NAMES.split()) | {
    "torch::autograd::AccumulateGrad",
    "torch::autograd::CopySlices",
}


class _Switch:
    """Whether derivatives pass a gate."""

    open = True

    @contextmanager
    def shut(self) -> Iterator[None]:
        self.open = False
        try:
            yield
        finally:
            self.open = True


class _Gate(torch.autograd.Function):
    """The identity; its derivative is the identity too while the switch is open, otherwise zero."""

    @staticmethod
    def forward(ctx: Any, switch: _Switch, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.switch = switch
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *(directions if ctx.switch.open else [None] * len(directions)))


class Graph:
    """Products with the Hessian of one batch's loss and its parts, by name of parameter.

    `leaves` are the parameters; `cut` the tensors F, `gradient` G, a differentiable function of F. With `keep_slope`,
    `slope` has g = J^T G by name of parameter, those that are not zero.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        cut: Sequence[Tensor],
        gradient: Sequence[Tensor],
        keep_slope: bool = False,
    ) -> None:
        self._leaves = dict(leaves)
        self._switch = _Switch()
        pairs = [(F, G) for F, G in zip(cut, gradient, strict=True) if F.requires_grad]
        self._depends = [F.requires_grad for F in cut]
        gated: Sequence[Tensor] = ()
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:
            gated = _Gate.apply(self._switch, *(G for _, G in pairs))
            gated = [G if G.requires_grad else G.detach().requires_grad_() for G in gated]  # a loss linear in F
            found = torch.autograd.grad(
                [F for F, _ in pairs], list(leaves.values()), gated, create_graph=True, allow_unused=True
            )
        self.slope = self._named(list(leaves), [g if g is None else g.detach() for g in found]) if keep_slope else {}
        # Edges, not tensors: the logits themselves need not be kept.
        self._cut, self._gradient = _edges([F for F, _ in pairs]), _edges([G for _, G in pairs])
        self._gated = _edges(gated)
        roots = zip(leaves, _edges(found), strict=True)
        self._roots = {name: edge for name, edge in roots if edge is not None}
        self.nbytes = self._measured()

    def operations(self) -> frozenset[Operation]:
        """Those between the parameters and the cut."""
        return operations(edge.node for edge in self._cut if edge is not None)

    def _measured(self) -> int:
        return _saved_bytes(self._roots.values(), {_address(leaf) for leaf in self._leaves.values()})

    def product(self, part: str, vectors: Mapping[str, Tensor], wanted: Sequence[str], many: bool) -> dict[str, Tensor]:
        """The product of `part` with vectors shaped like the parameters, if it is not zero.

        With `many`, vectors and products have a leading axis, one entry for each vector.
        """
        if part == "outer":
            curved = _backward(self._gradient, self._cut, self._moved(vectors, many), many)
            return self._named(wanted, _backward(self._cut, self._wanted(wanted), curved, many))
        edges, directions = self._sources(vectors)
        if part == "functional":
            with self._switch.shut():
                return self._named(wanted, _backward(edges, self._wanted(wanted), directions, many))
        return self._named(wanted, _backward(edges, self._wanted(wanted), directions, many))

    def parts(
        self, vectors: Mapping[str, Tensor], wanted: Sequence[str], many: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The products of the outer and of the functional part, as `product` gives them, with one pass less."""
        edges, directions = self._sources(vectors)
        with self._switch.shut():
            found = _backward(edges, [*self._gated, *self._wanted(wanted)], directions, many)
        moved, functional = found[: len(self._gated)], found[len(self._gated) :]
        curved = _backward(self._gradient, self._cut, moved, many)
        outer = _backward(self._cut, self._wanted(wanted), curved, many)
        return self._named(wanted, outer), self._named(wanted, functional)

    def pushed(self, vectors: Mapping[str, Tensor], many: bool) -> list[Tensor | None]:
        """J v, for each of the tensors F; None stands for zero."""
        found = iter(self._moved(vectors, many))
        return [next(found) if depends else None for depends in self._depends]

    def pulled(self, directions: Sequence[Tensor], wanted: Sequence[str], many: bool) -> dict[str, Tensor]:
        """J^T u from directions u, one for each of the tensors F, if it is not zero."""
        chosen = [direction for direction, depends in zip(directions, self._depends, strict=True) if depends]
        return self._named(wanted, _backward(self._cut, self._wanted(wanted), chosen, many))

    def _moved(self, vectors: Mapping[str, Tensor], many: bool) -> list[Tensor | None]:
        edges, directions = self._sources(vectors)
        with for_tangents():
            return _backward(edges, self._gated, directions, many)

    def _sources(self, vectors: Mapping[str, Tensor]) -> tuple[Edges, list[Tensor]]:
        """The gradients with respect to the parameters of the vectors, and the vectors."""
        found = [(self._roots[name], vector) for name, vector in vectors.items() if name in self._roots]
        return [edge for edge, _ in found], [vector for _, vector in found]

    def _wanted(self, names: Sequence[str]) -> list[Tensor]:
        return [self._leaves[name] for name in names]

    def _named(self, names: Sequence[str], found: Sequence[Tensor | None]) -> dict[str, Tensor]:
        return {name: product for name, product in zip(names, found, strict=True) if product is not None}


def derivative(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], directions: Sequence[Tensor], retain: bool = False
) -> list[Tensor]:
    """d<outputs, directions>/d inputs, zeros if there is no dependence."""
    pairs = [(output, direction) for output, direction in zip(outputs, directions, strict=True) if output.requires_grad]
    if not pairs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        list(inputs),
        [direction for _, direction in pairs],
        retain_graph=retain,
        materialize_grads=True,
    )
    return list(found)


def _backward(
    outputs: Sequence[GradientEdge | None],
    inputs: Sequence[GradientEdge | Tensor | None],
    directions: Sequence[Tensor | None],
    many: bool,
) -> list[Tensor | None]:
    """d<outputs, directions>/d inputs; None stands for zero."""
    starts = [(o, d) for o, d in zip(outputs, directions, strict=True) if o is not None and d is not None]
    ends: Any = [end for end in inputs if end is not None]
    if not starts or not ends:
        return [None] * len(inputs)
    try:
        found = torch.autograd.grad(
            [o for o, _ in starts],
            ends,
            [d for _, d in starts],
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=many,
        )
    except RuntimeError as error:
        if not _SAID_BY_TORCH.search(str(error)):
            raise
        said = str(error).strip().splitlines()[0]
        raise SecondDerivativeError(
            "model", f"has a function without a second derivative ({said}); use another one, or hvp='difference'"
        ) from error
    products = iter(found)
    return [None if end is None else next(products) for end in inputs]


Computed = TypeVar("Computed")
Gradients = Sequence[Tensor | None]
_KEPT: dict[str, Any] = {"retain_graph": True, "allow_unused": True}


def unless_unbatched(compute: Callable[[], Computed]) -> Computed | None:
    """What `compute` returns; None if torch cannot batch one of its operations. Other errors, such as a lack of memory,
    are raised."""
    try:
        return compute()
    except (RuntimeError, ValueError) as error:
        if isinstance(error, CurvoscopeError | torch.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
            raise
        return None


def gradients_at_once(starts: Sequence[Any], ends: Sequence[Any], directions: Sequence[Tensor]) -> Gradients | None:
    """What k directions (k, *shape of a start) find at each end, (k, ...), None if nothing; None if torch cannot batch
    one of the operations."""
    return unless_unbatched(lambda: torch.autograd.grad(starts, ends, directions, is_grads_batched=True, **_KEPT))


def gradients_in_turn(starts: Sequence[Any], ends: Sequence[Any], directions: Sequence[Tensor]) -> Gradients:
    """The same, one direction after the other."""
    each = [torch.autograd.grad(starts, ends, [g[i] for g in directions], **_KEPT) for i in range(len(directions[0]))]
    return [None if found[0] is None else torch.stack(found) for found in zip(*each, strict=True)]


def _edges(tensors: Sequence[Tensor | None]) -> Edges:
    return [None if t is None or not t.requires_grad else get_gradient_edge(t) for t in tensors]


def check_differentiable(edges: Sequence[GradientEdge]) -> None:
    """Raise if a function below the edges has no second derivative."""
    _saved_bytes(edges, set())


def _saved_bytes(edges: Any, known: set[int]) -> int:
    """Bytes that the graph below the edges keeps alive, apart from storages already known."""
    stack: list[Node] = [edge.node for edge in edges]
    seen: set[Node] = set(stack)
    storages: dict[int, int] = {}
    while stack:
        node = stack.pop()
        if node.name() == _NO_SECOND_DERIVATIVE:
            raise SecondDerivativeError(
                "model",
                "has a function without a second derivative (once_differentiable), which torch leaves out silently; "
                "write its derivative, or use hvp='difference'",
            )
        kind = type(node)
        if kind not in _saved_names:
            _saved_names[kind] = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for name in _saved_names[kind]:
            value = getattr(node, name)
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor) and _address(tensor) not in known:
                    storages[_address(tensor)] = tensor.untyped_storage().nbytes()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return sum(storages.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
