"""Entropy and spread of the attention rows of a model's layers, from one forward pass."""

from contextlib import ExitStack

import torch
from torch import nn

from curvoscope.analysis.propagation import AttentionSummary
from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.engine import Autodiff
from curvoscope.closed.layers import LayerRecord, LayerRecorder, ModelLayer, layers_of
from curvoscope.closed.rebuilding import Reading, fitting, rebuild
from curvoscope.exact.attention.moments import Moments
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.families.block_maps import blocks_of


class AttentionRows:
    """The attention layers of a model that can be rebuilt in closed form.

    How a layer computes (mask, scale) is found at the first batch and kept; layers of no known form, or without
    softmax, are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = [layer for layer in layers_of(model, blocks_of(model)) if layer.kind == "attn"]
        self._readings: dict[str, Reading] | None = None

    def summaries(self, engine: Autodiff) -> dict[str, AttentionSummary]:
        """By layer: the means over the batches of the engine, each weighted by its loss terms."""
        if not self._layers:
            return {}
        found: dict[str, list[tuple[float, AttentionSummary]]] = {}

        def visit(weight: float, batch: Batch) -> None:
            for name, one in self._of_batch(engine, batch).items():
                found.setdefault(name, []).append((weight, one))

        engine.walk(visit)
        return {name: _mean(parts) for name, parts in found.items()}

    def _of_batch(self, engine: Autodiff, batch: Batch) -> dict[str, AttentionSummary]:
        snapshot = engine.snapshot
        weights = {name: snapshot.weights[path] for name, path in snapshot.paths.items()}
        with torch.no_grad():
            with ExitStack() as stack:
                recorders = [(layer, stack.enter_context(LayerRecorder(self._model, layer))) for layer in self._layers]
                snapshot(snapshot.weights, batch)
            if self._readings is None:
                self._readings = {}
                for layer, recorder in recorders:
                    found = fitting(layer, weights, recorder.record)[0] if recorder.once else []
                    if found and found[0].activation == "softmax":  # the rows of others are no distributions
                        self._readings[layer.name] = found[0]
            known = [(layer, recorder.record) for layer, recorder in recorders if layer.name in self._readings]
            return {layer.name: self._summary(layer, weights, record) for layer, record in known}

    def _summary(self, layer: ModelLayer, weights: dict[str, torch.Tensor], record: LayerRecord) -> AttentionSummary:
        assert self._readings is not None
        rebuilt = rebuild(layer, weights, record, self._readings[layer.name])
        assert isinstance(rebuilt.layer, SelfAttention)
        passed = rebuilt.forward_pass(rebuilt.layer)
        return AttentionSummary.of(Moments(rebuilt.X[:, None], passed.A))


def _mean(parts: list[tuple[float, AttentionSummary]]) -> AttentionSummary:
    """The weighted mean; the entropy is None if that of any part is."""
    entropies = [weight * one.entropy for weight, one in parts if one.entropy is not None]
    variance = sum(weight * one.variance for weight, one in parts)
    return AttentionSummary(sum(entropies) if len(entropies) == len(parts) else None, variance)
