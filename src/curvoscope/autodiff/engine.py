"""Matrix-free Hessian of any torch model: total, outer and functional part of the same blocks from one forward pass.

The model is evaluated at the weights that it had when the Hessian was made, and stays as it was. They are shared with
the model, or copied if asked: a product after a change of shared weights is an error, never a number.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.autodiff.batches import Batch, Batches
from curvoscope.autodiff.graph import Graph, Operation, unchecked
from curvoscope.autodiff.graph_products import GraphProducts
from curvoscope.autodiff.guard import check_products
from curvoscope.autodiff.hooks import ActivationHook, Site, check_layer, layer_of
from curvoscope.autodiff.kernels import kept_derivatives
from curvoscope.autodiff.recomputation import Recomputation
from curvoscope.autodiff.safety import check_mode, undisturbed
from curvoscope.autodiff.snapshot import (
    LossSummary,
    Snapshot,
    check_unchanged,
    decodes_labels,
    device_of,
    objective_of_model,
    survey,
)
from curvoscope.blocks import Block, Blocks, parameters_of
from curvoscope.distributed.ranks import Facts, Ranks, common, describe, hashes
from curvoscope.errors import ModelError
from curvoscope.losses.objectives import Objective
from curvoscope.losses.outputs import has_derivatives

Selection = tuple[frozenset[str], Site | None]  # parameters with derivatives, and where the graph is cut
BatchProduct = Callable[[str, Sequence[Block], Sequence[Block], Tensor], Tensor]  # `Autodiff.product`, of one batch

_PASSES = 2  # what the graph of a product and the product take, in forward passes


class Autodiff(GraphProducts):
    """Products with the Hessian of the mean loss over all batches, and with its two parts."""

    method = "autodiff"
    error: float | None = None  # of products, relative; None if they are exact

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | None,
        batches: Batches,
        blocks: Blocks,
        split: str = "model",
        device: torch.device | str | None = None,
        budget: int | None = None,
        sites: Mapping[str, Site] | None = None,
        ranks: Ranks | None = None,
        copy: bool = False,
        recompute: str | None = None,
    ) -> None:
        """`budget`: bytes for the graphs kept between products.

        `sites`: where split="layer" cuts, by parameter; those not named are cut where `layer_of` says.

        `ranks`: the processes whose batches count; this one's alone by default.

        `copy`: whether to copy the weights, so that the model may change.

        `recompute`: "layer" to keep the inputs of layers, and compute what happens inside anew.
        """
        self.ranks = ranks or Ranks()
        self.blocks, self.split, self._copy = blocks, split, copy
        self.model, self._batches, self._sites = model, batches, dict(sites or {})
        self._kept: OrderedDict[Selection, dict[int, Graph]] = OrderedDict()
        self._examined: set[Selection] = set()  # selections whose operations have been looked at
        self._vouched: set[Operation] = set()  # operations that a test of products has passed
        with self.ranks.together():
            checks.choice("split", split, ("model", "layer"))
            self._budget = checks.memory_budget() if budget is None else budget
            self._recomputed = None if recompute is None else Recomputation(model)
            self._can_batch = recompute is None
            if recompute is not None and split != "model":
                raise ModelError("recompute", "got 'layer', which split='layer' does not support; use split='model'")
            check_mode(model)
            blocks.check(model)
            self.device = device_of(model, device)
        with undisturbed(model, batches.generators):
            with self.ranks.together():
                self.snapshot = self._snapshot()
                self.dtype = self.snapshot.dtype
            if self.ranks.size > 1:
                self.ranks.agree(self._facts(objective))
            self._take_labels()
            self.objective = objective or self._objective_of_model()
            self.survey = self._survey()
        with self.ranks.together():
            self.snapshot.check()  # a model that changes its weights while it runs

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.model, self.blocks, self.device, self._copy)

    def _take_labels(self) -> None:
        """Let an encoder-decoder make the inputs of its decoder from the labels, unless they are given."""
        with self.ranks.together():
            batch = next(iter(self._batches), None)
            if batch is not None and decodes_labels(self.model, batch):
                self.snapshot = self.snapshot.labelled()

    def _survey(self) -> LossSummary:
        found, self.objective = survey(self.snapshot, self.objective, self._batches, self.ranks)
        return found

    def _facts(self, objective: Objective | None) -> Facts:
        """What must be alike on all ranks."""
        places = {
            name: ", ".join(f"{piece.parameter}{piece}" for piece in block.pieces)
            for name, block in self.blocks.items()
        }
        return {
            "blocks": {**places, "their order": " ".join(places)},
            "split": {"split": self.split},
            "loss_fn": {"loss_fn": describe(objective)},
            "model": self._fingerprint(),
        }

    def _fingerprint(self) -> dict[str, str]:
        return hashes(self.snapshot.tensors)

    def _objective_of_model(self) -> Objective:
        with self.ranks.together():
            batch = next(iter(self._batches), None)
            found, needs_labels = (None, False) if batch is None else objective_of_model(self.snapshot, batch)
        if any(self.ranks.exchange(needs_labels)):
            self.snapshot = self.snapshot.labelled()
        return common(self.ranks.exchange(found))

    # ---- products

    def product(self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor) -> Tensor:
        """Rows of the Hessian ("total") or a part of it times vectors (n, C) that live in the blocks `columns`: (n, R).

        With "both" for the part, the rows of the outer and then those of the functional part, (n, 2R), for less than
        two products cost.

        Only what lies between the blocks and the loss is run through: a block in a late layer costs the tail alone.
        """
        question = part, [block.name for block in rows], [block.name for block in columns]
        height = self._height(part, rows)
        return self.ranks.sum(question, vectors, height, lambda: self._own_product(part, rows, columns, vectors))

    def _height(self, part: str, rows: Sequence[Block]) -> int:
        return self.length(rows) * (2 if part == "both" else 1)

    def _own_product(self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor) -> Tensor:
        """The summand of this process's batches."""
        layer = self._layer(part, [*rows, *columns])
        spread = self._spread(columns, vectors)
        wanted = parameters_of(rows)
        totals: list[Tensor] = []
        names = frozenset(spread).union(wanted)

        def add(position: int, graph: Graph) -> None:
            found = self._products(graph, part, rows, wanted, spread)
            if (names, layer) not in self._examined:
                self._examine(graph, position, rows, columns, (vectors[0], found[0]) if part == "total" else None)
                self._examined.add((names, layer))
            weight = self._weight(position)
            if weight != 1:
                found *= weight
            totals[:] = [totals[0].add_(found) if totals else found]

        self._visit(names, layer, add)
        return totals[0] if totals else vectors.new_zeros(len(vectors), self._height(part, rows))

    def each(self, visit: Callable[[Tensor, BatchProduct], None]) -> None:
        """Call `visit` for each micro-batch that has loss terms, with the gradient (P,) of its own mean loss, in the
        order of the blocks, and with `product` of that loss. All of it comes from one graph, which is not kept."""
        blocks = list(self.blocks.values())
        names = frozenset(self.blocks.parameters)
        self._check_memory()
        with self.running():
            for position, batch in enumerate(self._batches):
                if not self.survey.weights[position]:
                    continue
                graph = Graph(*self._first_order(self.snapshot.moved(batch), names), keep_slope=True)
                if (names, None) not in self._examined:
                    self._examine(graph, position, blocks, blocks, None)
                    self._examined.add((names, None))

                def product(
                    part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor, graph: Graph = graph
                ) -> Tensor:
                    return self._products(graph, part, rows, parameters_of(rows), self._spread(columns, vectors))

                visit(self._flat(blocks, parameters_of(blocks), graph.slope, ()), product)

    @property
    def exact_products(self) -> bool:
        """Whether products err by no more than rounding in single precision: no operation is known to round coarser."""
        return self.survey.full_precision and torch.get_float32_matmul_precision() == "highest"

    def is_positive(self, part: str) -> bool:
        """Whether a part is known to be positive semidefinite: J^T S J at the model's output, S of a convex loss."""
        return part == "outer" and self.split == "model" and self.objective.convex

    @property
    def product_bytes(self) -> int:
        """What a product takes, by the size of the forward pass, or of one layer's part of it."""
        return _PASSES * self.survey.written // (1 if self._recomputed is None else self._recomputed.count)

    @property
    def note(self) -> str:
        """On how products are made, for the plan."""
        return ""

    def _weight(self, position: int) -> float:
        return self.survey.weights[position]

    # ---- are the products right?

    def _examine(
        self,
        graph: Graph,
        position: int,
        rows: Sequence[Block],
        columns: Sequence[Block],
        known: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Test the products of a micro-batch's graph, if it has operations whose second derivatives are not checked."""
        unknown = self._unknown(graph)
        if unknown:
            check_products(self, graph, position, rows, columns, known, unknown)
            self._vouched |= unknown

    def vouch(self, graph: Graph) -> None:
        """Test products of the whole Hessian, if a graph has operations that have not been checked."""
        if self._unknown(graph):
            blocks = list(self.blocks.values())
            position, batch = next((i, b) for i, b in enumerate(self._batches) if self.survey.weights[i])
            with self.running():
                whole = self._graph(batch, frozenset(self.blocks.parameters), None)
            self._examine(whole, position, blocks, blocks)

    def _unknown(self, graph: Graph) -> frozenset[Operation]:
        """Operations of a graph and of the loss that neither our tests nor tests of products have vouched for."""
        inside = set() if self._recomputed is None else self._recomputed.operations
        return unchecked(graph.operations() | self.survey.operations | inside) - self._vouched

    # ---- graphs

    def _visit(self, names: frozenset[str], layer: Site | None, visit: Callable[[int, Graph], None]) -> None:
        """Call `visit` with the position and the graph of each micro-batch: kept graphs first, the others made anew."""
        needed = {i for i, weight in enumerate(self.survey.weights) if weight}
        if not needed:
            return
        self.snapshot.check()
        complete = (key for key in self._kept if key[0] >= names and key[1] == layer and needed <= set(self._kept[key]))
        key = next(complete, (names, layer))
        kept = self._kept.get(key, {})
        for i, graph in kept.items():
            visit(i, graph)
        missing = needed - set(kept)
        if not missing:
            self._kept.move_to_end(key)
            return
        self._check_memory()
        with self.running():
            for i, batch in enumerate(self._batches):
                if i in missing:
                    graph = self._graph(batch, names, layer)
                    visit(i, graph)
                    if self._make_room(key, graph.nbytes):
                        self._kept.setdefault(key, {})[i] = graph
                    del graph

    def _check_memory(self) -> None:
        checks.fits(
            self.product_bytes,
            None,
            "a product with the Hessian, by the size of the forward pass,",
            "give a smaller micro_batch=, or fewer or shorter sequences",
        )

    def loss(self, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The loss of a micro-batch at these weights."""
        outputs = self.snapshot(weights, batch)
        return self.objective(self.objective.seen(outputs, self.snapshot.parameters(weights)), batch.targets)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the model may run as it does for products."""
        self.snapshot.check()
        with undisturbed(self.model, self._batches.generators):
            yield

    def steady(self) -> AbstractContextManager[None]:
        """A context for several products: shared weights are read when it begins and ends, to see that they have not
        changed, and not for each product. Several ranks look at each: an error must be one of all of them."""
        return self.snapshot.steady() if self.ranks.size == 1 else nullcontext()

    def micro_batches(self) -> Iterator[Batch]:
        """The data of each micro-batch, where the weights are; for use inside of `running`."""
        return (self.snapshot.moved(batch) for batch in self._batches)

    def walk(self, visit: Callable[[float, Batch], None], own_kernels: bool = True, every: bool = False) -> None:
        """Call `visit` with the weight and the data of each micro-batch that has loss terms, or of every one; inside,
        the model may run as it does for products, or with torch's own attention only."""
        self.snapshot.check()
        with undisturbed(self.model, self._batches.generators, own_kernels):
            for weight, batch in zip(self.survey.weights, self._batches, strict=True):
                if weight or every:
                    visit(weight, self.snapshot.moved(batch))

    def _make_room(self, key: Selection, nbytes: int) -> bool:
        """Whether a graph of this size may be kept; graphs of other selections, the oldest first, give way."""
        for other in list(self._kept):
            if other != key and self._used() + nbytes > self._budget:
                del self._kept[other]
        return self._used() + nbytes <= self._budget

    def _used(self) -> int:
        """Bytes of the kept graphs."""
        return sum(graph.nbytes for graphs in self._kept.values() for graph in graphs.values())

    def _graph(self, batch: Batch, names: frozenset[str], layer: Site | None) -> Graph:
        batch = self.snapshot.moved(batch)
        if layer is None:
            return self._kept_graph(*self._first_order(batch, names))
        weights, leaves = self.snapshot.leaves(sorted(names))
        with kept_derivatives(self.model), ActivationHook(self.model, layer) as tap:
            outputs = self.snapshot(weights, batch)
        self.check_loss(weights, outputs, batch)
        cut, gradient = self._gradient(weights, outputs, batch)
        if not tap.tensor.requires_grad:
            said = f"acts nowhere on the {layer.side} of {layer.path!r}; use split='model'"
            raise ModelError(", ".join(leaves), said)
        inner = torch.autograd.grad(cut, tap.tensor, gradient, create_graph=True)
        check_layer(layer, leaves, (cut, gradient), ([tap.tensor], inner))
        return self._kept_graph(leaves, [tap.tensor], inner)

    def _first_order(
        self, batch: Batch, names: frozenset[str]
    ) -> tuple[Mapping[str, Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """The parameters as leaves, F and G of a micro-batch."""
        weights, leaves = self.snapshot.leaves(sorted(names))
        by_layer = nullcontext() if self._recomputed is None else self._recomputed.by_layer()
        with kept_derivatives(self.model), by_layer:
            outputs = self.snapshot(weights, batch)
        self.check_loss(weights, outputs, batch)
        if self._recomputed is not None:
            self._recomputed.check(lambda: self._read(batch))
        return leaves, *self._gradient(weights, outputs, batch)

    def _read(self, batch: Batch) -> Sequence[Tensor]:
        """What the loss reads of a micro-batch's outputs, from weights that all have derivatives."""
        weights, _ = self.snapshot.leaves(n for n in self.snapshot.paths if self.snapshot.weight(n).is_floating_point())
        return self._gradient(weights, self.snapshot(weights, batch), batch)[0]

    def check_loss(self, weights: Mapping[str, Tensor], outputs: Any, batch: Batch) -> None:
        """Raise if the loss of a micro-batch is no longer that of the survey."""
        with torch.no_grad():
            value = float(
                self.objective(self.objective.seen(outputs, self.snapshot.parameters(weights)), batch.targets)
            )
        check_unchanged(self.snapshot, self.objective, batch, value, self.survey.losses[batch.position])

    def _gradient(
        self, weights: Mapping[str, Tensor], outputs: Any, batch: Batch
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """F and G of a micro-batch."""
        if not has_derivatives(outputs):
            self._check_derivatives(batch)
        seen = self.objective.seen(outputs, self.snapshot.parameters(weights))
        return self.objective.gradient(seen, batch.targets)

    def _check_derivatives(self, batch: Batch) -> None:
        """Raise if the model's outputs have no derivative in any of its parameters."""
        weights, _ = self.snapshot.leaves(n for n in self.snapshot.paths if self.snapshot.weight(n).is_floating_point())
        if not has_derivatives(self.snapshot(weights, batch)):
            raise ModelError(
                "model",
                "its outputs have no derivatives: it runs inside torch.no_grad(), detaches what it computes, or has "
                "weights that are not floating point",
            )

    def _kept_graph(self, leaves: Mapping[str, Tensor], cut: Sequence[Tensor], gradient: Sequence[Tensor]) -> Graph:
        return Graph(leaves, cut, gradient)

    def _layer(self, part: str, blocks: Sequence[Block]) -> Site | None:
        """Where to cut: the layer of all the blocks, or the model's output (None), also for the total."""
        if self.split == "model" or part == "total":
            return None
        layers = {self._site(block): block.name for block in blocks}
        if len(layers) > 1:
            (one, first), (two, second), *_ = layers.items()
            raise ModelError(
                "split",
                f"{first!r} lies in {one.path!r} and {second!r} in {two.path!r}: between layers split='layer' has no "
                "parts; ask for the total, or use split='model'",
            )
        return next(iter(layers))

    def _site(self, block: Block) -> Site:
        known = {self._sites.get(piece.parameter) for piece in block.pieces}
        site = known.pop() if len(known) == 1 else None
        return site or layer_of(self.model, self.snapshot.paths, block)
