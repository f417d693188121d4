"""Products that torch compiles: what the passes of a kept graph do to a vector, as one program.

A product with a kept graph is a sequence of operations on the vector and on tensors that the graph keeps. It is
recorded while it runs once: the Python of the model, its hooks and autograd are gone from the record, and the kept
tensors are arguments of it. `torch.compile` fuses what it can, once for all graphs whose records and shapes are alike.

The first product is always the eager one, and the program must agree with it. If torch cannot record or compile a
product, or computes another one, products stay eager, and a `CompileWarning` says why.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.graph import Graph
from curvoscope.blocks import Block, parameters_of
from curvoscope.errors import CompileWarning

_DIFFERENCE = 0.6  # power of epsilon, relative: 4e-10 in float64, 7e-5 in float32

PartProducts = Sequence[dict[str, Tensor]]  # by name of parameter: one product, or that of each part


class _Program:
    """The product of a part with one graph, by names of parameters."""

    def __init__(self, names: Sequence[str], found: PartProducts, run: Any, kept: Sequence[Tensor]) -> None:
        self._names, self._found, self._run, self._kept = names, [list(one) for one in found], run, kept

    def fits(self, vectors: Mapping[str, Tensor]) -> bool:
        return set(vectors) == set(self._names)

    def __call__(self, vectors: Mapping[str, Tensor]) -> PartProducts:
        with torch.no_grad():
            products = iter(self._run(*(vectors[name] for name in self._names), *self._kept))
        return [{name: next(products) for name in several} for several in self._found]


class Compiled(Autodiff):
    """Products with all blocks are compiled, those with single blocks, and with several vectors at once, are not."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._programs: dict[str, WeakKeyDictionary[Graph, _Program]] = {}  # by part
        self._compiled: dict[object, Any] = {}  # by record and shapes
        self._seconds, self._refused = 0.0, ""
        super().__init__(*arguments, **options)

    @property
    def exact_products(self) -> bool:
        """No: compiled products may differ from eager ones by more than rounding."""
        return False

    @property
    def note(self) -> str:
        """What became of the products so far."""
        if self._refused:
            return f"not compiled: {self._refused}"
        parts = ", ".join(self._programs)
        return f"products compiled ({parts}, {self._seconds:.1f} s)" if parts else "compiled with the first product"

    def _own_product(self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor) -> Tensor:
        found = super()._own_product(part, rows, columns, vectors)
        everything = set(self.blocks.parameters)
        whole = everything == set(parameters_of(rows)) == set(parameters_of(columns))
        if whole and part not in self._programs and not self._refused:
            self._compile(part, rows, columns, vectors[:1], found[:1])
        return found

    def _passes(
        self, graph: Graph, part: str, vectors: Mapping[str, Tensor], wanted: Sequence[str], many: bool
    ) -> PartProducts:
        programs = self._programs.get(part)
        program = None if programs is None else programs.get(graph)
        if many or program is None or not program.fits(vectors) or set(wanted) != set(self.blocks.parameters):
            return super()._passes(graph, part, vectors, wanted, many)
        return program(vectors)

    # ---- compiling

    def _compile(
        self, part: str, rows: Sequence[Block], columns: Sequence[Block], vector: Tensor, expected: Tensor
    ) -> None:
        """Make the programs of all kept graphs, and compare their product with the one that is known."""
        kept = self._kept.get((frozenset(self.blocks.parameters), self._layer(part, [*rows, *columns])), {})
        if not kept:
            self._refuse("the graphs do not fit into memory_limit, and are made anew in each product")
            return
        spread = {name: one[0] for name, one in self._spread(columns, vector).items()}
        start = time.perf_counter()
        try:
            programs = {graph: self._program(graph, part, spread, parameters_of(rows)) for graph in kept.values()}
            self._programs[part] = WeakKeyDictionary(programs)
            again = super()._own_product(part, rows, columns, vector)
        except Exception as error:  # of whatever kind: torch's compiler has many
            lines = [line for line in str(error).splitlines() if line.strip()]
            said = " ".join([f"{type(error).__name__}:", *lines[:2]])
            self._refuse(f"torch cannot compile a product ({said})")
            return
        self._seconds += time.perf_counter() - start
        gap, size = float((again - expected).norm()), float(expected.norm())
        if not gap <= torch.finfo(self.dtype).eps ** _DIFFERENCE * size:
            self._refuse(f"the compiled product differs from the eager one by {gap / size:.1e} of its length")

    def _refuse(self, reason: str) -> None:
        self._programs.clear()
        self._compiled.clear()
        self._refused = reason
        said = f"compile: got True, but {reason}. Products are computed as without it; leave it out"
        warnings.warn(said, CompileWarning, stacklevel=2)

    def _program(self, graph: Graph, part: str, vectors: Mapping[str, Tensor], wanted: Sequence[str]) -> _Program:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes as long to load as this package

        names = list(vectors)
        found: list[dict[str, Tensor]] = []

        def product(*given: Tensor) -> list[Tensor]:
            found[:] = super(Compiled, self)._passes(graph, part, dict(zip(names, given, strict=True)), wanted, False)
            return [one for several in found for one in several.values()]

        record = make_fx(product)(*vectors.values())
        kept = _lift(record)
        key = record.code, tuple((one.shape, one.stride(), one.dtype) for one in [*vectors.values(), *kept])
        if key not in self._compiled:
            self._compiled[key] = torch.compile(record, fullgraph=True, dynamic=False)
        return _Program(names, found, self._compiled[key], kept)


def _lift(record: Any) -> list[Tensor]:
    """Turn the tensors that a record holds into further arguments of it, and return them."""
    kept: list[Tensor] = []
    places: dict[object, Any] = {}
    held: set[str] = set()
    last = [node for node in record.graph.nodes if node.op == "placeholder"][-1]
    for node in list(record.graph.nodes):
        if node.op == "get_attr":
            tensor = getattr(record, node.target).detach()
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if key not in places:
                with record.graph.inserting_after(last):
                    last = places[key] = record.graph.placeholder(f"kept_{len(kept)}")
                kept.append(tensor)
            node.replace_all_uses_with(places[key])
            record.graph.erase_node(node)
            held.add(node.target)
    for name in held:
        delattr(record, name)
    record.recompile()
    return kept
