"""Attention moments head by head: how far the rows of each head are spread, from one forward pass."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.safety import undisturbed
from curvoscope.autodiff.snapshot import device_of, keywords_for
from curvoscope.closed.layers import layers_of
from curvoscope.closed.passes import LayerRecorder
from curvoscope.closed.rebuilding import Reading, fitting, rebuild
from curvoscope.estimate import Estimate
from curvoscope.exact.attention.moments import Moments
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.families.block_maps import blocks_of

_MOST_TRIPLES = 2_000_000_000  # (row, key, key) for all third moments: seconds
_AT_ONCE = 4_000_000  # of them


@dataclass(frozen=True)
class HeadMoments:
    """One head of one layer, averaged over all rows i of all sequences.

    The standard error is that between sequences, 0 for a single one.

    With x² the mean square |x_j|² of the inputs: `entropy` of A_i in nats; `first` |M1_i|²/x²; `second` tr M2_i/x², 0
    for one-hot rows; `third` |M3_i|_F/x³, the size of the third central moment, None if it would take too long.
    """

    layer: str
    head: int
    entropy: Estimate
    first: Estimate
    second: Estimate
    third: Estimate | None


def head_moments(model: nn.Module, batch: Any) -> list[HeadMoments]:
    """The moments of all heads of the softmax attention layers that can be rebuilt in closed form."""
    (given,) = Batches([batch])
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    found = given.to(device_of(model, None), dtype)
    weights = dict(model.named_parameters(remove_duplicate=False))
    rows: list[HeadMoments] = []
    with undisturbed(model, []), torch.no_grad():
        model.eval()
        attention = AttentionMoments(model)
        for layer, moments in attention(weights, lambda: model(*found.arguments, **keywords_for(model, found))):
            rows += of_moments(layer, moments)
    return rows


class AttentionMoments:
    """The softmax attention layers of a model that can be rebuilt in closed form, and their moments in one run of it.

    How a layer computes (mask, scale) is found in the first run and kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.layers = [layer for layer in layers_of(model, blocks_of(model)) if layer.kind == "attn"]
        self._readings: dict[str, Reading | None] = {}

    def __call__(self, weights: Mapping[str, Tensor], run: Callable[[], object]) -> Iterator[tuple[str, Moments]]:
        """By layer, with attention (N, heads, L, L) and inputs (N, 1, L, d); `run` runs the model at the weights."""
        with ExitStack() as stack:
            recorders = [(layer, stack.enter_context(LayerRecorder(self._model, layer))) for layer in self.layers]
            run()
        for layer, recorder in recorders:
            if layer.name not in self._readings:
                known = fitting(layer, weights, recorder.record)[0] if recorder.once else []
                is_known = bool(known) and known[0].activation == "softmax"  # the rows of others are not distributions
                self._readings[layer.name] = known[0] if is_known else None
            reading = self._readings[layer.name]
            if reading is not None:
                rebuilt = rebuild(layer, weights, recorder.record, reading)
                assert isinstance(rebuilt.layer, SelfAttention)
                yield layer.name, Moments(rebuilt.X[:, None], rebuilt.forward_pass(rebuilt.layer).A)


def of_moments(layer: str, moments: Moments) -> Iterator[HeadMoments]:
    """From attention (N, heads, L, L) and inputs (N, 1, L, d)."""
    X, A = moments.X.double(), moments.attention.double()
    square = X.square().sum(-1)  # (N, 1, L)
    scale = float(square.mean()) or 1.0  # inputs that are all zero have moments of zero
    length = moments.M1.double().square().sum(-1)  # (N, heads, L)
    spread = (A @ square[..., None])[..., 0] - length
    third = _third(X[:, 0], A) if A.numel() * A.shape[-1] <= _MOST_TRIPLES else None
    for head in range(A.shape[1]):
        yield HeadMoments(
            layer,
            head,
            _mean(moments.entropy[:, head].double()),
            _mean(length[:, head] / scale),
            _mean(spread[:, head] / scale),
            None if third is None else _mean(third[:, head] / scale**1.5),
        )


def _third(X: Tensor, A: Tensor) -> Tensor:
    """|M3_i|_F, (N, heads, L), by the Gram matrix of the centred inputs: |M3_i|² = sum_jk a_j a_k (x_j·x_k)³."""
    gram = X @ X.mT  # (N, L, L)
    along = A @ gram[:, None]  # x_j·m_i
    square = (A * along).sum(-1)  # |m_i|²
    result = torch.empty_like(square)
    step = max(1, _AT_ONCE // gram.shape[-1] ** 2)
    for n in range(A.shape[0]):
        for head in range(A.shape[1]):
            for rows in torch.arange(A.shape[2]).split(step):
                a, p = A[n, head, rows], along[n, head, rows]
                cubes = (gram[n] - p[:, :, None] - p[:, None, :] + square[n, head, rows][:, None, None]) ** 3
                found = torch.einsum("ij,ijk,ik->i", a, cubes, a)
                result[n, head, rows] = found.clamp_min(0).sqrt()
    return result


def _mean(values: Tensor) -> Estimate:
    """The mean of (N, L) over rows; its standard error from the spread between the sequences."""
    means = values.mean(1)
    count = len(means)
    stderr = float(means.std()) / count**0.5 if count > 1 else 0.0
    return Estimate(
        float(means.mean()), stderr, 0, f"mean of {count} sequences", count - 1.0 if count > 1 else math.inf
    )
