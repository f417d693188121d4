"""Recipes that round weights to the numbers of a format."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from curvoscope.analysis.recipes.rewriting import check_divides, rewritten
from curvoscope.blocks import Block
from curvoscope.errors import RangeError

ScaleGroup = int | str  # inputs that share a scale, or "channel", or "tensor"
_NF4 = (  # the sixteen levels of NormalFloat4 (Dettmers et al. 2023), quantiles of a normal distribution
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_LARGEST_FP8 = 448.0  # of float8_e4m3fn
_INTEGERS = """Round every weight to the nearest of {odd} (symmetric) or {even} evenly spaced levels.

    Symmetric: s = max|w| / {top}, w' = s round(w / s). Otherwise the levels span min(w, 0) to max(w, 0).

    Args:
        model: any module.
        group: what has a scale of its own: the number of inputs in a group (it must divide a), "channel" or "tensor".
        symmetric: whether zero is the middle level.
        names: shell patterns of the blocks to rewrite; none: the default of `cv.analysis.recipes`.

    Returns:
        The state dict with rounded weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(8, 2, bias=False)
        >>> rounded = cv.analysis.recipes.int{bits}(model, group=4)["weight"]
        >>> bool(((rounded - model.weight).abs() <= model.weight.abs().max() / {top} / 2 + 1e-7).all())
        True
    """


class IntegerFormat(Protocol):
    """The recipe of an integer format."""

    def __call__(
        self, model: nn.Module, group: ScaleGroup = "channel", symmetric: bool = True, names: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """The state dict with rounded weights."""
        ...


def _integers(bits: int) -> IntegerFormat:
    def recipe(
        model: nn.Module, group: ScaleGroup = "channel", symmetric: bool = True, names: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        return _rounded(model, partial(_integer, bits=bits, symmetric=symmetric), group, names)

    recipe.__name__ = recipe.__qualname__ = f"int{bits}"
    recipe.__doc__ = _INTEGERS.format(bits=bits, odd=2**bits - 1, even=2**bits, top=2 ** (bits - 1) - 1)
    return recipe


int8, int4, int3 = _integers(8), _integers(4), _integers(3)


def nf4(model: nn.Module, group: ScaleGroup = 64, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Round every weight to the nearest of the 16 levels of NormalFloat4, times max|w| of its group.

    Args:
        model, group, names: as in `int8`.

    Returns:
        The state dict with rounded weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> rounded = cv.analysis.recipes.nf4(torch.nn.Linear(64, 1))["weight"]
        >>> len(rounded.unique()) <= 16
        True
    """

    def nearest(W: Tensor) -> Tensor:
        scale = _safe(W.abs().amax(1, keepdim=True))
        levels = torch.tensor(_NF4, dtype=W.dtype, device=W.device)
        return levels[torch.bucketize((W / scale).contiguous(), (levels[1:] + levels[:-1]) / 2)] * scale

    return _rounded(model, nearest, group, names)


def fp8(model: nn.Module, group: ScaleGroup = "channel", names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Round every weight to 8-bit floating point (e4m3), scaled so that max|w| of its group becomes 448.

    Args:
        model, group, names: as in `int8`.

    Returns:
        The state dict with rounded weights, in the dtype of the model.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(64, 1)
        >>> change = cv.analysis.recipes.fp8(model)["weight"] / model.weight.detach() - 1
        >>> float(change.abs().median()) < 1 / 16  # three bits behind the point
        True
    """

    def nearest(W: Tensor) -> Tensor:
        scale = _safe(W.abs().amax(1, keepdim=True)) / _LARGEST_FP8
        return (W / scale).to(torch.float8_e4m3fn).to(W.dtype) * scale

    return _rounded(model, nearest, group, names)


def _integer(W: Tensor, bits: int, symmetric: bool) -> Tensor:
    """Round (k, g, c) to integers times a scale for each of the (k, 1, c) groups."""
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale = _safe(W.abs().amax(1, keepdim=True)) / top
        return (W / scale).round().clamp(-top, top) * scale
    low, high = W.amin(1, keepdim=True).clamp_max(0), W.amax(1, keepdim=True).clamp_min(0)
    scale = _safe(high - low) / (2**bits - 1)
    zero = (-low / scale).round()
    return (((W / scale).round() + zero).clamp(0, 2**bits - 1) - zero) * scale


def _safe(scale: Tensor) -> Tensor:
    """Groups of zeros stay zero at any scale."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _rounded(
    model: nn.Module, nearest: Callable[[Tensor], Tensor], group: ScaleGroup, names: Sequence[str]
) -> dict[str, Tensor]:
    if group not in ("channel", "tensor") and (not isinstance(group, int) or group < 1):
        raise RangeError("group", f"got {group!r}, expected a number of inputs, 'channel' or 'tensor'")

    def rounded(block: Block, W: Tensor) -> Tensor:
        if group == "tensor":
            return nearest(W.reshape(1, -1, 1)).view(W.shape)
        size = W.shape[0] if group == "channel" else int(group)
        check_divides("group", block, W, size)
        return nearest(W.reshape(-1, size, W.shape[1])).view(W.shape)

    return rewritten(model, rounded, names)
