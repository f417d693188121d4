"""Scores that people use in place of the second-order cost of a change, to be compared with what was measured."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from curvoscope.analysis.changes import Change
from curvoscope.analysis.expansion import Expansion
from curvoscope.analysis.sensitivity import expanded
from curvoscope.autodiff.batches import Batch
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
    names = [move.block.name for move in found.moves]
    numbers = {
        "magnitude": [float(move.vector.double().square().sum()) for move in found.moves],
        "gradient": (found.weights @ found.first()).abs().tolist(),
        "fisher": (found.weights @ found.fisher()).tolist(),
    }
    return {score: dict(zip(names, values, strict=True)) for score, values in numbers.items()} | {
        "inputs": _inputs(model, found)
    }


def _inputs(model: nn.Module, expansion: Expansion) -> dict[str, float]:
    """½ mean_t |x_t d|² of each move that is a part of a layer's `weight`."""
    snapshot = expansion.engine.snapshot
    changes: dict[str, dict[str, Tensor]] = {}  # by the path of the layer, then by block
    for move in expansion.moves:
        paths = {snapshot.paths[piece.parameter] for piece in move.block.pieces}
        path, _, kind = next(iter(paths)).rpartition(".")
        if len(paths) == 1 and kind == "weight":
            change = torch.zeros_like(snapshot.weights[f"{path}.weight".lstrip(".")])
            for piece, part in move.block.parts(move.vector):
                region = piece.of(change)
                region.copy_(part.reshape(region.shape))
            changes.setdefault(path, {})[move.block.name] = change
    totals: dict[str, float] = {}
    tokens: dict[str, int] = {}
    inside = False

    def record(path: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal inside
        if inside or not arguments or not isinstance(arguments[0], Tensor) or not arguments[0].is_floating_point():
            return
        inside = True  # the layer runs once more for each block, without this hook
        try:
            for name, change in changes[path].items():
                own = {key: torch.zeros_like(value) for key, value in module.named_parameters()} | {"weight": change}
                out = functional_call(module, own, arguments)
                totals[name] = totals.get(name, 0.0) + float(out.double().square().sum()) / 2
                tokens[name] = tokens.get(name, 0) + out[..., 0].numel()
        finally:
            inside = False

    def visit(weight: float, batch: Batch) -> None:
        with torch.no_grad():
            expansion.engine.loss(snapshot.weights, batch)

    with ExitStack() as stack:
        for path in changes:
            module = model.get_submodule(path)
            hook = module.register_forward_pre_hook(lambda one, args, path=path: record(path, one, args))
            stack.callback(hook.remove)
        expansion.engine.walk(visit)
    return {name: total / tokens[name] for name, total in totals.items()}
