"""From a layer of a model to the same layer in closed form, and the proof that it is the same.

What the blocks do not tell (masks, scale, activation) is read from the call where the module says it, and otherwise
tried: a layer counts as rebuilt when it gives the module's output to rounding, at weights that are shaken, so that
zeros and coincidences in the weights hide nothing.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvoscope.closed.layers import LayerRecorder, ModelLayer
from curvoscope.errors import CurvoscopeError
from curvoscope.exact.activations import ACTIVATIONS
from curvoscope.exact.attention.hessian import AttentionHessian
from curvoscope.exact.attention.layer import Pass
from curvoscope.exact.attention.rotary import Rotary
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.exact.feedforward import FeedForward
from curvoscope.losses import LossAt
from curvoscope.operators.block_matrix import BlockHessian

_ROUNDING = 1000  # times epsilon: how far a rebuilt layer may be from the module


class Reading(NamedTuple):
    """How a layer is computed: activation; and for attention the scale, whether a mask was given, and causality."""

    activation: str
    scale: float = 1.0
    masked: bool = False
    causal: bool = False


@dataclass(frozen=True)
class Rebuilt:
    """A layer in closed form at one input X (N, L, d), for attention with a mask."""

    layer: SelfAttention | FeedForward
    X: Tensor
    mask: Tensor | None = None

    def output(self) -> Tensor:
        """F, (N, L, m)."""
        return self.layer(self.X) if isinstance(self.layer, FeedForward) else self.forward_pass(self.layer).F

    def hessian(self, loss: LossAt, per_head: bool) -> BlockHessian:
        """For a loss known by its G and S at F."""
        if isinstance(self.layer, FeedForward):
            return self.layer.around(self.X, loss, wrt_input=False).assemble()
        passed = self.forward_pass(self.layer)
        return AttentionHessian(self.layer, passed, loss, biases=True, per_head=per_head, wrt_input=False)

    def forward_pass(self, layer: SelfAttention) -> Pass:
        """That of attention. A query that sees no key, such as padding, attends to nothing: its row of A is zero, as
        torch's attention has it, and so are its derivatives, which are proportional to A."""
        if self.mask is None:
            return layer.forward_pass(self.X)
        looks = self.mask if self.mask.dtype == torch.bool else self.mask > -math.inf
        looks = looks.tril() if layer.causal else looks
        blind = ~looks.any(-1, keepdim=True)
        if not bool(blind.any()):
            return layer.forward_pass(self.X, self.mask)
        passed = layer.forward_pass(self.X, self.mask.masked_fill(blind, 1 if self.mask.dtype == torch.bool else 0))
        A, heads = (values.masked_fill(blind, 0) for values in (passed.A, passed.head_output))
        F = layer.to_output(heads)
        return replace(passed, A=A, head_output=heads, F=F if layer.b_O is None else F + layer.b_O)


def rebuild(layer: ModelLayer, weights: Mapping[str, Tensor], record: LayerRecorder, reading: Reading) -> Rebuilt:
    """The layer in closed form, at weights by parameter and at the recorded input."""
    W = {role: matrix if not role.startswith("b_") else matrix[0] for role, matrix in layer.matrices(weights).items()}
    if layer.kind == "mlp":
        inner = (W["up"], W.get("b_up"), W["down"], W.get("b_down"))
        return Rebuilt(FeedForward(*inner, reading.activation, W.get("gate"), W.get("b_gate")), record.X)
    d_k = W["Q"].shape[1] // _heads(layer, "Q")
    attention = SelfAttention(
        *(W[role] for role in "QKVO"),
        *(W.get(f"b_{role}") for role in "QKVO"),
        heads=_heads(layer, "Q"),
        kv_heads=_heads(layer, "K"),
        temperature=1 / (reading.scale * math.sqrt(d_k)),
        activation=reading.activation,
        causal=reading.causal,
    )
    if record.rotary is not None:
        attention.rotary = _Turned(*record.rotary, width=d_k)
    return Rebuilt(attention, record.X, _mask(layer, record) if reading.masked else None)


def readings(layer: ModelLayer, record: LayerRecorder) -> Iterator[Reading]:
    """All ways in which the layer may be computed, the likeliest first."""
    if layer.kind == "mlp":
        yield from map(Reading, ACTIVATIONS)
        return
    scales = [getattr(record.module, "scaling", None), (layer.blocks["Q"].shape[1] // _heads(layer, "Q")) ** -0.5]
    masks = (True, False) if _mask(layer, record) is not None else (False,)
    causal = (True, False) if getattr(record.module, "is_causal", not any(masks)) else (False, True)
    for activation, masked, forward in product(("softmax", "linear"), masks, causal):
        for scale in dict.fromkeys(scale for scale in scales if isinstance(scale, float) and scale > 0):
            yield Reading(activation, scale, masked, forward)


def fitting(
    layer: ModelLayer, weights: Mapping[str, Tensor], record: LayerRecorder, among: Iterable[Reading] | None = None
) -> tuple[list[Reading], str]:
    """The readings that give the module's output, the nearest first; and what is wrong with the others."""
    if layer.kind == "attn" and not all(layer.blocks[role].heads for role in "QKV"):
        return [], "the number of its heads is not known"
    errors: dict[Reading, float] = {}
    try:
        for reading in readings(layer, record) if among is None else among:
            errors[reading] = deviation(rebuild(layer, weights, record, reading), record)
    except CurvoscopeError as problem:
        if not errors:
            return [], str(problem)
    off = min(errors.values()) * _ROUNDING * torch.finfo(record.F.dtype).eps
    return sorted((reading for reading, error in errors.items() if error <= 1), key=errors.__getitem__), (
        f"no closed form gives its output, the nearest is off by {off:.1e} of it; does it compute in lower precision "
        "inside, as Hugging Face's attn_implementation='eager' may, or something else?"
    )


def deviation(rebuilt: Rebuilt, record: LayerRecorder) -> float:
    """Largest error of the rebuilt output, in units of what rounding allows."""
    found, expected = rebuilt.output(), record.F
    if found.shape != expected.shape:
        return math.inf
    size = max(float(expected.abs().max()), float(record.written.detach().abs().max()))
    error = float((found - expected).abs().max()) / max(size, torch.finfo(found.dtype).tiny)
    return error / (_ROUNDING * torch.finfo(found.dtype).eps)


def shaken(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights moved by random amounts of about half their size, zeros as well."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, weight in weights.items():
        moved[name] = weight.detach()
        if weight.is_floating_point() and weight.numel():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight.device)
            size = weight.detach().square().mean().sqrt() + weight.shape[-1] ** -0.5 if weight.ndim else 0.1
            moved[name] = weight.detach() + 0.5 * size * noise
    return moved


class _Turned(Rotary):
    """Rotations by tables of cosines and sines (1 or N, L, k), as a module was called with them."""

    def __init__(self, cos: Tensor, sin: Tensor, width: int) -> None:
        super().__init__(1.0, width)
        if cos.ndim != 3 or cos.shape[-1] != width or not bool((cos == cos[:1]).all() and (sin == sin[:1]).all()):
            raise _CallError("rotary", f"tables of shape {tuple(cos.shape)}, or that differ between sequences")
        self._cos, self._sin = cos[0, :, : width // 2], sin[0, :, : width // 2]

    def turn(self, vectors: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """R_i v, or R_i^T v if `back`."""
        cos, sin = self._cos[positions].to(vectors.dtype), self._sin[positions].to(vectors.dtype)
        sin = -sin if back else sin
        first, second = vectors.tensor_split(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _CallError(CurvoscopeError, ValueError):
    """A layer whose call is of no known form."""


def _heads(layer: ModelLayer, role: str) -> int:
    return layer.blocks[role].heads or 1


def _mask(layer: ModelLayer, record: LayerRecorder) -> Tensor | None:
    """What is added to the scores, (1 or N, 1 or heads, L, L), or True where a query may look; None if nothing is."""
    N, L = record.X.shape[:2]
    given: dict[str, Any] = record.arguments
    mask, padding = given.get("attention_mask"), None
    if "key" in given:  # nn.MultiheadAttention: booleans say where not to look
        mask, padding = (_additive(given.get(name), record.X) for name in ("attn_mask", "key_padding_mask"))
        if mask is not None and mask.ndim == 3:
            mask = mask.view(N, -1, L, L)
    if padding is not None:
        padding = padding.view(-1, 1, 1, L)
        mask = padding if mask is None else mask + padding
    if not isinstance(mask, Tensor):
        return None
    mask = mask[(None,) * (4 - mask.ndim)] if mask.ndim < 4 else mask
    if mask.ndim != 4 or mask.shape[-1] != L or mask.shape[-2] not in (1, L):
        raise _CallError("mask", f"of shape {tuple(mask.shape)} for {L} tokens")
    return mask.expand(*mask.shape[:2], L, L)


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask.bool(), -math.inf)
