"""The Transformer block: attention and feed-forward layer, each beside a residual connection, with or without norms.

pre     Y = X + A(N1(X))      Z = Y + F(N2(Y))
post    Y = N1(X + A(X))      Z = N2(Y + F(Y))
none    Y = X + A(X)          Z = Y + F(Y)
"""

from collections.abc import Sequence

from torch import Tensor

from curvoscope import checks, losses
from curvoscope.errors import DtypeError, EmptyError, RangeError, ShapeError
from curvoscope.exact.attention import SelfAttention
from curvoscope.exact.chain import Branch, Chain
from curvoscope.exact.chain_hessian import ChainHessian
from curvoscope.exact.factor import fits_jacobians
from curvoscope.exact.feedforward import FeedForward
from curvoscope.exact.links import Layer
from curvoscope.exact.norms import LayerNorm, RMSNorm

Norm = LayerNorm | RMSNorm

_ORDER = ("norm1", "attn", "norm2", "mlp")


class _Network:
    """Branches of layers on a stream of width d: forward pass, Jacobians and Hessian."""

    d: int
    branches: list[Branch]

    def __call__(self, X: Tensor) -> Tensor:
        """Z, of the shape of X but for its width."""
        self._check(X)
        stream = X
        for branch in self.branches:
            value = stream
            for _, layer in branch.layers:
                value = layer(value)
            stream = stream + value if branch.residual else value
        return stream

    def chain(self, X: Tensor, loss: losses.LossFunction) -> Chain:
        """All layers at X, with the gradients of the loss at their outputs."""
        self._check(X)
        return Chain(self.branches, X, loss)

    def jacobian(self, X: Tensor) -> dict[str, Tensor]:
        """dZ/dW for each weight and for "X": (N L m, size), rows in the order of Z."""
        chain = self.chain(X, lambda Z: Z.sum())
        shapes = {**{name: chain.shapes[name] for name in self._names(chain)}, "X": (chain.tokens, self.d)}
        fits_jacobians(chain.output, {name: a * p for name, (a, p) in shapes.items()})
        return {name: chain.jacobian(name, shape) for name, shape in shapes.items()}

    def hessian(self, X: Tensor, loss: losses.LossFunction, *, wrt_input: bool = False) -> ChainHessian:
        """The Hessian of loss(Z) over all weights, and with `wrt_input` over "X" (T, d).

        `outer` is J^T S J with the Jacobian of Z and S at Z; `functional` is the rest. Blocks of two layers are there
        too.
        """
        chain = self.chain(X, loss)
        names = self._names(chain)
        return ChainHessian(chain, [*names, "X"] if wrt_input else names)

    def _names(self, chain: Chain) -> list[str]:
        return list(chain.shapes)

    def _check(self, X: Tensor) -> None:
        if not isinstance(X, Tensor):
            raise DtypeError("X", f"expected a torch.Tensor, got {type(X).__name__}")
        if X.ndim not in (2, 3) or X.shape[-1] != self.d:
            raise ShapeError("X", f"expected (L, {self.d}) or (N, L, {self.d}), got {tuple(X.shape)}")
        if X.numel() == 0:
            raise EmptyError("X", f"has no {'tokens' if X.shape[-2] == 0 else 'sequences'}, shape {tuple(X.shape)}")


class TransformerBlock(_Network):
    """Attention, then a feed-forward layer, with residual connections and norms placed "pre", "post" or not ("none").

    Blocks "norm1.gamma", "norm1.beta", "attn.Q", "attn.K", "attn.V", "attn.O", "norm2.gamma", "norm2.beta", "mlp.gate",
    "mlp.up", "mlp.down", "mlp.b_gate", "mlp.b_up", "mlp.b_down", those that there are; with attention's `biases` also
    "attn.b_Q" and so on.
    """

    def __init__(
        self,
        attention: SelfAttention,
        feedforward: FeedForward,
        norm1: Norm | None = None,
        norm2: Norm | None = None,
        placement: str = "pre",
    ) -> None:
        checks.choice("placement", placement, ("pre", "post", "none"))
        self.d, self.placement = attention.d, placement
        _fits("attention", attention, self.d)
        _fits("feedforward", feedforward, self.d)
        dtype = attention.W_Q
        checks.floating("feedforward", feedforward.weights["W1"], like=dtype)
        for name, norm in (("norm1", norm1), ("norm2", norm2)):
            if placement == "none" and norm is not None:
                raise RangeError("placement", f"got 'none' together with {name}; choose 'pre' or 'post'")
            if placement != "none" and norm is None:
                raise RangeError(name, f"is missing; placement {placement!r} needs both norms, 'none' has none")
            if norm is not None:
                _fits(name, norm, self.d)
                checks.floating(name, norm.gamma, like=dtype)
        self.attention, self.feedforward, self.norm1, self.norm2 = attention, feedforward, norm1, norm2
        attn, mlp = ("attn", attention), ("mlp", feedforward)
        self.branches = [Branch((attn,), True), Branch((mlp,), True)]
        if norm1 is not None and norm2 is not None:
            first, second = ("norm1", norm1), ("norm2", norm2)
            if placement == "pre":
                self.branches = [Branch((first, attn), True), Branch((second, mlp), True)]
            else:
                self.branches.insert(1, Branch((first,), False))
                self.branches.append(Branch((second,), False))

    def _names(self, chain: Chain) -> list[str]:
        """In the same order for every placement."""
        return sorted(chain.shapes, key=lambda name: _ORDER.index(name.partition(".")[0]))


class Stack(_Network):
    """Transformer blocks, and single layers such as a final norm, one after the other.

    `layers`: blocks, which are named "h.0", "h.1", ... ("h.0.attn.Q"), and layers, "final_norm" for a norm after which
    nothing comes, else "layer.0", ... by their place.
    """

    def __init__(self, layers: Sequence[TransformerBlock | Layer]) -> None:
        if not layers:
            raise EmptyError("layers", "is empty; give at least one block or layer")
        self.layers = tuple(layers)
        self.branches = []
        blocks, width = 0, -1
        for place, layer in enumerate(self.layers):
            into, out, like = _widths(layer)
            if place == 0:
                self.d, first = into, like
            elif into != width:
                raise ShapeError("layers", f"layer {place} has input width {into}, the one before it gives {width}")
            checks.floating("layers", like, like=first)
            width = out
            if isinstance(layer, TransformerBlock):
                prefix = f"h.{blocks}."
                blocks += 1
                self.branches += [
                    Branch(tuple((prefix + name, inner) for name, inner in branch.layers), branch.residual)
                    for branch in layer.branches
                ]
            else:
                last = place == len(self.layers) - 1 and isinstance(layer, LayerNorm | RMSNorm)
                self.branches.append(Branch((("final_norm" if last else f"layer.{place}", layer),), False))


def _widths(layer: TransformerBlock | Layer) -> tuple[int, int, Tensor]:
    """Input width, output width and a weight of a layer."""
    if isinstance(layer, TransformerBlock):
        return layer.d, layer.d, layer.attention.W_Q
    if isinstance(layer, SelfAttention):
        return layer.d, layer.d_out, layer.W_Q
    if isinstance(layer, FeedForward):
        return layer.weights["W1"].shape[0], layer.weights["W2"].shape[1], layer.weights["W1"]
    return len(layer.gamma), len(layer.gamma), layer.gamma


def _fits(argument: str, layer: Layer, width: int) -> None:
    into, out, _ = _widths(layer)
    if (into, out) != (width, width):
        raise ShapeError(argument, f"maps width {into} to {out}; the residual stream has width {width}")
