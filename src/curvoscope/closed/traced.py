"""Attention rebuilt from the graph of a forward pass, for what the call of a module does not tell.

Norms of queries and keys, positions of any kind, windows, biases of scores, soft caps and sinks are facts of one pass
(`attention_facts`), at weights of which those of attention layers are shaken. They are those of the batch, so each
micro-batch has its own. A layer counts as rebuilt when it gives the module's output with these facts there and at the
model's own weights: then the facts do not depend on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.engine import Autodiff
from curvoscope.closed.attention_facts import AttentionFacts, UnknownAttentionError, attention_facts, call_of
from curvoscope.closed.latent import LatentFacts, latent_facts, rebuild_latent
from curvoscope.closed.layers import ModelLayer
from curvoscope.closed.passes import LayerPasses, LayerRecord, recorded, shaken
from curvoscope.closed.rebuilding import (
    ROUNDING,
    LayerAtBatch,
    Rebuilt,
    attention_at,
    deviation,
    head_width,
    unfit,
    unlike,
    weights_by_role,
)
from curvoscope.errors import CurvoscopeError
from curvoscope.exact.attention.rotary import PositionMatrices
from curvoscope.families.adapters import adapters_of, without_adapters
from curvoscope.families.attention_calls import AttentionCall, attention_calls
from curvoscope.families.data_flow import DataFlow
from curvoscope.families.tracing import data_flow


@dataclass(frozen=True)
class TracedLayer:
    """Attention on one micro-batch, at shaken weights of attention layers alone: its facts, or why there are none, and
    what passes through."""

    facts: AttentionFacts | LatentFacts | str
    moved: LayerRecord


def traced_layers(engine: Autodiff, layers: Sequence[ModelLayer], shake: bool = True) -> dict[str, list[TracedLayer]]:
    """Run the model on all micro-batches, once each, with the graph of all weights; `shake`: at shaken ones.

    Adapters are left out, and those of the layers are merged into their weights: the graph is that of a plain model.
    """
    found: dict[str, list[TracedLayer]] = {layer.name: [] for layer in layers}
    snapshot = engine.snapshot
    inside = {snapshot.paths[name] for layer in layers for name in layer.parameters}
    moved = snapshot.weights | (shaken({path: snapshot.weights[path] for path in inside}) if shake else {})
    adapters = adapters_of(engine.model) if any(layer.adapters for layer in layers) else []
    for layer in layers:
        moved |= _merged(layer, moved, snapshot.paths)

    def visit(weight: float, batch: Batch) -> None:
        weights = {path: tensor.detach().requires_grad_(tensor.is_floating_point()) for path, tensor in moved.items()}
        leaves = {name: weights[path] for name, path in snapshot.paths.items()}
        arguments, keywords = tree_map(_followed, (batch.arguments, batch.keywords))
        passes = {layer.name: LayerPasses() for layer in layers}
        called = replace(batch, arguments=arguments, keywords=keywords)
        records, _, outputs = recorded(engine, weights, called, passes, layers)
        integers = [leaf for leaf in tree_leaves((arguments, keywords)) if _is_integer(leaf)]
        flow = data_flow(outputs, leaves, integers)
        calls = attention_calls(flow)
        for layer in (layer for layer in layers if layer.name in records):
            facts = _facts(flow, calls, layer, leaves, records[layer.name])
            found[layer.name].append(TracedLayer(facts, records[layer.name]))

    with without_adapters(engine.model, adapters):
        engine.walk(visit, own_kernels=False)  # the graph of ours does not show how scores are made
    return found


def _merged(layer: ModelLayer, weights: Mapping[str, Tensor], paths: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights of a layer with its adapters in them, and these zero, by path."""
    named = {name: weights[paths[name]] for name in layer.parameters}
    whole, found = layer.matrices(named), dict[str, Tensor]()
    for adapter in layer.adapters:
        found |= {piece.parameter: torch.zeros_like(named[piece.parameter]) for piece in adapter.A.pieces}
        for block in (layer.blocks[role] for role in adapter.B):
            for name in {piece.parameter for piece in block.pieces} - set(found):
                found[name] = named[name].clone()
        for role in adapter.B:
            layer.blocks[role].scatter(whole[role].flatten(), found)
    return {paths[name]: tensor for name, tensor in found.items()}


def _facts(
    flow: DataFlow,
    calls: Sequence[AttentionCall],
    layer: ModelLayer,
    leaves: Mapping[str, Tensor],
    record: LayerRecord,
) -> AttentionFacts | LatentFacts | str:
    W = weights_by_role(layer, {name: leaves[name].detach() for name in layer.parameters})
    try:
        if layer.latent:
            return latent_facts(flow, call_of(calls, layer.blocks, latent=True), layer, W, record)
        projected = {role: record.X @ W[role] + W.get(f"b_{role}", 0.0) for role in "QK"}
        return attention_facts(flow, call_of(calls, layer.blocks), layer.blocks, projected)
    except UnknownAttentionError as reason:
        return str(reason)
    except RuntimeError as error:  # tensors of other shapes than attention has
        return f"how it makes its scores is not clear ({str(error).splitlines()[0]})"


def _followed(leaf: Any) -> Any:
    """An input whose way through the graph is followed."""
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().clone().requires_grad_(True) if floating else leaf


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_floating_point()


def rebuilt_as_traced(
    layer: ModelLayer,
    weights: Mapping[str, Tensor],
    paths: Mapping[str, str],
    found: LayerPasses,
    traced: Sequence[TracedLayer],
) -> tuple[str | None, list[LayerAtBatch]]:
    """Like `rebuilt_on`, from the facts of each micro-batch: they must hold at both weights of the layer."""
    own = {name: weights[paths[name]].detach() for name in layer.parameters}
    moved = shaken({paths[name]: weights[paths[name]] for name in layer.parameters})
    elsewhere = {name: moved[paths[name]] for name in layer.parameters}
    batches = []
    for each, seen in zip(found.passes, traced, strict=True):
        reason = unfit(layer, each.own)
        if reason is not None or not isinstance(seen.facts, AttentionFacts):
            return reason or str(seen.facts), []
        try:
            rebuilt = rebuild_as(layer, own, each.own.X, seen.facts)
            at_both = rebuilt, rebuild_as(layer, elsewhere, seen.moved.X, seen.facts)
            off = max(deviation(one, at) for one, at in zip(at_both, (each.own, seen.moved), strict=True))
        except CurvoscopeError as problem:
            return str(problem), []
        if off > 1:
            return unlike(layer, off * ROUNDING * torch.finfo(each.own.F.dtype).eps), []
        batches.append(LayerAtBatch(rebuilt, each.value, each.gradient))
    return None, batches


def rebuilt_latent(
    layer: ModelLayer,
    weights: Mapping[str, Tensor],
    paths: Mapping[str, str],
    found: LayerPasses,
    traced: tuple[Sequence[TracedLayer], Sequence[TracedLayer]],
) -> tuple[str | None, list[LayerAtBatch]]:
    """Like `rebuilt_as_traced` for latent attention, whose facts differ between the two passes: at the model's own
    weights and at shaken ones."""
    own = {name: weights[paths[name]].detach() for name in layer.parameters}
    moved = shaken({paths[name]: weights[paths[name]] for name in layer.parameters})
    elsewhere = {name: moved[paths[name]] for name in layer.parameters}
    batches = []
    for each, here, there in zip(found.passes, *traced, strict=True):
        rebuilt = []
        for at, values in ((here, own), (there, elsewhere)):
            if not isinstance(at.facts, LatentFacts):
                return str(at.facts), []
            rebuilt.append(rebuild_latent(layer, weights_by_role(layer, values), at.moved, at.facts))
            off = deviation(rebuilt[-1], at.moved)
            if off > 1:
                return unlike(layer, off * ROUNDING * torch.finfo(at.moved.F.dtype).eps), []
        batches.append(LayerAtBatch(rebuilt[0], each.value, each.gradient))
    return None, batches


def rebuild_as(layer: ModelLayer, weights: Mapping[str, Tensor], X: Tensor, facts: AttentionFacts) -> Rebuilt:
    """Attention in closed form, as the graph of a pass says that it is computed."""
    positions = {"rotary": facts.query.positions, "key_rotary": facts.key.positions}
    if (positions["rotary"] is None) != (positions["key_rotary"] is None):
        identity = torch.eye(head_width(layer), dtype=X.dtype, device=X.device).expand(1, 1, X.shape[1], -1, -1)
        positions = {name: one or PositionMatrices(identity) for name, one in positions.items()}
    norms = {"q_norm": facts.query.norm, "k_norm": facts.key.norm}
    return Rebuilt(
        attention_at(layer, weights, facts.scale, **positions, **norms, softcap=facts.softcap, sinks=facts.sinks),
        X,
        facts.mask,
    )
