"""Tests of products with a Hessian, for models with operations whose second derivatives have not been checked.

A Hessian is symmetric, u.Hv = v.Hu, and is the second derivative of the loss l: along a vector u,

    u.Hu = (l(w + hu) - 2 l(w) + l(w - hu)) / h² + O(h).

The vectors are random, each block in proportion to its weights, so that h is a relative change of them all.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvoscope.autodiff.graph import Graph, Operation, SecondDerivativeError
from curvoscope.blocks import Block, parameters_of

if TYPE_CHECKING:
    from curvoscope.autodiff.engine import Autodiff

_ROUNDING = 64  # times epsilon: the error of a loss, or of a product relative to its vectors
_BIAS = 10  # times the third difference: what the second may be off by
_LEAST = 1e-3  # relative: a smaller error is not looked for
_ASYMMETRY = 0.4  # power of epsilon, relative: 5e-7 in float64, 2e-3 in float32


def check_products(
    engine: "Autodiff",
    graph: Graph,
    position: int,
    rows: Sequence[Block],
    columns: Sequence[Block],
    known: tuple[Tensor, Tensor] | None,
    unknown: Iterable[Operation],
) -> None:
    """Raise unless the products of the graph of the micro-batch at `position` are those of a Hessian.

    `known`: a vector and its product with the total, for the same rows and columns.
    """
    snapshot = engine.snapshot
    blocks = list({block.name: block for block in [*rows, *columns]}.values())
    wanted = parameters_of(blocks)
    pieces = [[snapshot.weight(piece.parameter) for piece in block.pieces] for block in blocks]
    scales = torch.cat([_typical(own).expand(block.size) for own, block in zip(pieces, blocks, strict=True)])

    def product(vector: Tensor) -> Tensor:
        return engine._products(graph, "total", blocks, wanted, engine._spread(blocks, vector[None]))[0]

    if known is None or list(rows) != list(columns):
        known = (first := probe(scales, 1)), product(first)
    vector = probe(scales, 0)
    Hv = product(vector)
    check_symmetry(vector, Hv, *known, unknown)
    batch = next(batch for i, batch in enumerate(engine._batches) if i == position)
    batch, spread = snapshot.moved(batch), engine._spread(blocks, vector[None])

    def loss(step: float) -> float:
        moved = {snapshot.paths[name]: direction[0] for name, direction in spread.items()}
        weights = dict(snapshot.weights)
        with torch.no_grad():
            weights |= {path: weights[path].add(direction, alpha=step) for path, direction in moved.items()}
            return float(engine.loss(weights, batch))

    curvature = float(vector.double() @ Hv.double())
    with engine.running():
        check_curvature(loss, engine.survey.losses[position], curvature, engine.dtype, unknown)


def _typical(weights: Sequence[Tensor]) -> Tensor:
    """The root mean square of the weights of a block, or one if they are zero, (1,)."""
    size = torch.stack([weight.square().mean() for weight in weights]).mean().sqrt()
    return torch.where(size > 0, size, 1.0)[None]


def probe(scales: Tensor, seed: int) -> Tensor:
    """Normal numbers times `scales`, the same for each call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(scales), generator=generator, dtype=torch.float64).to(scales) * scales


def check_symmetry(u: Tensor, Hu: Tensor, v: Tensor, Hv: Tensor, unknown: Iterable[Operation]) -> None:
    """Raise unless u.Hv = v.Hu, relative to the size of their terms and up to the rounding of the products."""
    epsilon = torch.finfo(Hv.dtype).eps
    u, Hu, v, Hv = u.double(), Hu.double(), v.double(), Hv.double()
    size = float((u * Hv).norm() + (v * Hu).norm())
    rounding = _ROUNDING * epsilon * float(u.norm() * Hv.norm() + v.norm() * Hu.norm())
    gap = abs(float(u @ Hv - v @ Hu))
    if gap > max(rounding, epsilon**_ASYMMETRY * size):
        raise _wrong(f"products with its Hessian are not symmetric, by {gap / size:.1%} of their size", unknown)


def check_curvature(
    loss: Callable[[float], float], here: float, curvature: float, dtype: torch.dtype, unknown: Iterable[Operation]
) -> None:
    """Raise unless the second difference of `loss` at 0, where it is `here`, is `curvature` (u.Hu).

    Kinks, and a step that is too long, show in the third difference, and then nothing is said. Among many kinks it may
    vanish by chance, so steps back, and steps of half or of twice the length, must find the same.
    """
    h, known = torch.finfo(dtype).eps ** 0.25, {0.0: here}

    def at(step: float) -> float:
        if step not in known:
            known[step] = loss(step)
        return known[step]

    def second(step: float) -> float:
        return (at(step) - 2 * here + at(-step)) / step**2

    def off(step: float) -> bool:
        below, above, further = at(-step), at(step), at(2 * step)
        if not all(map(math.isfinite, (below, above, further))):
            return False
        third = abs(further - 3 * above + 3 * here - below) / step**2
        noise = _ROUNDING * torch.finfo(dtype).eps * max(1.0, abs(here), abs(above), abs(below)) / step**2
        gap, size = abs(second(step) - curvature), max(abs(second(step)), abs(curvature))
        return gap > _BIAS * third + noise + _LEAST * size

    if off(h) and off(-h) and any(off(step) and off(-step) for step in (h / 2, 2 * h)):
        raise _wrong(
            f"its curvature along a vector is {curvature:.4g}, by differences of its loss {second(h):.4g}", unknown
        )


def _wrong(found: str, unknown: Iterable[Operation]) -> SecondDerivativeError:
    names = ", ".join(sorted({operation.name for operation in unknown}))
    return SecondDerivativeError(
        "model",
        f"{found}. Autograd's second derivative of one of these operations is wrong: {names}. Replace it, or use "
        "hvp='difference'",
    )
