"""Scores that people use in place of the second-order cost of a change, to be compared with what was measured."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.analysis.changes import Change
from curvoscope.analysis.expansion import Move
from curvoscope.analysis.sensitivity import expanded
from curvoscope.approximations import GradientSource, diagonal
from curvoscope.approximations.enumeration import labelled
from curvoscope.blocks import Blocks
from curvoscope.losses import LossFunction


def scores(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    changed: Change,
    *,
    blocks: Blocks | None = None,
    device: torch.device | str | None = None,
) -> dict[str, dict[str, float]]:
    """Four scores of every block that changes, none of which needs a second derivative.

    "magnitude": |d|². "gradient": |g·d|. "fisher": ½ Σ_j F_jj d_j² with F the empirical Fisher matrix of sequences.
    "inputs": ½ mean_t |x_t d|² with x_t the inputs of the layer, the curvature X^T X (x) I of GPTQ; blocks that are
    not the weight of a layer of their own have none.

    Args:
        model, loss_fn, batches, changed, blocks, device: as in `sensitivity`.

    Returns:
        By the name of the score and the block.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> data = [(torch.eye(2).double(), model(torch.eye(2).double()).detach())]
        >>> moved = {"weight": model.weight.detach() + 1.0}
        >>> found = cv.analysis.scores(model, torch.nn.MSELoss(), data, moved)
        >>> {name: round(score["weight"], 6) for name, score in found.items()}  # at the minimum the gradient is zero
        {'magnitude': 2.0, 'gradient': 0.0, 'fisher': 0.0, 'inputs': 0.5}
    """
    found = expanded(model, loss_fn, batches, changed, blocks, "sequence", device).expansion
    sources = labelled(found.engine, [move.block for move in found.moves])
    (slopes,) = found.forms(found.first)
    magnitude, fisher, inputs = scores_of_moves(found.moves, sources)
    slope = {
        move.block.name: abs(one) for move, one in zip(found.moves, (found.weights @ slopes).tolist(), strict=True)
    }
    return {"magnitude": magnitude, "gradient": slope, "fisher": fisher, "inputs": inputs}


def scores_of_moves(moves: Iterable[Move], sources: Mapping[str, GradientSource]) -> tuple[dict[str, float], ...]:
    """The scores "magnitude", "fisher" and "inputs" of moves of single blocks, from their gradients."""
    magnitude, fisher, inputs = {}, {}, {}
    for move in moves:
        name, source = move.block.name, sources[move.block.name]
        magnitude[name] = float(move.vector.double().square().sum())
        fisher[name] = float(move.vector @ (diagonal(source) @ move.vector)) / 2
        if source.parts[0].inputs is not None:
            inputs[name] = _of_inputs(source, move.vector)
    return magnitude, fisher, inputs


def _of_inputs(source: GradientSource, vector: Tensor) -> float:
    """½ mean_t |x_t d|²."""
    gram, _, tokens = source.token_moments
    change = vector.view(source.shape)
    change = change.T if source.flipped else change
    return float((change * (gram @ change)).sum()) / (2 * tokens)
