"""`sdpa`: attention whose second derivatives are exact and need memory linear in the length of the sequence.

Torch's fused kernels have no second derivative; its mathematical one has, and keeps several L x L matrices. Here the
scores are recomputed, a tile of rows at a time, whenever a derivative needs them.
"""

import math

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.attention.functions import Attention
from curvoscope.attention.rows import AttentionOptions
from curvoscope.errors import DeviceError, DtypeError, EmptyError, MaskError, RangeError, ShapeError

_DERIVATIVES = 3  # times queries, keys, values and outputs: what two derivatives hold at once


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale query key^T + mask) value, in place of `torch.nn.functional.scaled_dot_product_attention`.

    It has first and second derivatives, in reverse and forward mode in any order and under vmap, by `torch.autograd`
    and `torch.func`. float16 and bfloat16 are computed in float32. A query that sees no key has the output 0 and no
    derivatives, as with torch's mathematical kernel.

    Args:
        query: (..., H, L, E); leading axes of query, key and value broadcast.
        key: (..., H, K, E).
        value: (..., H, K, D).
        attn_mask: broadcasts to (..., H, L, K): boolean, True if a query sees a key, or floating point, added to the
            scores; it may require a gradient.
        dropout_p: must be 0: with dropout the derivatives are random.
        is_causal: query i sees the keys 0, ..., i.
        scale: None: 1/sqrt(E).
        enable_gqa: key and value have fewer heads, each shared by H / heads consecutive query heads.

    Returns:
        The attention output, (..., H, L, D).

    Example:
        >>> import torch, curvoscope as cv
        >>> value = torch.tensor([[[0.0], [3.0], [6.0]]])
        >>> cv.attention.sdpa(torch.zeros(1, 3, 2), torch.ones(1, 3, 2), value, is_causal=True)  # means
        tensor([[[0.0000],
                 [1.5000],
                 [3.0000]]])
    """
    _check(query, key, value, attn_mask, dropout_p, is_causal, scale)
    lead, heads, shared = _heads(query, key, value, enable_gqa)
    L, K = query.shape[-2], key.shape[-2]
    axes = max(query.ndim, key.ndim, value.ndim)
    mask, which = None, None
    if attn_mask is not None:
        mask, which = _masks(attn_mask, (*lead, heads, L, K)[-axes:])
        which = which.expand(*lead, heads).reshape(-1, heads // shared)
    q = query.expand(*lead, heads, L, query.shape[-1]).reshape(-1, heads // shared, L, query.shape[-1])
    k, v = (_keys(x, lead, shared) for x in (key, value))
    _fits(q, k, v)
    options = AttentionOptions(1 / math.sqrt(query.shape[-1]) if scale is None else float(scale), bool(is_causal))
    out, _ = Attention.apply(options, which, q, k, v, mask)
    return out.reshape((*lead, heads, L, value.shape[-1])[-axes:])


def _fits(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise if queries, keys, values and outputs, with their derivatives if needed, exceed the memory limit."""
    numbers = q.numel() + k.numel() + v.numel() + q[..., 0].numel() * v.shape[-1]
    wanted = any(x.requires_grad for x in (q, k, v))
    checks.fits(
        (_DERIVATIVES if wanted else 1) * numbers * max(4, q.element_size()),
        None,
        f"attention of queries {tuple(q.shape)} to keys {tuple(k.shape)}",
        "use fewer or shorter sequences",
    )


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[tuple[int, ...], int, int]:
    """Leading axes, heads of the query, and heads of key and value; one of these serves a group of query heads."""
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    except RuntimeError:
        seen = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ShapeError("query", f"batch axes of query, key and value do not fit together: {seen}") from None
    counts = [x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value)]
    heads = counts[0] if enable_gqa else max(counts)
    for name, count in zip(("query", "key", "value"), counts, strict=True):
        if enable_gqa and heads % count:
            raise ShapeError(name, f"has {count} heads, which do not divide the {heads} heads of the query")
        if not enable_gqa and count not in (1, heads):
            raise ShapeError(
                name, f"has {count} heads, others have {heads}; give enable_gqa=True if query heads share keys"
            )
    return tuple(lead), heads, counts[1] if counts[1] == counts[2] else heads


def _keys(x: Tensor, lead: tuple[int, ...], heads: int) -> Tensor:
    """Keys or values (..., h, K, E) as (N, K, E), with `heads` heads."""
    if x.ndim == 2:
        x = x[None]
    if x.shape[-3] != heads:
        x = x.repeat_interleave(heads // x.shape[-3], -3)
    return x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-2:])


def _masks(mask: Tensor, scores: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The masks (m, L or 1, K or 1), not repeated, and for the leading axes of the scores, 1 or full, which to take."""
    fits = mask.ndim <= len(scores)
    if not fits or any(size not in (1, full) for size, full in zip(mask.shape[::-1], scores[::-1], strict=False)):
        raise MaskError("attn_mask", f"has shape {tuple(mask.shape)}, which does not broadcast to the scores {scores}")
    mask = mask.reshape((1,) * (2 - mask.ndim) + tuple(mask.shape))
    count = math.prod(mask.shape[:-2])
    return mask.reshape(count, *mask.shape[-2:]), torch.arange(count, device=mask.device).view(mask.shape[:-2])


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_floating_point():
            raise DtypeError(name, f"expected floating point, got {x.dtype}; convert with .float()")
        if x.dtype != query.dtype:
            raise DtypeError(name, f"dtype {x.dtype} differs from {query.dtype} of the query")
        if x.device != query.device:
            raise DeviceError(name, f"is on {x.device}, the query on {query.device}")
        if x.ndim < 2:
            raise ShapeError(name, f"expected (..., heads, length, features), got shape {tuple(x.shape)}")
        if not x.numel():
            raise EmptyError(name, f"is empty, shape {tuple(x.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError("key", f"has {key.shape[-1]} features, the query {query.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ShapeError("value", f"has length {value.shape[-2]}, the key {key.shape[-2]}")
    if scale is not None and not math.isfinite(scale):
        raise RangeError("scale", f"got {scale}, expected a number")
    if dropout_p:
        raise RangeError("dropout_p", f"got {dropout_p}, expected 0: with dropout the derivatives are random")
    if attn_mask is None:
        return
    if is_causal:
        raise MaskError("attn_mask", "is given together with is_causal=True; put the causal mask into attn_mask")
    if attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        raise DtypeError("attn_mask", f"has dtype {attn_mask.dtype}, expected torch.bool or {query.dtype}")
    if attn_mask.device != query.device:
        raise DeviceError("attn_mask", f"is on {attn_mask.device}, the query on {query.device}")
