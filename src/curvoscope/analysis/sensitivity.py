"""`sensitivity`: what a change of a model's weights costs, by block and by pair of blocks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.analysis.changes import Change, changed_state, check_covered, displacement
from curvoscope.analysis.expansion import Expansion, Move, engine_of
from curvoscope.analysis.ledger import Ledger, Units, mean_over_units
from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError, RangeError
from curvoscope.estimate import Estimate
from curvoscope.families.block_maps import chosen_blocks
from curvoscope.losses import LossFunction

_UNITS = 16  # units of rounding that a loss may be off by


def sensitivity(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    changed: Change,
    pairs: bool = True,
    *,
    blocks: Blocks | None = None,
    unit: str = "sequence",
    scales: Sequence[float] = (),
    device: torch.device | str | None = None,
) -> Ledger:
    """What a change δ of the weights costs, block by block: L(w + δ) - L(w) = g·δ + ½ δ·Hδ + remainder.

    With d_b the part of δ in block b, (Hδ)_b = Σ_c H_bc d_c: one product with δ gives ½ d_b·(Hδ)_b for all blocks, one
    product per block gives ½ d_b·H_bc d_c for all pairs. Without pairs the ledger takes less than two products; with
    all pairs of n changed blocks, less than n + 2. A product includes the graph that it needs. The changes are
    measured by forward passes: of all blocks together and, with pairs, of each block alone.

    Args:
        model, loss_fn, batches, device: as in `hessian`.
        changed: another model of the same architecture, a state dict, a local Hugging Face folder, or a recipe: a
            function of the model that returns a state dict, see `cv.analysis.recipes`.
        pairs: whether to compute the pairs, and to predict and measure the change of each block alone.
        blocks: the blocks of the ledger; what changes outside of them is left out. None: all that are not frozen, and
            it is an error if anything else changes.
        unit: what the standard errors are over. "sequence": each row of each batch runs alone, unless rows meet in the
            loss or the model; "batch": batches run whole, which is faster for small models.
        scales: factors ε: the change of the loss is measured at w + ε δ as well, see `Ledger.scaled`.

    Returns:
        The ledger. A block that does not change has a row of zeros.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        >>> data = [(torch.randn(8, 3).double(), torch.zeros(8, 2).double())]
        >>> ledger = cv.analysis.sensitivity(model, torch.nn.MSELoss(), data, cv.analysis.recipes.int8)
        >>> [row.block for row in ledger.changed]
        ['0.weight', '2.weight']
        >>> pair = ledger.pairs["0.weight", "2.weight"]
        >>> abs(ledger.rows[0].second - ledger.pairs["0.weight", "0.weight"] - pair) < 1e-12
        True
    """
    checks.choice("unit", unit, ("sequence", "batch"))
    if not all(math.isfinite(scale) for scale in scales):
        raise RangeError("scales", f"got {list(scales)}, expected finite numbers")
    found = expanded(model, loss_fn, batches, changed, blocks, unit, device)
    expansion, moves = found.expansion, found.moves
    count = len(expansion.moves)
    coefficients = torch.tensor([1.0, *scales], dtype=torch.float64)[:, None].expand(-1, count)
    changes = expansion.changes(coefficients)
    forms = [expansion.first, expansion.parts, *([expansion.pairs] if pairs else [])]
    first, parts, *between = expansion.forms(*forms)
    outer, functional = found.spread(parts).unbind(1)
    units = Units(
        found.unit,
        expansion.weights,
        expansion.losses,
        changes[:, 0],
        found.spread(first),
        outer,
        functional,
        found.spread(found.spread(between[0]).mT) if pairs else None,
        found.spread(expansion.changes(torch.eye(count))) if pairs else None,
        changes[:, 1:],
    )
    checks.finite("changed", torch.cat([units.first, units.outer, units.functional], 1))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    norms = [(_length(move.vector), _length(move.block.gather(weights))) for move in moves.values()]
    return Ledger(
        tuple(moves),
        tuple(move.block.size for move in moves.values()),
        tuple(d for d, _ in norms),
        tuple(d / w if w else math.inf if d else 0.0 for d, w in norms),
        tuple(map(float, scales)),
        units,
        _UNITS * torch.finfo(expansion.engine.dtype).eps * abs(expansion.engine.survey.loss),
    )


def measured_change(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    changed: Change,
    *,
    blocks: Blocks | None = None,
    unit: str = "sequence",
    device: torch.device | str | None = None,
) -> Estimate:
    """L(w + δ) - L(w) for a change δ of the weights, by forward passes alone.

    Args:
        model, loss_fn, batches, changed, blocks, unit, device: as in `sensitivity`.

    Returns:
        The change of the loss, with its standard error over sequences.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> data = [(torch.eye(2).double(), model(torch.eye(2).double()).detach())]
        >>> found = cv.analysis.measured_change(model, torch.nn.MSELoss(), data, {"weight": model.weight.detach() + 1})
        >>> round(found, 12), found.stderr < 1e-12
        (1.0, True)
    """
    checks.choice("unit", unit, ("sequence", "batch"))
    found = expanded(model, loss_fn, batches, changed, blocks, unit, device)
    expansion = found.expansion
    change = expansion.changes(torch.ones(1, len(expansion.moves)))[:, 0]
    return mean_over_units(found.unit, expansion.weights, change)


@dataclass(frozen=True, eq=False)
class Expanded:
    """A change cut into moves of all n blocks, the expansion over the m that are not zero, and the unit of the data."""

    moves: dict[str, Move]
    expansion: Expansion
    unit: str

    def spread(self, values: Tensor) -> Tensor:
        """(..., m) as (..., n), zero for the blocks that stay."""
        names = list(self.moves)
        found = values.new_zeros(*values.shape[:-1], len(names))
        found[..., [names.index(move.block.name) for move in self.expansion.moves]] = values
        return found


def expanded(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    changed: Change,
    blocks: Blocks | None,
    unit: str,
    device: torch.device | str | None,
) -> Expanded:
    """The expansion of the loss in a change of the weights."""
    delta = displacement(model, changed_state(model, changed))
    everything = chosen_blocks(model, blocks)
    everything.check(model)
    if blocks is None:
        check_covered(everything, delta)
    moves = {name: Move(block, block.gather(delta)) for name, block in everything.items()}
    moving = [move for move in moves.values() if bool(move.vector.any())]
    if not moving:
        raise EmptyError("changed", "nothing changes in the blocks of the ledger; give other blocks")
    engine, found = engine_of(model, loss_fn, batches, Blocks(move.block for move in moving), unit, device)
    return Expanded(moves, Expansion(engine, moving), found)


def _length(vector: Tensor) -> float:
    return float(vector.double().norm())
