"""Layers one after the other, some with a residual connection: their forward pass, gradients and Hessian products.

A network is a list of branches, y = x + g(x) or y = g(x) with g a chain of layers. At an input x, a loss with gradient
G and Hessian S at the network's output gives the gradient at every layer's output. The product with the Hessian is the
derivative of these gradients: dF goes up through the layers, dG = S dF comes down, and on its way meets each layer's
own second derivative, contracted with the gradient there and held fixed. Without the latter it is the outer part;
without S it is the functional part.

Hessian back-propagation (`Descent`) goes from S at a layer's output to S at its input, with both of its parts:

    S_in = J^T S J + <G, d²F/dx²>          J = dF/dx, or I + dF/dx with a residual connection

The Gauss-Newton part carries J^T S_gn J from the loss down; the functional part J^T S_f J collects what every layer on
the way adds. Tokens stay apart until the first attention layer from above, then those of a sequence are coupled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvoscope import checks, losses
from curvoscope.errors import MemoryLimitError
from curvoscope.exact.assembly import (
    ColumnProducts,
    Directions,
    column_chunks,
    packed,
    pushed_jacobian,
    unpacked,
)
from curvoscope.exact.grouped import Grouped, fits
from curvoscope.exact.links import AttentionLink, Layer, Link, link
from curvoscope.operators.base import Multiplication, Shape

Parts = tuple[Grouped, Grouped | None]  # Gauss-Newton and functional; None if nothing above is curved


@dataclass(frozen=True)
class Branch:
    """Named layers one after the other; `residual`: their input is added to their output."""

    layers: tuple[tuple[str, Layer], ...]
    residual: bool


class Chain:
    """Branches at one input X (N, L, d), with the gradient of a loss at the output of every layer.

    `links` are the layers in order, each at its input; `where` says for every name of a weight which link has it.
    """

    def __init__(self, branches: Sequence[Branch], X: Tensor, loss: losses.LossFunction) -> None:
        self.X, squeeze = (X, False) if X.ndim == 3 else (X[None], True)
        layers = [pair for branch in branches for pair in branch.layers]
        weights = {f"{name}.{label}": w for name, layer in layers for label, w in layer.matrices.items()}
        checks.commensurate({**weights, "X": X})
        self.branches: list[tuple[list[Link], bool]] = []
        stream = self.X
        for branch in branches:
            value, links = stream, []
            for name, layer in branch.layers:
                links.append(link(name, layer, value))
                value = links[-1].output
            self.branches.append((links, branch.residual))
            stream = stream + value if branch.residual else value
        self.output = stream
        self.links = [each for links, _ in self.branches for each in links]
        self.where = {name: number for number, each in enumerate(self.links) for name in each.names}
        self.loss = losses.at(loss, self.output, squeeze)
        gradient = self.loss.gradient
        for links, residual in reversed(self.branches):
            at_input = gradient
            for each in reversed(links):
                at_input = each.settle(at_input)
            gradient = gradient + at_input if residual else at_input
        self.input_gradient = gradient

    @property
    def tokens(self) -> int:
        """T = N L."""
        return self.X.shape[0] * self.X.shape[1]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of all weights, in the order of the layers."""
        return {name: each.shapes[local] for each in self.links for name, local in each.names.items()}

    def push(self, directions: Directions, after: int | None = None) -> tuple[Tensor, list[Directions], list[object]]:
        """dZ (n, T, m) along directions of weights (n, a, p) and of "X" (n, T, d), with what each layer saw and moved.

        With `after`, the direction "X" (n, T, m) is one of the output of that link, and weights are held.
        """
        stream = directions.get("X") if after is None else None
        seen: list[Directions] = []
        moved: list[object] = []
        for links, residual in self.branches:
            value = stream
            for each in links:
                here = {local: directions[name] for name, local in each.names.items() if name in directions}
                if value is not None:
                    here["X"] = value
                value, inside = each.push(here) if here else (None, None)
                if after == len(seen):
                    value = directions["X"]
                seen.append(here)
                moved.append(inside)
            stream = stream + value if residual and stream is not None and value is not None else value
        assert stream is not None  # some direction reached the output
        return stream, seen, moved

    def product(
        self,
        directions: Directions,
        wanted: Sequence[str],
        outer: bool,
        functional: bool,
        after: int | None = None,
    ) -> Directions:
        """The sum of the parts asked for, of the Hessian times the directions, at the weights `wanted` and at "X"."""
        dZ, seen, moved = self.push(directions, after)
        back = self._applied(dZ) if outer else torch.zeros_like(dZ)
        return self._pull(seen, moved, back, wanted, functional, after)

    def products(self, directions: Directions, wanted: Sequence[str]) -> tuple[Directions, Directions]:
        """The outer and the functional part, each times the directions."""
        dZ, seen, moved = self.push(directions)
        outer = self._pull(seen, moved, self._applied(dZ), wanted, False)
        return outer, self._pull(seen, moved, torch.zeros_like(dZ), wanted, True)

    def _pull(
        self,
        seen: list[Directions],
        moved: list[object],
        back: Tensor,
        wanted: Sequence[str],
        functional: bool,
        after: int | None = None,
    ) -> Directions:
        """How the gradients move when the one at Z moves by `back` (n, T, m): see `Link.pull`."""
        lowest = min((self.where[name] for name in wanted if name != "X"), default=len(self.links))
        lowest = -1 if "X" in wanted or after is not None else lowest
        found: Directions = {}
        number = len(self.links)
        for links, residual in reversed(self.branches):
            at_input = back
            for each in reversed(links):
                number -= 1
                if number == after:
                    return {"X": at_input}
                if number < lowest:
                    return found
                locals_ = {local: name for name, local in each.names.items() if name in wanted}
                here = functional and bool(seen[number])
                answers, at_input = each.pull(seen[number], moved[number], at_input, list(locals_), here)
                found |= {locals_[local]: answer for local, answer in answers.items()}
            back = back + at_input if residual else at_input
        return {**found, "X": back}

    def rows(self, wanted: dict[str, Shape], given: dict[str, Shape]) -> tuple[Tensor, Tensor]:
        """All columns of the blocks `given`, (R, C) over the blocks `wanted`: of the outer and the functional part."""
        identity = torch.eye(sum(a * p for a, p in given.values()), dtype=self.X.dtype, device=self.X.device)
        outer, functional = [], []
        for start, stop in column_chunks(len(identity), self.workspace):
            first, second = self.products(unpacked(identity[:, start:stop], given), list(wanted))
            outer.append(packed(first, wanted))
            functional.append(packed(second, wanted))
        return torch.cat(outer, 1), torch.cat(functional, 1)

    def product_after(self, number: int, outer: bool, functional: bool) -> Multiplication:
        """Columns (T m, n) of directions of the output of a link, or of the input (-1), times the parts of S there."""
        after = None if number < 0 else number
        width = self.X.shape[2] if after is None else self.links[number].output.shape[2]

        def product(directions: Directions, wanted: Sequence[str], outer: bool, functional: bool) -> Directions:
            return self.product(directions, wanted, outer, functional, after)

        columns = ColumnProducts({"X": (self.tokens, width)}, product, self.workspace)
        return columns.multiplication(["X"], ["X"], outer, functional)

    def jacobian(self, name: str, shape: Shape) -> Tensor:
        """dZ/dW as a dense matrix (T m, a p), for a weight or "X"."""
        return pushed_jacobian(lambda directions: self.push(directions)[0], name, shape, self.output, self.workspace)

    @property
    def workspace(self) -> int:
        """Bytes that a direction needs in a product."""
        return sum(each.workspace for each in self.links)

    def _applied(self, dZ: Tensor) -> Tensor:
        sequences = dZ.view(dZ.shape[0], *self.output.shape)
        return self.loss.curvature.apply(sequences).reshape(dZ.shape)


class Descent:
    """S at the output of every link of a chain (-1: at its input), computed from the top as far down as asked."""

    def __init__(self, chain: Chain, budget: int | None = None) -> None:
        self._chain, self._budget = chain, budget
        self._known: dict[int, Parts] = {}
        self._steps = self._descend()
        self._too_large: MemoryLimitError | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Descent":
        return self  # its matrices do not change

    def at(self, number: int) -> Parts:
        """Both parts of S at the output of a link; `MemoryLimitError` if they do not fit."""
        while number not in self._known:
            if self._too_large is not None:
                raise self._too_large
            try:
                found, outer, bent = next(self._steps)
            except MemoryLimitError as error:
                self._too_large = error
                raise
            self._known[found] = (outer, bent)
        return self._known[number]

    def fits_at(self, number: int) -> bool:
        """Whether S at the output of a link fits into memory."""
        try:
            self.at(number)
        except MemoryLimitError:
            return False
        return True

    def _descend(self) -> Iterator[tuple[int, Grouped, Grouped | None]]:
        chain = self._chain
        outer, bent = Grouped.of(chain.loss.curvature, chain.output), None
        number = len(chain.links)
        for links, residual in reversed(chain.branches):
            here, bent_here = outer, bent
            inside: Grouped | None = None  # what the layers of the branch add
            way: Grouped | None = None  # the Jacobian from here to the end of the branch
            for position, each in reversed(list(enumerate(links))):
                number -= 1
                yield number, here, bent_here
                self._check(each, here)
                jacobian, own = each.input_jacobian, each.input_curvature
                way = jacobian if way is None else way.after(jacobian)
                inside = own if inside is None else jacobian.sandwich(inside).plus(own)
                if position > 0 or not residual:
                    here = jacobian.sandwich(here)
                    bent_here = own if bent_here is None else jacobian.sandwich(bent_here).plus(own)
            outer, bent = here, bent_here
            if residual:
                assert way is not None and inside is not None
                last_outer, last_bent = self._known[number + len(links) - 1]
                whole = way.plus_identity()
                outer = whole.sandwich(last_outer)
                bent = inside if last_bent is None else whole.sandwich(last_bent).plus(inside)
        yield -1, outer, bent

    def _check(self, each: Link, curvature: Grouped) -> None:
        tokens, length = self._chain.tokens, each.X.shape[1]
        size = max(curvature.size, length if isinstance(each, AttentionLink) else 1)
        width = max(each.X.shape[2], each.output.shape[2])
        fits(tokens, size, width, width, each.X, self._budget)
