"""From a layer of a model to the same layer in closed form, and the proof that it is the same.

What the blocks do not tell (masks, scale, activation) is read from the call where the module says it, and otherwise
tried: a layer counts as rebuilt when it gives the module's output to rounding, at weights that are shaken, so that
zeros and coincidences in the weights hide nothing.

Attention that is in none of these ways is read off the graph of a forward pass: see `traced`.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvoscope.closed.crossing import cross_mask, joined, mask_of, with_memory
from curvoscope.closed.layers import ModelLayer
from curvoscope.closed.passes import LayerPasses, LayerRecord, random_cotangent, shaken, slopes_of
from curvoscope.errors import CurvoscopeError
from curvoscope.exact.activations import ACTIVATIONS
from curvoscope.exact.attention.hessian import AttentionHessian
from curvoscope.exact.attention.layer import Pass
from curvoscope.exact.attention.rotary import PositionMatrices
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.exact.feedforward import FeedForward
from curvoscope.exact.scale import LayerScale
from curvoscope.exact.tokenwise import TokenwiseLayer
from curvoscope.losses import LossAt
from curvoscope.operators.block_matrix import BlockHessian

_LOW_PRECISION = 1e-4  # relative error below which a layer is the right one, computed in less than double precision
_CAUSES = {  # by the roles of further blocks
    **dict.fromkeys(("q_norm", "k_norm"), "normalises queries and keys"),
    **dict.fromkeys(("v_norm", "o_norm"), "normalises values or the output of the heads"),
    **dict.fromkeys(("gate", "b_gate"), "gates the output of the heads"),
    **dict.fromkeys(("Q_latent", "KV_latent"), "makes queries or keys of latent vectors"),
    **dict.fromkeys(("positions", "Q_positions", "K_positions"), "has weights of positions in its scores"),
    **{"temperature": "has a learned temperature", "sinks": "has sinks", "norm": "normalises the hidden units"},
    **dict.fromkeys(("inner", "b_inner", "router", "b_router"), "has further weights inside"),
}
ROUNDING = 1000  # times epsilon: how far a rebuilt layer may be from the module


class Reading(NamedTuple):
    """How a layer is computed: activation; and for attention the scale, whether a mask was given, and causality."""

    activation: str
    scale: float = 1.0
    masked: bool = False
    causal: bool = False


@dataclass(frozen=True)
class Rebuilt:
    """A layer in closed form at one input X (N, L, d), for attention with a mask. `queries`: how many tokens of X come
    before the memory of cross-attention; None: there is none."""

    layer: SelfAttention | TokenwiseLayer
    X: Tensor
    mask: Tensor | None = None
    queries: int | None = None

    def output(self) -> Tensor:
        """F, (N, L, m)."""
        if isinstance(self.layer, TokenwiseLayer):
            return self.layer(self.X)
        return self.forward_pass(self.layer).F[:, : self.queries]

    def gradients(self, names: Sequence[str], cotangent: Tensor) -> list[Tensor]:
        """Those of <cotangent, F> in weights (a, p) and biases (p,)."""
        layer, leaves = copy.copy(self.layer), list[Tensor]()
        with torch.inference_mode(False), torch.enable_grad():
            for name in names:
                if isinstance(layer, TokenwiseLayer):
                    leaves.append(layer.weights[name].clone().requires_grad_())
                    layer.weights = {**layer.weights, name: leaves[-1]}
                else:
                    attribute = name if name.startswith("b_") else f"W_{name}"
                    leaves.append(getattr(layer, attribute).clone().requires_grad_())
                    setattr(layer, attribute, leaves[-1])
            F = replace(self, layer=layer).output()
            return list(torch.autograd.grad(F, leaves, cotangent, materialize_grads=True))

    def hessian(self, loss: LossAt, per_head: bool) -> BlockHessian:
        """For a loss known by its G and S at F."""
        if isinstance(self.layer, TokenwiseLayer):
            return self.layer.around(self.X, loss, wrt_input=False).assemble()
        passed = self.forward_pass(self.layer)
        if self.queries is not None:
            loss = with_memory(loss, self.X.shape[1] - self.queries)
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


def rebuild(layer: ModelLayer, weights: Mapping[str, Tensor], record: LayerRecord, reading: Reading) -> Rebuilt:
    """The layer in closed form, at weights by parameter and at the recorded input."""
    if layer.kind == "scale":
        return Rebuilt(LayerScale(layer.matrices(weights)["scale"][0]), record.X)
    if layer.kind == "mlp":
        W = weights_by_role(layer, weights)
        inner = (W["up"], W.get("b_up"), W["down"], W.get("b_down"))
        return Rebuilt(FeedForward(*inner, reading.activation, W.get("gate"), W.get("b_gate")), record.X)
    if layer.kind == "cross":
        return _rebuilt_cross(layer, weights, record, reading)
    options: dict[str, Any] = {"activation": reading.activation, "causal": reading.causal}
    if record.rotary is not None:
        options["rotary"] = _positions(*record.rotary, width=head_width(layer))
    attention = attention_at(layer, weights, reading.scale, **options)
    return Rebuilt(attention, record.X, _mask(record) if reading.masked else None)


def weights_by_role(layer: ModelLayer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices and biases (p,) by role."""
    return {
        role: matrix if not role.startswith("b_") else matrix[0] for role, matrix in layer.matrices(weights).items()
    }


def attention_at(layer: ModelLayer, weights: Mapping[str, Tensor], scale: float, **options: Any) -> SelfAttention:
    """Attention at weights by parameter, with the options of `SelfAttention`."""
    W = weights_by_role(layer, weights)
    return SelfAttention(
        *(W[role] for role in "QKVO"),
        *(W.get(f"b_{role}") for role in "QKVO"),
        heads=_heads(layer, "Q"),
        kv_heads=_heads(layer, "K"),
        temperature=1 / (scale * math.sqrt(head_width(layer))),
        **options,
    )


def head_width(layer: ModelLayer) -> int:
    """Features of a query."""
    return layer.blocks["Q"].shape[1] // _heads(layer, "Q")


def _rebuilt_cross(layer: ModelLayer, weights: Mapping[str, Tensor], record: LayerRecord, reading: Reading) -> Rebuilt:
    X, memory = record.X, record.memory
    if memory is None or memory.shape[-1] != X.shape[-1] or len(memory) not in (1, len(X)):
        seen = None if memory is None else tuple(memory.shape)
        raise _CallError("memory", f"{seen} for queries of {tuple(X.shape)}: both must have the same width")
    mask = cross_mask(X, memory, mask_of(record.arguments, X, memory) if reading.masked else None)
    return Rebuilt(attention_at(layer, weights, reading.scale), joined(X, memory), mask, X.shape[1])


def readings(layer: ModelLayer, record: LayerRecord) -> Iterator[Reading]:
    """All ways in which the layer may be computed, the likeliest first."""
    if layer.kind == "scale":
        yield Reading("")
        return
    if layer.kind == "mlp":
        yield from map(Reading, ACTIVATIONS)
        return
    scales = [getattr(record.module, "scaling", None), (layer.blocks["Q"].shape[1] // _heads(layer, "Q")) ** -0.5]
    if layer.kind == "cross":
        numbers = dict.fromkeys(scale for scale in (*scales, 1.0) if isinstance(scale, float) and scale > 0)
        yield from (Reading("softmax", scale, masked) for masked in (True, False) for scale in numbers)
        return
    masks = (True, False) if _mask(record) is not None else (False,)
    causal = (True, False) if getattr(record.module, "is_causal", not any(masks)) else (False, True)
    for activation, masked, forward in product(("softmax", "linear"), masks, causal):
        for scale in dict.fromkeys(scale for scale in scales if isinstance(scale, float) and scale > 0):
            yield Reading(activation, scale, masked, forward)


def fitting(
    layer: ModelLayer, weights: Mapping[str, Tensor], record: LayerRecord, among: Iterable[Reading] | None = None
) -> tuple[list[Reading], str]:
    """The readings that give the module's output, the nearest first; and what is wrong with the others.

    Of attention the first one that does is enough: no two of its readings are near each other.
    """
    reason = unfit(layer, record)
    if reason is not None:
        return [], reason
    errors: dict[Reading, float] = {}
    try:
        for reading in readings(layer, record) if among is None else among:
            errors[reading] = deviation(rebuild(layer, weights, record, reading), record)
            if layer.attends and errors[reading] <= 1:
                break
    except CurvoscopeError as problem:
        if not errors:
            return [], str(problem)
    off = min(errors.values()) * ROUNDING * torch.finfo(record.F.dtype).eps
    fits = sorted((reading for reading, error in errors.items() if error <= 1), key=errors.__getitem__)
    return fits, unlike(layer, off)


def unfit(layer: ModelLayer, record: LayerRecord) -> str | None:
    """Why the weights of a layer are not plain matrices in a row, with known heads."""
    if layer.kind == "scale":
        return None
    if layer.attends and not all(layer.blocks[role].heads for role in "QKV"):
        return "the number of its heads is not known"
    if record.X.shape[-1] != layer.input_width:
        return f"its input has {record.X.shape[-1]} features where its weights read {layer.input_width}"
    first, last = ("V", "O") if layer.attends else ("up", "down")
    made, read = layer.blocks[first].shape[1], layer.blocks[last].shape[0]
    if layer.attends:
        made = made // _heads(layer, "V") * _heads(layer, "Q")
    return None if made == read else f"its last weight reads {read} features, and those before it make {made}"


def unlike(layer: ModelLayer, off: float) -> str:
    """Why a layer has no closed form whose output is off by so much of it."""
    causes = dict.fromkeys(_CAUSES[role] for role in sorted(layer.beside) if role in _CAUSES)
    said = f"no closed form gives its output, the nearest is off by {off:.1e} of it"
    if off < _LOW_PRECISION:
        said += "; does it compute in lower precision inside, as Hugging Face's attn_implementation='eager' may?"
    elif causes:
        said += f": it {', '.join(causes)}"
    return said


def deviation(rebuilt: Rebuilt, record: LayerRecord) -> float:
    """Largest error of the rebuilt output, in units of what rounding allows."""
    found, expected = rebuilt.output(), record.F
    if found.shape != expected.shape:
        return math.inf
    size = max(float(expected.abs().max()), record.size)
    error = float((found - expected).abs().max()) / max(size, torch.finfo(found.dtype).tiny)
    return error / (ROUNDING * torch.finfo(found.dtype).eps)


def _positions(cos: Tensor, sin: Tensor, width: int) -> PositionMatrices:
    """Rotations of features p and p + k/2 by tables of cosines and sines (1 or N, L, k)."""
    if cos.ndim != 3 or cos.shape[-1] != width or width % 2:
        raise _CallError("rotary", f"tables of shape {tuple(cos.shape)} for heads of width {width}")
    if bool((cos == cos[:1]).all() and (sin == sin[:1]).all()):
        cos, sin = cos[:1], sin[:1]
    swapped = torch.eye(width, dtype=sin.dtype, device=sin.device).roll(width // 2, 0)
    swapped[: width // 2] *= -1  # (-v2, v1) of v = (v1, v2)
    return PositionMatrices((torch.diag_embed(cos) + sin[..., :, None] * swapped)[:, None])


class _CallError(CurvoscopeError, ValueError):
    """A layer whose call is of no known form."""


def _heads(layer: ModelLayer, role: str) -> int:
    return layer.blocks[role].heads or 1


def _mask(record: LayerRecord) -> Tensor | None:
    """What is added to the scores, (1 or N, 1 or heads, L, L), or True where a query may look; None if nothing is."""
    N, L = record.X.shape[:2]
    given = record.arguments
    mask, padding = given.get("attention_mask"), None
    if record.with_keys:  # nn.MultiheadAttention: booleans say where not to look
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


@dataclass(frozen=True)
class LayerAtBatch:
    """A layer in closed form on one micro-batch, with the loss and G (N, L, m) at its output, times its weight."""

    rebuilt: Rebuilt
    value: float
    gradient: Tensor

    def weight_gradient(self, name: str) -> Tensor:
        """dl/dW (a, p) of a weight, by its name in closed form, from G at the output."""
        return self.rebuilt.gradients([name], self.gradient)[0]

    def bent(self, slopes: Mapping[str, Tensor], size: float) -> str | None:
        """Why the layer has other derivatives than its function: tensors in it are detached, or hooks change gradients.
        `slopes`: see `LayerPasses`; `size`: of F. Biases of keys have no gradient, only rounding."""
        R = random_cotangent(self.gradient)
        found = slopes_of(dict(zip(slopes, self.rebuilt.gradients(list(slopes), R), strict=True)))
        epsilon = torch.finfo(R.dtype).eps
        rounding = ROUNDING * epsilon * size * R.numel() ** 0.5
        for name, expected in slopes.items():
            off = float((found[name] - expected).abs().max())
            if off > epsilon**0.5 * float(expected.abs().max()) + rounding:
                return f"torch's gradient at {name} is not that of its function: something in it is detached, or hooked"
        return None


def rebuilt_on(
    layer: ModelLayer, weights: Mapping[str, Tensor], paths: Mapping[str, str], found: LayerPasses
) -> tuple[str | None, list[LayerAtBatch]]:
    """Why the layer has no closed form, or the layer on each micro-batch; `weights` by the path of the parameter."""
    if found.reason is not None:
        return found.reason, []
    moved = shaken({paths[name]: weights[paths[name]] for name in layer.parameters})
    at_shaken, at_own = (
        {name: tensors[paths[name]].detach() for name in layer.parameters} for tensors in (moved, weights)
    )
    batches = []
    for each in found.passes:
        candidates: list[Reading] | None = None
        if each.moved is not None:
            candidates, least = fitting(layer, at_shaken, each.moved)
        if candidates is None or candidates:
            candidates, least = fitting(layer, at_own, each.own, candidates)
        if not candidates:
            return least, []
        rebuilt = rebuild(layer, at_own, each.own, candidates[0])
        batches.append(LayerAtBatch(rebuilt, each.value, each.gradient))
    return None, batches
