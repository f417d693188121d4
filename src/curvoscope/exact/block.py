"""The Transformer block: attention and feed-forward layer, each with a residual connection, with or without norms.

pre     Y = X + A(N1(X))      Z = Y + F(N2(Y))
post    Y = N1(X + A(X))      Z = N2(Y + F(Y))
none    Y = X + A(X)          Z = Y + F(Y)
"""

from collections.abc import Sequence

from torch import Tensor

from curvoscope import checks
from curvoscope.errors import EmptyError, ModelError, RangeError, ShapeError
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.exact.chain import Branch, Chain
from curvoscope.exact.feedforward import FeedForward
from curvoscope.exact.links import Layer
from curvoscope.exact.network import Network
from curvoscope.exact.norms import LayerNorm, RMSNorm
from curvoscope.exact.tokenwise import TokenwiseLayer

Norm = LayerNorm | RMSNorm

_ORDER = ("norm1", "attn", "norm2", "mlp")


class TransformerBlock(Network):
    """Attention, then a feed-forward layer, with residual connections and norms placed "pre", "post" or not ("none").

    Blocks "norm1.gamma", "norm1.beta", "attn.Q", "attn.K", "attn.V", "attn.O", "norm2.gamma", "norm2.beta", "mlp.gate",
    "mlp.up", "mlp.down", "mlp.b_gate", "mlp.b_up", "mlp.b_down", as far as the layers have them; with
    attention's `biases` also "attn.b_Q" and so on.

    Args:
        attention: a `SelfAttention` from width d to d.
        feedforward: a `FeedForward` from width d to d.
        norm1: `LayerNorm` or `RMSNorm` of attention; None with placement "none".
        norm2: that of the feed-forward layer.
        placement: "pre", "post" or "none".

    Example:
        >>> import torch, curvoscope as cv
        >>> W, one = torch.eye(2), torch.ones(2)
        >>> layer = cv.exact.TransformerBlock(
        ...     cv.exact.SelfAttention(W, W, W, W),
        ...     cv.exact.FeedForward(W, None, W, None),
        ...     cv.exact.RMSNorm(one),
        ...     cv.exact.RMSNorm(one),
        ... )
        >>> H = layer.hessian(torch.eye(2), cv.losses.MSE(torch.zeros(2, 2)))
        >>> H.names
        ['norm1.gamma', 'attn.Q', 'attn.K', 'attn.V', 'attn.O', 'norm2.gamma', 'mlp.up', 'mlp.down']
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
        _is("attention", attention, SelfAttention)
        _is("feedforward", feedforward, FeedForward)
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
                _is(name, norm, LayerNorm, RMSNorm)
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


class Stack(Network):
    """Transformer blocks, and single layers such as a final norm, one after the other.

    Args:
        layers: blocks, which are named "h.0", "h.1", ... ("h.0.attn.Q"), and layers: a norm at the end is "final_norm",
            any other layer "layer.0", ... by its place.

    Example:
        >>> import torch, curvoscope as cv
        >>> W = torch.eye(2)
        >>> stack = cv.exact.Stack([cv.exact.SelfAttention(W, W, W), cv.exact.RMSNorm(torch.ones(2))])
        >>> stack.hessian(torch.eye(2), cv.losses.MSE(torch.zeros(2, 2))).names
        ['layer.0.Q', 'layer.0.K', 'layer.0.V', 'final_norm.gamma']
    """

    def __init__(self, layers: Sequence[TransformerBlock | Layer]) -> None:
        if not layers:
            raise EmptyError("layers", "is empty; give at least one block or layer")
        self.layers = tuple(layers)
        self.branches = []
        blocks, width = 0, -1
        for place, layer in enumerate(self.layers):
            _is("layers", layer, TransformerBlock, SelfAttention, TokenwiseLayer)
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


def _is(argument: str, layer: object, *kinds: type) -> None:
    if not isinstance(layer, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ModelError(argument, f"expected {names}, got {type(layer).__name__}")


def _widths(layer: TransformerBlock | Layer) -> tuple[int, int, Tensor]:
    """Input width, output width and a weight of a layer."""
    if isinstance(layer, TransformerBlock):
        return layer.d, layer.d, layer.attention.W_Q
    return layer.d, layer.d_out, next(iter(layer.matrices.values()))


def _fits(argument: str, layer: Layer, width: int) -> None:
    into, out, _ = _widths(layer)
    if (into, out) != (width, width):
        raise ShapeError(argument, f"maps width {into} to {out}; the residual stream has width {width}")
