"""The gradients of a model's block: exactly, by one backward pass for each direction of the loss Hessian, or samples.

The loss Hessian in the outputs is S = R R^T. Backward passes of the columns of R give delta at the output of a product
with the weight, and gamma = X^T delta. Rows of a batch do not meet in the loss, so each is a group of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvoscope.approximations.factors import GradientFactors
from curvoscope.approximations.gradients import GradientSource
from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.cotangents import cotangents
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.graph import gradients_at_once, gradients_in_turn
from curvoscope.autodiff.kernels import kept_derivatives
from curvoscope.autodiff.uses import Factors, find_uses, nodes_below
from curvoscope.blocks import STORED, TRANSPOSED, Block, parameters_of
from curvoscope.errors import ModelError
from curvoscope.losses import CrossEntropy

_AT_ONCE = 2**20  # entries of an output up to which several directions at once are faster than one after the other


def enumerated(engine: Autodiff, block: Block) -> GradientSource:
    """All gradients of one block, with sum gamma gamma^T = H, its Gauss-Newton part."""
    parts: list[GradientFactors] = []
    of_labels: list[GradientFactors] = []

    def visit(share: float, row: _Row) -> None:
        parts.append(row.spanning(share)[block.name])
        if isinstance(engine.objective, CrossEntropy):
            of_labels.append(row.labelled(share)[block.name])

    _each_row(engine, [block], visit)
    return _source(engine, block, parts, of_labels)


def labelled(engine: Autodiff, blocks: Sequence[Block]) -> dict[str, GradientSource]:
    """The gradients of the labels that the data has, one for each sequence, for several blocks by one backward pass for
    each sequence: those of the empirical Fisher matrix."""
    parts: dict[str, list[GradientFactors]] = {block.name: [] for block in blocks}

    def visit(share: float, row: _Row) -> None:
        for name, factors in row.labelled(share).items():
            parts[name].append(factors)

    _each_row(engine, blocks, visit)
    return {block.name: _source(engine, block, parts[block.name], []) for block in blocks}


def _source(
    engine: Autodiff, block: Block, parts: list[GradientFactors], of_labels: list[GradientFactors]
) -> GradientSource:
    alone = not engine.objective.couples_rows
    found = _stacked(parts), True, block.heads, block.axis
    return GradientSource(block.name, *found, sequences=alone, labelled=_stacked(of_labels))


def _each_row(engine: Autodiff, blocks: Sequence[Block], visit: "Callable[[float, _Row], None]") -> None:
    """Call `visit` with each row that has loss terms, and its share of the loss."""
    _check_alone(engine)
    objective = engine.objective

    def rows_of(weight: float, batch: Batch) -> None:
        rows = [batch] if objective.couples_rows or objective.reads_parameters else batch.split(1)
        found = [_Row(engine, blocks, row) for row in rows]
        terms = sum(row.terms for row in found)
        for row in found:
            if row.terms:
                visit(weight if objective.summed else weight * row.terms / terms, row)

    engine.walk(rows_of)


def sampled(engine: Autodiff, block: Block, samples: int, seed: int = 0) -> GradientSource:
    """Random gradients of one block with E[gamma gamma^T] = H: backward passes that end at the layer of the block.

    Each sample takes one micro-batch, drawn with its share of the loss as probability, as in a sweep.
    """
    _check_alone(engine)
    seed %= 2**63
    weights = torch.tensor([weight for weight in engine.survey.weights if weight], dtype=torch.float64)
    drawn = torch.multinomial(weights, samples, True, generator=torch.Generator().manual_seed(seed))
    counts = iter(drawn.bincount(minlength=len(weights)).tolist())
    scale = float(weights.sum()) ** 0.5
    parts: list[GradientFactors] = []

    def visit(weight: float, batch: Batch) -> None:
        seeds = [(seed, sum(map(len, parts)) + i) for i in range(next(counts))]
        if seeds:
            parts.append(_Row(engine, [block], batch, few=True).drawn(seeds, scale)[block.name])

    engine.walk(visit)
    return GradientSource(block.name, tuple(parts), False, block.heads, block.axis)


def _check_alone(engine: Autodiff) -> None:
    if engine.ranks.size > 1:
        raise ModelError("process_group", "approximations run in one process; omit process_group")


class _Row:
    """The graph of one row of a batch, or of a whole batch whose rows meet in the loss.

    `few`: too few backward passes to pay for derivatives that are kept.
    """

    def __init__(self, engine: Autodiff, blocks: Sequence[Block], batch: Batch, few: bool = False) -> None:
        self._objective, self._blocks, self._targets = engine.objective, blocks, batch.targets
        weights, self._leaves = engine.snapshot.leaves(sorted(parameters_of(blocks)))
        with nullcontext() if few else kept_derivatives(engine.model):
            outputs = engine.snapshot(weights, batch)
        self._seen = engine.objective.seen(outputs, engine.snapshot.parameters(weights))
        self.terms = float(engine.objective.terms(self._seen, batch.targets))

    def spanning(self, share: float) -> dict[str, GradientFactors]:
        """The gradients of all directions of the loss Hessian, by block, for a share of the loss."""
        cut, found = cotangents(self._objective, self._seen, self._targets)
        return self._factors(cut, [share**0.5 * column for column in found.root()])

    def drawn(self, seeds: Sequence[tuple[int, int]], scale: float) -> dict[str, GradientFactors]:
        """The gradients of random directions, times `scale`, one for each seed, by block."""
        cut, found = cotangents(self._objective, self._seen, self._targets)
        draws = zip(*map(found.draw, seeds), strict=True)
        return self._factors(cut, [scale * torch.stack(several) for several in draws])

    def labelled(self, share: float) -> dict[str, GradientFactors]:
        """The gradient of the labels, summed over terms, by block."""
        cut, gradient = self._objective.gradient(self._seen, self._targets)
        return self._factors(cut, [(share * self.terms) ** 0.5 * G.detach()[None] for G in gradient])

    def _factors(self, cut: Sequence[Tensor], directions: Sequence[Tensor]) -> dict[str, GradientFactors]:
        """X and delta of directions (k, *shape) of each F; the gradients if a weight is used in another way."""
        uses, _ = find_uses(nodes_below([F.grad_fn for F in cut if F.grad_fn is not None]), self._leaves)
        if self._objective.reads_parameters:  # its own gradient is at no product
            uses = []
        samples = torch.arange(len(directions[0]))
        products: dict[str, list[Factors]] = {}
        for use, delta in zip(uses, self._backward(cut, directions, [use.edge for use in uses]), strict=True):
            if delta is not None:
                one = Factors(samples, use.factor, use.delta(delta), use.region, use.transposed)
                products.setdefault(use.parameter, []).append(one)
        found: dict[str, GradientFactors] = {}
        for block in self._blocks:
            joined = of_products(block, products.get(block.pieces[0].parameter, []))
            if joined is not None:
                found[block.name] = joined
        others = [block for block in self._blocks if block.name not in found]
        leaves = {name: self._leaves[name] for name in parameters_of(others)}
        formed = zip(leaves.items(), self._backward(cut, directions, list(leaves.values())), strict=True)
        gradients = {name: leaf.new_zeros(len(samples), *leaf.shape) if g is None else g for (name, leaf), g in formed}
        return found | {block.name: GradientFactors(None, block.matrix(gradients)[None]) for block in others}

    def _backward(
        self, cut_at: Sequence[Tensor], directions: Sequence[Tensor], targets: Sequence[Tensor] | Sequence[GradientEdge]
    ) -> Sequence[Tensor | None]:
        """What k directions (k, *shape of F) find at each target, (k, ...)."""
        if not targets:
            return []
        pairs = [(F, g) for F, g in zip(cut_at, directions, strict=True) if F.requires_grad]
        cut, columns = [F for F, _ in pairs], [g for _, g in pairs]
        small = sum(g[0].numel() for g in columns) <= _AT_ONCE
        found = gradients_at_once(cut, targets, columns) if small else None
        return gradients_in_turn(cut, targets, columns) if found is None else found


def sampled_source(
    block: Block, found: Sequence[Factors], gradients: Tensor | None, single_rows: bool
) -> GradientSource | None:
    """The samples of a block of one piece, from its products on all micro-batches, or from its gradients.

    None for a look-up and for a weight that is read as it is and transposed. `single_rows`: a micro-batch is one row.
    """
    parts: list[GradientFactors | None] = []
    if gradients is not None:
        parts.append(GradientFactors(None, block.matrix({block.pieces[0].parameter: gradients})[None]))
    else:
        alike: dict[tuple[int, ...], list[Factors]] = {}
        for one in found:
            alike.setdefault(tuple(one.samples.tolist()), []).append(one)
        parts += [of_products(block, some) for some in alike.values()]
    known = tuple(part for part in parts if part is not None)
    if not known or len(known) < len(parts):
        return None
    return GradientSource(block.name, known, False, block.heads, block.axis, sequences=single_rows)


def of_products(block: Block, found: Sequence[Factors]) -> GradientFactors | None:
    """X and delta of the products of one micro-batch with a block; None if it has any other use.

    A weight that several products share has the tokens of all of them.
    """
    if len(block.pieces) != 1 or block.pieces[0].layout not in (STORED, TRANSPOSED):
        return None
    piece = block.pieces[0]
    inside = [one for product in found if (one := product.within((piece.index[0], piece.index[1]))) is not None]
    whole = all(one.region == piece.index and one.factor.ndim == 2 for one in inside)
    if not inside or not whole or len({one.transposed for one in inside}) > 1:
        return None
    X, delta = torch.cat([one.factor for one in inside]), torch.cat([one.deltas for one in inside], 1)
    return GradientFactors(X[None], delta[None], flipped=inside[0].transposed != (piece.layout == TRANSPOSED))


def _stacked(parts: list[GradientFactors]) -> tuple[GradientFactors, ...]:
    """Rows of one shape become groups of one part."""
    alike: dict[object, list[GradientFactors]] = {}
    for part in parts:
        alike.setdefault((part.inputs is None, part.flipped, part.cotangents.shape), []).append(part)
    return tuple(
        GradientFactors(
            None if some[0].inputs is None else torch.cat([part.inputs for part in some if part.inputs is not None]),
            torch.cat([part.cotangents for part in some]),
            some[0].flipped,
        )
        for some in alike.values()
    )
