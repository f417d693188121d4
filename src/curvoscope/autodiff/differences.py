"""Products by central differences, for models that autograd cannot differentiate twice: first derivatives are enough.

With F(w) the outputs, J = dF/dw, G = dl/dF and S = d2l/dF2,

    H v             ~ (g(w + hv) - g(w - hv)) / 2h,            g(w) = J(w)^T G(F(w))
    functional v    ~ (J(w + hv)^T G - J(w - hv)^T G) / 2h,    G that of w, a constant
    outer v         ~ J^T S (F(w + hv) - F(w - hv)) / 2h

The displacement d = h |v| is searched for each vector, see `displacements`: differences at d/2 and d tell whether d is
short enough for it, and how far off the product is. Where the search begins is measured once for each block, along a
random vector, with about forty gradients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.displacements import Climb, MeasuredDifference, Scale, climb, smooth_optimum
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.graph import SecondDerivativeError, derivative
from curvoscope.blocks import Block, parameters_of
from curvoscope.errors import ModelError

Key = tuple[str, tuple[str, ...], tuple[str, ...]]  # part, rows, columns

# times the least displacement, at which there is nothing but rounding
_TRIES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5)
_LEAST = 8  # times epsilon (1 + |w|)
_LONGEST = 4  # times 1 + |w|


class Differences(Autodiff):
    """Products with the Hessian of the mean loss and with its two parts, from first derivatives of the model."""

    method = "difference"
    exact_products = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        with self.ranks.together():
            if self.split != "model":
                raise ModelError("hvp", "'difference' splits the parts at the model's output; use split='model'")
        self.error = None  # the largest of all products so far, over the size of the product
        self._scales: dict[Key, Scale] = {}

    def product(self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor) -> Tensor:
        """As that of `Autodiff`, from six gradients per vector, or more if the search goes on."""
        if part == "both":
            return torch.cat([self.product(one, rows, columns, vectors) for one in ("outer", "functional")], 1)
        lengths = self._lengths(vectors)
        moving = lengths.nonzero().flatten().tolist()
        products = vectors.new_zeros(len(vectors), self.length(rows))
        if not moving:
            return products
        key = part, tuple(block.name for block in rows), tuple(block.name for block in columns)
        if key not in self._scales:
            self._scales[key] = self._measure(part, rows, columns, vectors)
        scale = self._scales[key]
        climbs = [climb(scale, self._norm) for _ in moving]
        found = self._run(part, rows, columns, vectors[moving], climbs)
        for i, one in zip(moving, found, strict=True):
            products[i] = one.product * lengths[i].to(vectors.dtype)
            if one.size:
                self.error = max(self.error or 0.0, one.error / one.size)
        return products

    def _run(
        self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor, climbs: Sequence[Climb]
    ) -> list[MeasuredDifference]:
        """What the searches for each of the vectors find; all that they ask for at a time is computed together."""
        lengths = self._lengths(vectors).to(vectors.dtype)
        asked = {i: next(one) for i, one in enumerate(climbs)}
        found: dict[int, MeasuredDifference] = {}
        while asked:
            which = [i for i, several in asked.items() for _ in several]
            displacements = [d for several in asked.values() for d in several]
            wanted = torch.tensor(displacements, dtype=torch.float64, device=vectors.device)
            products = self._differences(part, rows, columns, vectors[which], wanted) / lengths[which, None]
            parts = products.split([len(several) for several in asked.values()])
            for i, answer in zip(list(asked), parts, strict=True):
                try:
                    asked[i] = climbs[i].send(answer)
                except StopIteration as end:
                    found[i] = end.value
                    del asked[i]
        return [found[i] for i in range(len(climbs))]

    def _measure(self, part: str, rows: Sequence[Block], columns: Sequence[Block], like: Tensor) -> Scale:
        """The rounding error from several small displacements along a random vector, then how far one may go."""
        weights = [self._norm(self.snapshot.weight(name).flatten()) for name in sorted(parameters_of(columns))]
        reach, epsilon = 1 + math.hypot(*weights), torch.finfo(self.dtype).eps
        probe = self._random(like)
        probe = probe / self._lengths(probe)[:, None].to(probe.dtype)

        def several(*displacements: float) -> Tensor:
            wanted = torch.tensor(displacements, dtype=torch.float64, device=probe.device)
            return self._differences(part, rows, columns, probe.expand(len(wanted), -1), wanted)

        tries = torch.tensor(_TRIES, dtype=torch.float64, device=probe.device)
        least = _LEAST * epsilon * reach
        small = several(*(least * tries).tolist()).double()
        mean = (tries.square() @ small) / tries.square().sum()
        rounding = least * self._norm((small - mean) * tries[:, None]) / math.sqrt(len(tries) - 1)
        scale = Scale(rounding, epsilon, epsilon ** (1 / 3) * reach, least, _LONGEST * reach)
        (found,) = self._run(part, rows, columns, probe, [climb(scale, self._norm)])
        d = found.displacement
        one, two = several(2 * d, 4 * d)
        behind = scale.judge(found.product, one, 2 * d, self._norm), scale.judge(one, two, 4 * d, self._norm)
        best = smooth_optimum(scale, *behind)
        return replace(scale, start=d) if best is None else replace(scale, start=best, smooth=True)

    def _random(self, like: Tensor) -> Tensor:
        """A vector (1, C), the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1, like.shape[1], generator=generator, dtype=torch.float64).to(like)

    def _norm(self, tensor: Tensor) -> float:
        return float(self._lengths(tensor.reshape(1, -1))[0])

    def _lengths(self, vectors: Tensor) -> Tensor:
        """|v| of vectors (n, C), in float64."""
        return vectors.double().norm(dim=1)

    # ---- differences at given displacements

    def _differences(
        self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor, displacements: Tensor
    ) -> Tensor:
        """(n, R): the difference for each vector (n, C), at its displacement d = h |v|, summed over ranks."""
        question = "difference", part, [block.name for block in rows], [block.name for block in columns]
        height = self.length(rows)
        return self.ranks.sum(
            question, vectors, height, lambda: self._own_differences(part, rows, columns, vectors, displacements)
        )

    def _own_differences(
        self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor, displacements: Tensor
    ) -> Tensor:
        spread = self._spread(columns, vectors)
        lengths = self._lengths(vectors)
        steps = torch.where(lengths > 0, displacements / lengths, 0.0).tolist()
        wanted = parameters_of(rows)
        total = vectors.new_zeros(len(vectors), self.length(rows))

        def visit(weight: float, batch: Batch) -> None:
            at = _Batch(self, batch, wanted)
            for i, step in enumerate(steps):
                if step:
                    along = {name: vector[i] for name, vector in spread.items()}
                    total[i].add_(self._flat(rows, wanted, at.product(part, along, step), ()), alpha=weight)

        self.walk(visit)
        return total


class _Batch:
    """First derivatives of one batch's loss near the weights."""

    def __init__(self, engine: Differences, batch: Batch, wanted: Sequence[str]) -> None:
        self._engine, self._batch, self._wanted = engine, batch, wanted
        self._constant: list[Tensor] | None = None  # G at the weights

    def product(self, part: str, vector: Mapping[str, Tensor], step: float) -> dict[str, Tensor]:
        """The central difference along a vector shaped like the parameters, by parameter."""
        if part == "outer":
            with torch.no_grad():
                pairs = zip(self._cut(vector, step), self._cut(vector, -step), strict=True)
                moved = [(above - below) / (2 * step) for above, below in pairs]
            leaves, cut, gradient = self._run({}, 0.0)
            curved = derivative(gradient, cut, moved, retain=True)
            found = derivative(cut, list(leaves.values()), curved)
            return dict(zip(leaves, found, strict=True))
        above, below = (self._gradient(part, vector, sign * step) for sign in (1, -1))
        return {name: (above[name] - below[name]) / (2 * step) for name in above}

    def _gradient(self, part: str, vector: Mapping[str, Tensor], step: float) -> dict[str, Tensor]:
        """J^T G at w + step v; with the G of w for the functional part."""
        leaves, cut, gradient = self._run(vector, step)
        if part == "functional":
            if self._constant is None:
                self._constant = [G.detach() for G in self._run({}, 0.0)[2]]
            gradient = self._constant
        found = derivative(cut, list(leaves.values()), [G.detach() for G in gradient])
        return dict(zip(leaves, found, strict=True))

    def _cut(self, vector: Mapping[str, Tensor], step: float) -> list[Tensor]:
        return [F.detach() for F in self._run(vector, step)[1]]

    def _run(
        self, vector: Mapping[str, Tensor], step: float
    ) -> tuple[dict[str, Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """The wanted parameters, F and G at w + step v."""
        snapshot = self._engine.snapshot
        weights, leaves = snapshot.leaves(self._wanted)
        with torch.no_grad():
            moved = {
                snapshot.paths[name]: snapshot.weight(name).add(direction, alpha=step)
                for name, direction in vector.items()
            }
        for path, tensor in moved.items():
            weights[path] = tensor.requires_grad_(weights[path].requires_grad)
        with torch.enable_grad():
            outputs = snapshot(weights, self._batch)
            cut, gradient = self._engine._gradient(weights, outputs, self._batch)
        return {name: weights[snapshot.paths[name]] for name in leaves}, cut, gradient


def differentiable_twice(engine: Autodiff) -> bool:
    """Whether autograd has right second derivatives of the model, on all ranks: one product tells."""
    failure: Exception | None = None
    several = list(engine.blocks.values())
    try:
        ones = torch.ones(1, engine.length(several), dtype=engine.dtype, device=engine.device)
        engine.product("total", several, several, ones)
    except Exception as error:
        failure = error
    lacking = any(engine.ranks.exchange(isinstance(failure, SecondDerivativeError)))
    if failure is not None and not lacking:
        raise failure
    return not lacking
