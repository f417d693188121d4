"""Products by central differences, for models that autograd cannot differentiate twice: first derivatives are enough.

With F(w) the outputs, J = dF/dw, G = dl/dF and S = d2l/dF2,

    H v             ~ (g(w + hv) - g(w - hv)) / 2h,            g(w) = J(w)^T G(F(w))
    functional v    ~ (J(w + hv)^T G - J(w - hv)^T G) / 2h,    G that of w, a constant
    outer v         ~ J^T S (F(w + hv) - F(w - hv)) / 2h

The error at the displacement d = h |v| is |v| sqrt((a d^2)^2 + (b / d)^2): a from the third derivative, b from the
rounding of the gradients, least at d = (b / (sqrt(2) a))^(1/3). Both are measured, on a ladder of displacements around
eps^(1/3) (1 + |w|), when a product is first asked for. In each later one the first vector is taken with the
displacement 2d too: this tells the error of that very product, and d is made smaller where the loss bends more.

Of smooth networks no step was found that is three times better. Where F is piecewise linear in the weights, as with
ReLU, the outer and the functional part have no truncation up to the next kink, and the best step is the longest that
meets none. It is not sought: the kinks lie elsewhere for each vector, and a product across one is wrong altogether. So
such parts stay at the end of the ladder, with relative errors near 1e-13 in float64 and 1e-5 in float32, where the
best step of a small network would have reached 30 to 300 times (float64) and 3 to 80 times (float32) less.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvoscope.blocks import Block
from curvoscope.errors import ModelError
from curvoscope.operators.autodiff import Autodiff
from curvoscope.operators.batches import Batch

Key = tuple[str, tuple[str, ...], tuple[str, ...]]  # part, rows, columns

_RATIO = 4.0  # between the displacements of the ladder
_RUNGS = range(-4, 4)
_SHORTER = 1.5  # a displacement is given up for one that is shorter by this


@dataclass(frozen=True)
class Scale:
    """The coefficients of the error for unit vectors: a d^2 from truncation, b / d from rounding."""

    truncation: float
    rounding: float
    displacement: float

    def error(self, truncation: float, displacement: float) -> float:
        """The size of the error at a displacement, for a vector with its own truncation coefficient."""
        return math.hypot(truncation * displacement**2, self.rounding / displacement)

    def best(self, truncation: float) -> float:
        """The displacement with the least error for such a vector, at most the common one."""
        if truncation <= self.truncation or not self.rounding:
            return self.displacement
        return min(self.displacement, (self.rounding / (math.sqrt(2) * truncation)) ** (1 / 3))


class Differences(Autodiff):
    """Products with the Hessian of the mean loss and with its two parts, from first derivatives of the model."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        with self.ranks.together():
            if self.split != "model":
                raise ModelError("hvp", "with 'difference' the parts are cut at the model's output; use split='model'")
        self.error: float | None = None  # the largest of all products so far, over the size of the product
        self._scales: dict[Key, Scale] = {}

    def product(self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor) -> Tensor:
        """As that of `Autodiff`, from two gradients a vector, and two more for the first one."""
        lengths = self._lengths(vectors)
        if not bool(lengths.any()):
            return vectors.new_zeros(len(vectors), self.length(rows))
        one = int(lengths.argmax())
        key = part, tuple(block.name for block in rows), tuple(block.name for block in columns)
        if key not in self._scales:
            self._scales[key] = self._measure(part, rows, columns, vectors[one] / lengths[one].to(vectors.dtype))
        scale = self._scales[key]
        displacement = scale.displacement
        while True:
            displacements = lengths.new_full((len(vectors) + 1,), displacement)
            displacements[-1] = 2 * displacement
            several = torch.cat([vectors, vectors[one : one + 1]])
            found = self._differences(part, rows, columns, several, displacements)
            size, gap = (self._lengths(torch.stack([found[one], found[-1] - found[one]])) / lengths[one]).tolist()
            # the gap is three times the truncation error at d; what rounding explains is not counted
            truncation = max(0.0, gap - 2 * scale.rounding / displacement) / (3 * displacement**2)
            better = scale.best(truncation)
            if better * _SHORTER >= displacement:
                break
            displacement = better
        if size:
            self.error = max(self.error or 0.0, scale.error(max(truncation, scale.truncation), displacement) / size)
        return found[:-1]

    def _measure(self, part: str, rows: Sequence[Block], columns: Sequence[Block], unit: Tensor) -> Scale:
        """Climb the ladder along a unit vector; the differences between its rungs fall with 1/d and rise with d^2."""
        named = {piece.parameter for block in columns for piece in block.pieces}
        weights = torch.stack([self._lengths(self.snapshot.weight(name).reshape(1, -1))[0] for name in sorted(named)])
        size = float(weights.norm())
        start = torch.finfo(self.dtype).eps ** (1 / 3) * (1 + size)
        ladder = [start * _RATIO**rung for rung in _RUNGS]
        several = unit.expand(len(ladder), -1)
        displacements = torch.tensor(ladder, dtype=torch.float64, device=unit.device)
        found = self._differences(part, rows, columns, several, displacements).double()
        gaps = self._lengths(found[1:] - found[:-1]).tolist()
        gaps = [gap if math.isfinite(gap) else math.inf for gap in gaps]
        least = min(range(len(gaps)), key=gaps.__getitem__)
        if math.isinf(gaps[least]) or not gaps[least]:
            return Scale(0.0, 0.0, start)
        rounding = [gaps[i] * ladder[i] for i in range(least + 1)][-3:]
        rounding_error = sorted(rounding)[len(rounding) // 2] / math.sqrt(1 + _RATIO**-2)
        if least == len(gaps) - 1:  # rounding alone: F is linear along the vector, as far as the ladder reaches
            return Scale(gaps[least] / ((_RATIO**2 - 1) * ladder[least] ** 2), rounding_error, ladder[-1])
        truncation = gaps[least + 1] / ((_RATIO**2 - 1) * ladder[least + 1] ** 2)
        best = (rounding_error / (math.sqrt(2) * truncation)) ** (1 / 3) if math.isfinite(truncation) else ladder[least]
        return Scale(truncation, rounding_error, min(max(best, ladder[0]), ladder[-1]))

    def _lengths(self, vectors: Tensor) -> Tensor:
        """|v| of vectors (n, C), in float64."""
        return vectors.double().norm(dim=1)

    # ---- differences at given displacements

    def _differences(
        self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor, displacements: Tensor
    ) -> Tensor:
        """(n, R): the difference for each vector (n, C), at its displacement d = h |v|, summed over ranks."""
        question = "difference", part, [block.name for block in rows], [block.name for block in columns]
        return self.ranks.sum(
            question, vectors, lambda: self._own_differences(part, rows, columns, vectors, displacements)
        )

    def _own_differences(
        self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor, displacements: Tensor
    ) -> Tensor:
        spread = self._spread(columns, vectors)
        lengths = self._lengths(vectors)
        steps = torch.where(lengths > 0, displacements / lengths, 0.0).tolist()
        wanted = list(dict.fromkeys(piece.parameter for block in rows for piece in block.pieces))
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
            curved = _derivative(gradient, cut, moved, retain=True)
            found = _derivative(cut, list(leaves.values()), curved)
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
        found = _derivative(cut, list(leaves.values()), [G.detach() for G in gradient])
        return dict(zip(leaves, found, strict=True))

    def _cut(self, vector: Mapping[str, Tensor], step: float) -> list[Tensor]:
        return [F.detach() for F in self._run(vector, step)[1]]

    def _run(self, vector: Mapping[str, Tensor], step: float) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
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
            cut, gradient = self._engine.objective.gradient(outputs, self._batch.targets)
        return {name: weights[snapshot.paths[name]] for name in leaves}, cut, gradient


def _derivative(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], directions: Sequence[Tensor], retain: bool = False
) -> list[Tensor]:
    """d<outputs, directions>/d inputs, zeros where there is no dependence."""
    pairs = [(output, direction) for output, direction in zip(outputs, directions, strict=True) if output.requires_grad]
    if not pairs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        list(inputs),
        [direction for _, direction in pairs],
        retain_graph=retain,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(found)
