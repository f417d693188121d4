"""Attention as functions that torch can differentiate, twice, in any order of forward and reverse mode.

Five functions close under differentiation, because all second derivatives are contractions of one symmetric form:

    attention       reverse: gradient                    forward: tangent
    gradient        reverse: curvature and tangent       forward: curvature, and the gradient at the cotangent's tangent
    tangent         reverse: curvature and gradient      forward: second tangent, and the tangent along the directions'
    curvature, second tangent      are not differentiated further

Each takes (options, which, q, k, v, mask), then the statistics of the rows, then cotangent and directions; shapes are
those of `AttentionTiles`. Under vmap the mapped axis joins N, and the masks' axis m.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node

from curvoscope.attention import passes
from curvoscope.attention.rows import AttentionOptions, AttentionTiles
from curvoscope.errors import RangeError

_SHARED = 7  # options, which, q, k, v, mask, statistics
_MASK = 5


class _Tiled(torch.autograd.Function):
    """What the five have in common: no gradient that nobody asks for, and vmap."""

    masks: tuple[int, ...] = (_MASK,)  # positions of arguments that are shaped like the mask

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the tensors for both modes."""
        ctx.options = inputs[0]
        ctx.tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        """One call with the mapped axis inside N and m."""
        size = info.batch_size
        front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, in_dims, strict=True)]
        mapped = [dim is not None for dim in in_dims]
        found = cls.apply(*fold(cls, size, front, mapped))
        if isinstance(found, Tensor):
            return found.unflatten(0, (size, -1)), 0
        outputs = tuple(None if x is None else x.unflatten(0, (size, -1)) for x in found)
        return outputs, tuple(None if x is None else 0 for x in found)


def fold(function: type[_Tiled], size: int, arguments: list[Any], mapped: list[bool]) -> list[Any]:
    """Arguments whose leading axis, of `size` where they are mapped, is joined to the one after it."""
    options, which, *_ = arguments
    mask = arguments[_MASK]
    separate = mask is not None and (options.wanted[3] or any(mapped[i] for i in function.masks))
    folded = [options, None if which is None else which.repeat(size, 1)]
    if separate:
        count = mask.shape[1] if mapped[_MASK] else mask.shape[0]
        starts = torch.arange(0, size * count, count, device=which.device)
        folded[1] = (which + starts[:, None, None]).flatten(0, 1)
    for i, x in enumerate(arguments[2:], 2):
        if x is None or (i in function.masks and not separate):
            folded.append(x)
        else:
            folded.append((x if mapped[i] else x.expand(size, *x.shape)).flatten(0, 1))
    return folded


def run(function: type[_Tiled], *arguments: Any) -> Any:
    """The function of these arguments, also of those that `torch.autograd.grad(is_grads_batched=True)` hands out."""
    mapped = [isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x) for x in arguments]
    if not any(mapped):
        return function.apply(*arguments)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    size = 0
    front = list(arguments)
    for i, x in enumerate(arguments):
        if mapped[i]:
            front[i] = torch._remove_batch_dim(x, level, size, 0)
            size = front[i].shape[0]
    found = function.apply(*fold(function, size, front, mapped))
    wrap = lambda x: None if x is None else torch._add_batch_dim(x.unflatten(0, (size, -1)), 0, level)  # noqa: E731
    return wrap(found) if isinstance(found, Tensor) else tuple(wrap(x) for x in found)


class Attention(_Tiled):
    """(options, which, q, k, v, mask) -> out, statistics."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        """One pass over the tiles."""
        out, statistics = passes.forward(AttentionTiles(*arguments))
        return out.to(arguments[2].dtype), statistics

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the statistics too: they follow from q, k and the mask, and their derivatives are in the formulas."""
        _Tiled.setup_context(ctx, (*inputs, output[1]), output)
        ctx.tensors.pop()  # the statistics are not an input
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient."""
        if g is None:
            return (None,) * 6
        return None, None, *run(Gradient, _wanting(ctx, 2), *ctx.saved_tensors, g)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        """The tangent."""
        return run(Tangent, ctx.options, *ctx.saved_tensors, *tangents[2:6]), None


class Gradient(_Tiled):
    """(..., g) -> gradients of <g, out> by q, k, v and the mask, as far as wanted."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        """One pass over the tiles."""
        return _like(arguments, passes.gradient(AttentionTiles(*arguments[:_SHARED]), arguments[_SHARED]))

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Tensor | None, ...]:
        """The curvature along the directions, and for g the tangent."""
        *shared, g = ctx.saved_tensors
        if all(direction is None for direction in directions):
            return (None,) * 8
        options = _wanting(ctx, 2)
        if not any(options.wanted):  # J v alone, on the way to a product with the outer part
            return *(None,) * _SHARED, run(Tangent, options, *shared, *directions)
        *found, to_g = run(AttentionCurvature, options, *shared, g, *directions)
        return None, None, *found, None, to_g

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The curvature along the tangents of q, k, v, mask, and the gradient at the tangent of g."""
        *shared, g = ctx.saved_tensors
        return _gradients(ctx.options, shared, g, tangents[2:6], tangents[_SHARED])


class Tangent(_Tiled):
    """(..., a, b, c, e) -> the derivative of out along the direction."""

    masks = (_MASK, 10)

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        """One pass over the tiles."""
        return passes.tangent(AttentionTiles(*arguments[:_SHARED]), arguments[_SHARED:]).to(arguments[2].dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        """The curvature at g along the direction, and for the direction the gradient at g."""
        if g is None:
            return (None,) * 11
        shared, direction = ctx.saved_tensors[: _SHARED - 1], ctx.saved_tensors[_SHARED - 1 :]
        *found, _ = run(AttentionCurvature, _wanting(ctx, 2), *shared, g, *direction)
        return None, None, *found, None, *run(Gradient, _wanting(ctx, _SHARED), *shared, g)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """The second tangent, and the tangent along the tangents of the direction."""
        shared, direction = ctx.saved_tensors[: _SHARED - 1], ctx.saved_tensors[_SHARED - 1 :]
        found = None
        if any(x is not None for x in tangents[2:6]):
            found = run(SecondTangent, ctx.options, *shared, *direction, *tangents[2:6])
        if any(x is not None for x in tangents[_SHARED:]):
            more = run(Tangent, ctx.options, *shared, *tangents[_SHARED:])
            found = more if found is None else found + more
        assert found is not None
        return found


class _Last(_Tiled):
    """A second derivative: it has no derivative of its own."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        """Third derivatives are not available."""
        raise RangeError(
            "derivative",
            "attention.sdpa has first and second derivatives, this asks for a third; use torch's "
            "scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)",
        )

    jvp = backward


class AttentionCurvature(_Last):
    """(..., g, a, b, c, e) -> the Hessian of <g, out> times the direction, by q, k, v and mask; the tangent of out."""

    masks = (_MASK, 11)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        """One pass over the tiles."""
        found, tangent = passes.curvature(
            AttentionTiles(*arguments[:_SHARED]), arguments[_SHARED], arguments[_SHARED + 1 :]
        )
        return *_like(arguments, found), tangent.to(arguments[2].dtype)


class SecondTangent(_Last):
    """(..., two directions of four) -> the second derivative of out along them."""

    masks = (_MASK, 10, 14)

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        """One pass over the tiles."""
        first, second = arguments[_SHARED : _SHARED + 4], arguments[_SHARED + 4 :]
        return passes.second_tangent(AttentionTiles(*arguments[:_SHARED]), first, second).to(arguments[2].dtype)


def _wanting(ctx: Any, first: int) -> AttentionOptions:
    """The options, with the gradients wanted that the running backward pass continues with.

    They are the four from the input `first` on. An input may require a gradient that this pass does not need:
    that of the outer part goes through the cotangents alone.
    """
    options: AttentionOptions = ctx.options
    nodes = {i: node for i, (node, _) in zip(ctx.tensors, ctx.next_functions, strict=True)}
    q, k, v, mask = (_goes_on(nodes.get(i)) for i in range(first, first + 4))
    return options.wanting((q, k, v, mask))


def _goes_on(node: Node | None) -> bool:
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch does not tell of leaves
        return True


def _gradients(
    options: AttentionOptions, shared: list[Any], g: Tensor, along: tuple[Tensor | None, ...], more: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The derivative of the gradient at g along a direction of q, k, v, mask and along `more` of g."""
    found: list[Tensor | None] = [None] * 4
    if any(x is not None for x in along):
        found = list(run(AttentionCurvature, options, *shared, g, *along)[:4])
    if more is not None:
        parts = run(Gradient, options, *shared, more)
        found = [x if y is None else y if x is None else x + y for x, y in zip(found, parts, strict=True)]
    return tuple(found)


def _like(arguments: tuple[Any, ...], found: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What was found for q, k, v and mask in the dtypes of these."""
    return tuple(None if x is None else x.to(like.dtype) for x, like in zip(found, arguments[2:6], strict=True))
