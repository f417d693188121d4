"""Curvature through depth: the Hessian of the loss at the output of every layer, and what makes it grow or shrink.

At the output F of a layer, S = d²loss/dF² = S_gn + S_functional; a layer with Jacobian J passes J^T S J down to its
input and adds a curvature of its own. The norms of S, of its functional part and of J are measured layer by layer,
together with the Hessian blocks of the layer's weights and, for attention, the entropy and spread of its rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from curvoscope.closed.layer_curvatures import CurvatureAtOutput
from curvoscope.curvature import hessian
from curvoscope.errors import ModelError
from curvoscope.estimate import Estimate
from curvoscope.exact import SelfAttention
from curvoscope.exact.attention.moments import Moments
from curvoscope.exact.backpropagation import OutputCurvature, backpropagate
from curvoscope.exact.block import Stack, TransformerBlock
from curvoscope.losses.objectives import LossFunction
from curvoscope.operators.base import LinearOperator

DEFAULT_TOLERANCE = 0.05


@dataclass(frozen=True)
class AttentionSummary:
    """Entropy and spread of the rows of attention, averaged over sequences, heads and queries; both 0 for one-hot rows.

    Args:
        entropy: in nats; None if the rows are no distributions, as those of linear attention.
        variance: tr M2, the spread of the inputs under a row, as a share of their mean square.

    Example:
        >>> import torch, curvoscope as cv
        >>> W = torch.eye(2).double()
        >>> uniform = cv.exact.SelfAttention(0 * W, W, W)  # all scores are zero
        >>> found = cv.analysis.AttentionSummary.of(uniform.moments(torch.eye(2).double()))
        >>> round(found.entropy, 4), round(found.variance, 4)  # log 2
        (0.6931, 0.5)
    """

    entropy: float | None
    variance: float

    @classmethod
    def of(cls, moments: Moments) -> "AttentionSummary":
        """Summarise the attention of a layer, averaged over sequences, heads and queries.

        Args:
            moments: attention (..., L, L) and inputs (..., L, d), such as from `SelfAttention.moments`.

        Returns:
            Entropy and variance; the entropy is None if the rows are not distributions.
        """
        X, A = moments.X, moments.attention
        spread = (A @ X.square()).sum(-1) - moments.M1.square().sum(-1)  # tr M2, without M2
        scale = float(X.square().sum(-1).mean()) or 1.0  # inputs that are all zero have no spread
        sums = A.sum(-1)
        close = torch.finfo(A.dtype).eps ** 0.5
        known = bool((A >= 0).all() and ((sums - 1).abs().minimum(sums) <= close).all())  # a masked row is all zero
        return cls(float(moments.entropy.mean()) if known else None, float(spread.mean()) / scale)


@dataclass(frozen=True)
class LayerCurvature:
    """Curvature at one layer. Estimates have an error bar; exact numbers have the standard error 0.

    Args:
        name: of the layer, for example "h.0.attn"; "input" for the input of the first one.
        spectral, frobenius: the norms of S at the layer's output.
        functional_spectral, functional_frobenius: the norms of the functional part of S.
        jacobian: the spectral norm of dF/dX of the layer alone, without a residual connection; None for the input.
        blocks: the Frobenius norms of the total Hessian blocks of its weights.
        attention: a summary of the attention rows; None for other layers.

    Example:
        >>> import torch, curvoscope as cv
        >>> W, b, X = torch.eye(2).double(), torch.zeros(2).double(), torch.eye(2).double()
        >>> layers = cv.exact.SelfAttention(0 * W, W, W), cv.exact.FeedForward(W, b, W, b, "gelu")
        >>> block = cv.exact.TransformerBlock(*layers, placement="none")
        >>> last = cv.analysis.propagation(block, (X, cv.losses.MSE(0 * X))).layers[-1]
        >>> last.name, round(float(last.spectral), 6)  # S = 2/4 of the identity
        ('h.0.mlp', 0.5)
    """

    name: str
    spectral: Estimate
    frobenius: Estimate
    functional_spectral: Estimate
    functional_frobenius: Estimate
    jacobian: Estimate | None
    blocks: dict[str, Estimate] = field(default_factory=dict)
    attention: AttentionSummary | None = None


@dataclass(frozen=True)
class Propagation:
    """Curvature at the layers of a model, from `propagation`.

    Args:
        layers: in the order of the forward pass.
        loss: the loss.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
        >>> X = torch.eye(4).double()[None]
        >>> found = cv.analysis.propagation(layer, (X, 0 * X), torch.nn.MSELoss())
        >>> len(found.layers), found.growth() > 0  # on the way from the output to the input
        (2, True)
    """

    layers: tuple[LayerCurvature, ...]
    loss: float

    def growth(self) -> float:
        """|S|_2 at the first layer divided by |S|_2 at the last: how much curvature grows on its way down."""
        known = [layer.spectral.value for layer in self.layers]
        return known[0] / known[-1] if known[-1] else float("inf")


def propagation(
    model: nn.Module | Stack | TransformerBlock,
    batch: Any,
    loss_fn: LossFunction | None = None,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    seed: int | None = None,
) -> Propagation:
    """Curvature at every attention and feed-forward layer (for a `Stack`, also at every norm) on one batch.

    Args:
        model: a torch model whose layers `cv.blocks_of` knows, or a `cv.exact.Stack` or `cv.exact.TransformerBlock`.
        batch: as in `cv.hessian`: (inputs, targets) or a dict with "labels". For a `Stack`: (X, loss).
        loss_fn: as in `cv.hessian`; None: the model's own. A `Stack` has its loss in the batch.
        tolerance: the relative error of what cannot be computed exactly.
        seed: for the estimates.

    Returns:
        The layers in the order of the forward pass.

    Example:
        >>> import torch, curvoscope as cv
        >>> W, b, X = torch.eye(2).double(), torch.zeros(2).double(), torch.eye(2).double()
        >>> layers = cv.exact.SelfAttention(0 * W, W, W), cv.exact.FeedForward(W, b, W, b, "gelu")
        >>> block = cv.exact.TransformerBlock(*layers, placement="none")
        >>> found = cv.analysis.propagation(block, (X, cv.losses.MSE(0 * X)))
        >>> [layer.name for layer in found.layers]
        ['input', 'h.0.attn', 'h.0.mlp']
    """
    outputs: Iterable[tuple[OutputCurvature | CurvatureAtOutput, Moments | None]]
    if isinstance(model, Stack | TransformerBlock):
        X, loss_fn = batch
        stack = model if isinstance(model, Stack) else Stack([model])
        H, value = stack.hessian(X, loss_fn), stack.chain(X, loss_fn).loss.value
        outputs = ((record, _moments(record)) for record in backpropagate(stack, X, loss_fn))
    else:
        H = hessian(model, loss_fn, [batch])
        outputs, value = ((one, one.moments) for one in H.layer_curvatures()), H.loss

    def spectral(operator: LinearOperator) -> Estimate:
        return operator.spectral_norm(tolerance=tolerance if operator.estimated else None, seed=seed)

    def frobenius(operator: LinearOperator) -> Estimate:
        return operator.frobenius_norm(tolerance=tolerance if operator.estimated else None, seed=seed)

    layers = []
    for one, moments in outputs:
        layers.append(
            LayerCurvature(
                one.name,
                *(spectral(one.S), frobenius(one.S)),
                *(spectral(one.S_functional), frobenius(one.S_functional)),
                None if one.jacobian is None else spectral(one.jacobian),
                {name: frobenius(H.total[name]) for name in H.names if name.startswith(f"{one.name}.")},
                None if moments is None else AttentionSummary.of(moments),
            )
        )
    if not layers:
        raise ModelError("model", "has no attention or feed-forward layer that cv.blocks_of knows")
    return Propagation(tuple(layers), value)


def _moments(record: OutputCurvature) -> Moments | None:
    if not isinstance(record.layer, SelfAttention) or record.input is None:
        return None
    return record.layer.moments(record.input)
