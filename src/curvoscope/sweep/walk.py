"""One chunk of samples: backward passes of random cotangents through the model, layer by layer from the top.

Each sample belongs to one micro-batch, drawn with its share of the loss as probability, and has a cotangent g of the
outputs with E[g g^T] = S. The cotangents that it has further down give the Gram matrices of all blocks. A layer's graph
exists while the samples pass through it; X and delta of its products are kept until its blocks are done.

Several ranks have batches of their own, and each walks the samples of these. When a block is done, all ranks tell each
other X and delta, and make the same Gram matrix of all samples.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvoscope import checks
from curvoscope.approximations.enumeration import sampled_source
from curvoscope.approximations.gradients import GradientSource
from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.cotangents import COLUMNS, Cotangents, SampleSeed, column_ranges, cotangents
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.graph import Gradients, gradients_at_once, gradients_in_turn
from curvoscope.autodiff.layer_calls import NotRepeatableError, listed_layers
from curvoscope.autodiff.safety import within
from curvoscope.autodiff.uses import Factors, WeightUse, find_uses, nodes_below
from curvoscope.blocks import Block, Blocks, Piece
from curvoscope.errors import ModelError
from curvoscope.sweep.last_product import LastProduct, last_product
from curvoscope.sweep.layers import LayerCall, cut_at
from curvoscope.sweep.row_grams import RowGrams

_GROUPS = 8  # that the samples of a micro-batch are divided into, each of which passes a layer at once
_COPIES = 2.5  # of a layer's deltas, in memory at once


class UnseenUseError(NotRepeatableError):
    """A micro-batch uses a parameter in a way that those seen before do not: look at all of them first."""


class UnlikeHeadsError(NotRepeatableError):
    """The last products of the micro-batches cannot be treated apart."""


@dataclass(eq=False)
class SampleDraw:
    """The samples of one micro-batch: their numbers in the chunk and their seeds."""

    batch: Batch
    samples: list[int] = field(default_factory=list)
    seeds: list[SampleSeed] = field(default_factory=list)


@dataclass(eq=False)
class _CutPass:
    """A forward pass of a micro-batch: the layers that are still to be walked through, and the cotangents of the
    samples at their outputs, by the number of the call and the place of the output."""

    draw: SampleDraw
    calls: list[tuple[str, LayerCall]]
    cotangents: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def samples(self) -> Tensor:
        return torch.tensor(self.draw.samples)


class Walk:
    """The walk of one chunk after the other.

    Args:
        engine: the model at its weights, the loss and the batches.
        rows: what Gram matrices are wanted of: blocks, or heads of them.
        scale: of all samples, the root of the sum of the batches' weights.
        cut: whether to cut the model at its layers.
        apart: whether to treat the last product apart.
        observe: called with X and delta of each block that is one weight, when they are known; they are not kept.
    """

    def __init__(
        self,
        engine: Autodiff,
        rows: Blocks,
        scale: float,
        cut: bool,
        apart: bool,
        observe: Callable[[GradientSource], None] | None = None,
    ) -> None:
        self._engine, self._rows, self._scale, self._apart, self._observe = engine, rows, scale, apart, observe
        self._observed: dict[str, list[Block]] = {}
        for block in engine.blocks.values():
            if observe is not None and len(block.pieces) == 1:
                self._observed.setdefault(block.pieces[0].parameter, []).append(block)
        self._ranks = engine.ranks
        self._weights, self._leaves = engine.snapshot.leaves(sorted(rows.parameters))
        self._layers = listed_layers(engine.model) if cut else {}
        self._pieces: dict[str, list[tuple[str, Piece]]] = {}
        for name, block in rows.items():
            for piece in block.pieces:
                self._pieces.setdefault(piece.parameter, []).append((name, piece))
        self._dense: set[str] = set()
        self._batches = True  # whether torch has batched all operations so far
        self._readers: dict[str, int] = {}  # products with each parameter that are no look-ups

    # ---- what is known beforehand

    def examine(self, draws: Sequence[SampleDraw]) -> tuple[dict[str, float], int]:
        """Run the model whole, once, for the first sample, on the rank that has its batch.

        Returns the squared length of one sample's gradient in each row, by a plain backward pass, and the bytes that a
        sample takes in its widest layer.
        """
        found: dict[str, float] = dict.fromkeys(self._rows, 0.0)
        sizes: dict[str, int] = {}

        def take(name: str) -> Callable[[Tensor], None]:
            def add(leaf: Tensor) -> None:
                assert leaf.grad is not None
                for row, piece in self._pieces[name]:
                    found[row] += float(leaf.grad[piece.index].double().square().sum()) * self._scale**2
                leaf.grad = None

            return add

        def action() -> None:
            cut, draws, uses, self._dense = self._seen(batch)
            if not any(F.requires_grad for F in cut):
                raise ModelError("model", "its outputs have no derivatives in the chosen blocks")
            for use in uses:
                if not use.is_look_up:
                    self._readers[use.parameter] = self._readers.get(use.parameter, 0) + 1
                layer = self._layer_of(use.parameter)
                wide = use.width if use.width <= COLUMNS or layer else COLUMNS
                sizes[layer] = sizes.get(layer, 0) + len(use.factor) * wide
            for name in self._dense:
                sizes[self._layer_of(name)] = sizes.get(self._layer_of(name), 0) + self._leaves[name].numel()
            handles = [leaf.register_post_accumulate_grad_hook(take(name)) for name, leaf in self._leaves.items()]
            try:
                torch.autograd.backward(cut, draws.draw(seed))
            finally:
                for handle in handles:
                    handle.remove()

        with self._ranks.together():
            for draw in draws:
                batch, seed = draw.batch, draw.seeds[0]
                self._inside(action)
        most = int(_COPIES * max(sizes.values(), default=0) * self._engine.dtype.itemsize)
        told = self._ranks.exchange((found, most, self._dense, self._readers) if draws else None)
        found, most, self._dense, self._readers = next(one for one in told if one is not None)
        return found, most

    def survey(self, draws: Sequence[SampleDraw]) -> None:
        """Run the model whole on each micro-batch of a chunk, to see which parameters are dense in any of them."""

        def action() -> None:
            for draw in draws:
                self._dense |= self._seen(draw.batch)[-1]

        with self._ranks.together():
            self._inside(action)
        self._dense = set().union(*self._ranks.exchange(self._dense))

    def _seen(self, batch: Batch) -> tuple[list[Tensor], Cotangents, list[WeightUse], set[str]]:
        """What a whole pass shows: its outputs and their cotangents, its products, and its dense parameters."""
        cut, draws = self._drawn(self._engine.snapshot.as_it_is(batch), batch)
        nodes = nodes_below([F.grad_fn for F in cut if F.grad_fn is not None])
        return cut, draws, *find_uses(nodes, self._leaves)

    def _layer_of(self, name: str) -> str:
        """The path of the layer that holds a parameter, or ""."""
        path = self._engine.snapshot.paths[name]
        return next((layer for layer in self._layers if path.startswith(f"{layer}.")), "")

    # ---- the walk

    def run(self, draws: Sequence[SampleDraw], count: int, tell: Callable[[str, Tensor], None]) -> None:
        """Make the Gram matrix (c, c) of each row over all samples, and `tell` it with the row's name.

        `draws`: those of this rank; `count`: c, those of all ranks.
        """
        self._grams = RowGrams(self._rows, self._pieces, count, tell)
        self._factors: dict[str, list[Factors]] = {}
        self._gradients: dict[str, Tensor] = {}
        self._beside: dict[str, list[Factors]] = {}
        self._count, self._read = count, torch.zeros(0, dtype=torch.long)
        self._head: str | None = None  # the weight of the last product, if that is treated apart
        self._finished: set[str] = set()  # parameters all of whose uses are known
        self._single_rows = all(self._ranks.exchange(all(draw.batch.rows == 1 for draw in draws)))

        def action() -> None:
            passes = self._forward(draws)
            told = self._ranks.exchange([[path for path, _ in one.calls] for one in passes])
            left = [paths for some in told for paths in some]
            while any(left):
                with self._locally():
                    for one in passes:
                        if one.calls:
                            self._through(one)
                walked = {paths.pop() for paths in left if paths}
                self._finish([name for name in self._leaves if self._layer_of(name) in walked.difference(*left)])
            self._finish([name for name in self._leaves if name not in self._finished])

        self._inside(action)

    @contextmanager
    def _locally(self) -> Iterator[None]:
        """Work of this rank alone, without collectives; what it finds the model unfit for holds on all ranks."""
        found: NotRepeatableError | None = None
        with self._ranks.together():
            try:
                yield
            except NotRepeatableError as error:
                found = error
        told = [one for one in self._ranks.exchange(None if found is None else (type(found), str(found))) if one]
        if told:
            kinds = {kind for kind, _ in told}
            kind = next(iter(kinds)) if len(kinds) == 1 else NotRepeatableError
            raise kind("model", told[0][1].removeprefix("model: ")) from found

    def _inside(self, action: Callable[[], None]) -> None:
        """Run with the copies as the model's weights."""
        within(self._engine.model, self._engine.snapshot.placed(self._weights), action)

    def _drawn(self, outputs: Any, batch: Batch) -> tuple[list[Tensor], Cotangents]:
        parameters = self._engine.snapshot.parameters(self._weights)
        return cotangents(self._engine.objective, self._engine.objective.seen(outputs, parameters), batch.targets)

    def _forward(self, draws: Sequence[SampleDraw]) -> list[_CutPass]:
        """Run the model on each micro-batch, cut at its layers, and go back from the loss to the last layer."""
        passes: list[_CutPass] = []
        heads: list[tuple[_CutPass, LastProduct]] = []
        with self._locally():
            for draw in draws:
                with cut_at(self._layers) as calls:
                    outputs = self._engine.snapshot.as_it_is(draw.batch)
                one = _CutPass(draw, calls)
                passes.append(one)
                head = self._last_product(outputs, draw)
                if head is not None:
                    heads.append((one, head))
                    continue
                cut, g = self._drawn(outputs, draw.batch)
                drawn = [[F * self._scale for F in g.draw(seed)] for seed in draw.seeds]
                starts = [get_gradient_edge(F) for F in cut]
                self._back(one, starts, [torch.stack(column) for column in zip(*drawn, strict=True)])
        kinds = {head.kind for _, head in heads} | ({None} if len(heads) < len(passes) else set())
        kinds = set().union(*self._ranks.exchange(kinds))
        if len(kinds) > 1:
            raise UnlikeHeadsError("model", "its batches end in different products")
        (kind,) = kinds
        if kind is not None:
            self._head = kind[0]
            self._through_heads(heads, *kind[:3])
        return passes

    def _last_product(self, outputs: Any, draw: SampleDraw) -> LastProduct | None:
        """The last product of a pass, if it is treated apart."""
        if not self._apart:
            return None
        return last_product(self._engine.objective, outputs, draw.batch, draw.seeds, self._leaves, self._alone)

    def _through(self, one: _CutPass) -> None:
        """Take the samples of a pass through its last layer."""
        number = len(one.calls) - 1
        _, call = one.calls.pop()
        leaves, outputs = call.again()
        known = [(output, one.cotangents.pop((number, i), None)) for i, output in outputs.items()]
        starts = [(get_gradient_edge(F), g) for F, g in known if F.requires_grad and g is not None]
        found = self._pull(one, [edge for edge, _ in starts], [g for _, g in starts], leaves)
        below = [(get_gradient_edge(call.inputs[i]), g) for i, g in found.items()]
        self._back(one, [edge for edge, _ in below], [g for _, g in below])

    def _back(self, one: _CutPass, starts: Sequence[GradientEdge], cotangents: Sequence[Tensor]) -> None:
        """Take the samples through what lies between the layers."""
        outputs = {(k, i): F for k, (_, call) in enumerate(one.calls) for i, F in call.outputs.items()}
        for key, g in self._pull(one, starts, cotangents, outputs).items():
            one.cotangents[key] = one.cotangents[key] + g if key in one.cotangents else g

    def _pull(
        self, one: _CutPass, starts: Sequence[GradientEdge], cotangents: Sequence[Tensor], ends: Mapping[Any, Tensor]
    ) -> dict[Any, Tensor]:
        """Backward passes of all samples from `starts` to `ends`: the cotangents (n, ...) found there.

        On the way, X and delta of each product with a parameter are noted, and the gradients of dense parameters.
        """
        if not starts:
            return {}
        nodes = nodes_below([start.node for start in starts])
        below = set(nodes)
        uses, dense = find_uses(nodes, self._leaves)
        if not dense <= self._dense:
            raise UnseenUseError("model", "a layer uses its parameters otherwise when it runs alone")
        if not self._finished.isdisjoint(dense.union(use.parameter for use in uses)):
            raise NotRepeatableError("model", "parameters of a layer are used outside of it")
        if any(use.parameter == self._head and not use.is_look_up for use in uses):
            raise UnlikeHeadsError("model", "some of its batches use the weight of the last product twice")
        uses = [use for use in uses if use.parameter not in self._dense]
        leaves = {id(node.variable) for node in below if hasattr(node, "variable")}
        wide = [name for name in sorted(self._dense) if id(self._leaves[name]) in leaves]
        ends = {key: F for key, F in ends.items() if get_gradient_edge(F).node in below}
        targets: list[Any] = [use.edge for use in uses]
        targets += [self._leaves[name] for name in wide]
        targets += ends.values()
        if not targets:
            return {}
        n = len(one.draw.samples)
        kept: list[Tensor | None] = [None] * len(targets)
        for places in _groups(n):
            for k, found in enumerate(self._gradients_at(starts, targets, [g[places] for g in cotangents])):
                if found is None:
                    continue
                if kept[k] is None:
                    kept[k] = self._room(one, k - len(uses), wide, found[0])
                kept[k][places] += found  # type: ignore[index]
        for use, deltas in zip(uses, kept, strict=False):
            if deltas is not None:
                factors = Factors(one.samples, use.factor, use.delta(deltas), use.region, use.transposed)
                self._factors.setdefault(use.parameter, []).append(factors)
        found_ends = zip(ends, kept[len(uses) + len(wide) :], strict=True)
        return {key: g for key, g in found_ends if g is not None}

    def _gradients_at(self, starts: Sequence[GradientEdge], ends: Sequence[Any], some: Sequence[Tensor]) -> Gradients:
        """What some samples find: at once, unless torch could not once."""
        found = gradients_at_once(starts, ends, some) if self._batches and len(some[0]) > 1 else None
        if found is None:
            self._batches = self._batches and len(some[0]) == 1
            return gradients_in_turn(starts, ends, some)
        return found

    def _room(self, one: _CutPass, place: int, wide: Sequence[str], like: Tensor) -> Tensor:
        """Zeros for what n samples will find: for a dense parameter a part of what is kept for all samples."""
        if not 0 <= place < len(wide):
            return like.new_zeros(len(one.draw.samples), *like.shape)
        return self._gradients_of(wide[place])[one.draw.samples[0] : one.draw.samples[-1] + 1]

    def _gradients_of(self, name: str) -> Tensor:
        """The gradients of a dense parameter, (c, *shape)."""
        if name not in self._gradients:
            leaf = self._leaves[name]
            checks.fits(
                self._count * leaf.numel() * leaf.element_size(),
                None,
                f"{self._count} sampled gradients of {name!r}",
                "leave its block out with blocks=, or give a larger memory_limit",
            )
            self._gradients[name] = leaf.new_zeros(self._count, *leaf.shape)
        return self._gradients[name]

    # ---- the last product

    def _alone(self, name: str) -> bool:
        """Whether one product reads a parameter, which is one row as a whole."""
        (_, piece), *others = self._pieces[name]
        whole = not others and piece.size == self._leaves[name].numel()
        return whole and name not in self._dense and self._readers.get(name, 1) == 1

    def _through_heads(
        self, heads: Sequence[tuple[_CutPass, LastProduct]], name: str | None, transposed: bool, classes: int
    ) -> None:
        """From the loss through the last product, some columns of the vocabulary at a time, which are done then.

        `name`: of its weight, of which Gram matrices are wanted then; all samples are needed at once for them.
        """
        if name is None:
            for one, head in heads:
                for places in _groups(len(one.draw.samples)):
                    for start, stop in column_ranges(classes):
                        self._through_columns(one, head, start, stop, places)
                self._below(one, head)
            return
        row = self._pieces[name][0][0]
        read = torch.cat(self._ranks.exchange(self._rows_read(heads))).unique()
        beside: list[list[Tensor]] = [[] for _ in heads]
        for start, stop in column_ranges(classes):
            found = []
            inside = read[(read >= start) & (read < stop)] - start
            wide = slice(start, stop)
            for (one, head), some in zip(heads, beside, strict=True):
                assert head.use is not None
                g = self._through_columns(one, head, start, stop)
                some.append(g[..., inside])
                across = slice(0, head.use.factor.shape[1])
                region = (wide, across) if transposed else (across, wide)
                found.append(Factors(one.samples, head.use.factor, g, region, transposed))
            everything = self._of_all(found)
            self._grams.add(row, everything)
            if stop - start == classes and not len(read):  # all columns at once
                self._show(name, everything, None)
        for (one, head), some in zip(heads, beside, strict=True):
            assert head.use is not None
            if len(read):
                sides = slice(0, len(read)), slice(0, head.use.factor.shape[1])
                factors = Factors(one.samples, head.use.factor, torch.cat(some, -1), sides, transposed)
                self._beside.setdefault(name, []).append(factors)
            self._below(one, head)
        self._read = read

    def _below(self, one: _CutPass, head: LastProduct) -> None:
        """From the factor of the last product to the last layer."""
        if head.edge is not None:
            self._back(one, [head.edge], [head.below])

    def _through_columns(
        self, one: _CutPass, head: LastProduct, start: int, stop: int, places: slice = slice(None)
    ) -> Tensor:
        """Some columns of the cotangents of some samples, (n, T, stop - start), once they are added below."""
        g = head.draws.columns(start, stop, one.draw.seeds[places], head.inner[places]).mul_(self._scale)
        head.below[places] += g @ head.weight[:, start:stop].mT
        if head.bias is not None:
            self._gradients_of(head.bias)[one.samples[places], start:stop] = g.sum(1)
        return g

    def _rows_read(self, heads: Sequence[tuple[_CutPass, LastProduct]]) -> Tensor:
        """The rows of the head's parameter that look-ups read, each once."""
        found = [torch.zeros(0, dtype=torch.long)]
        for one, head in heads:
            assert head.use is not None
            inputs = [F.grad_fn for _, call in one.calls for F in call.inputs.values() if F.grad_fn is not None]
            uses, _ = find_uses(nodes_below([head.node, *inputs]), self._leaves)
            chosen = [use.factor for use in uses if use.parameter == head.use.parameter and use.is_look_up]
            found += [rows[rows >= 0].cpu() for rows in chosen]
        return torch.cat(found).unique()

    # ---- results

    def show_no_more(self) -> None:
        """Call the observer no more."""
        self._observed = {}

    def _show(self, name: str, factors: Sequence[Factors], gradients: Tensor | None) -> None:
        """Show the observer the gradients of the blocks in a parameter."""
        for block in self._observed.get(name, []):
            source = sampled_source(block, factors, gradients, self._single_rows)
            if source is not None and self._observe is not None:
                self._observe(source)

    def _of_all(self, found: list[Factors]) -> list[Factors]:
        """What all ranks have found, in the order of the ranks."""
        return [one for some in self._ranks.exchange(found) for one in some]

    def _finish(self, names: Sequence[str]) -> None:
        """Make the Gram matrices of parameters all of whose uses are known, and tell of the rows that are complete."""
        self._finished.update(names)
        for name in names:
            factors, beside = (self._of_all(known.pop(name, [])) for known in (self._factors, self._beside))
            told = self._ranks.exchange(self._gradients.pop(name, None))
            several = [one for one in told if one is not None]
            gradients = torch.stack(several).sum(0) if len(several) > 1 else next(iter(several), None)
            if not beside:
                self._show(name, factors, gradients)
            self._grams.finish(name, factors, beside, self._read, gradients)


def _groups(n: int) -> Iterator[slice]:
    """The samples that pass a layer at once."""
    step = max(1, n // _GROUPS)
    return (slice(start, start + step) for start in range(0, n, step))
