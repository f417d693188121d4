"""Random symmetric matrices of low rank with known ends of their spectra, and estimates of these ends."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from matrices import within

KINDS = ("indefinite", "clustered", "one-sided", "decaying")
WAYS = ("tolerance", "budget", "warm", "restarts")


class LowRank:
    """sum_i λ_i q_i q_i^T of n rows: eigenvectors q_i with disjoint supports, so that a product takes O(n)."""

    symmetric = True
    device = torch.device("cpu")

    def __init__(self, values: Tensor, size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        self.shape, self.dtype, self.products = (size, size), dtype, 0
        self._values = values.to(dtype)
        q = torch.randn(len(values), size // len(values), generator=generator, dtype=torch.float64)
        self._q = (q / q.norm(dim=1, keepdim=True)).to(dtype)

    def __matmul__(self, other: Tensor) -> Tensor:
        self.products += other.shape[1]
        rank, length = self._q.shape
        out = torch.zeros_like(other)
        for column in range(other.shape[1]):
            part = other[: rank * length, column].reshape(rank, length)
            weights = self._values * (self._q * part).sum(1)
            out[: rank * length, column] = (weights[:, None] * self._q).flatten()
        return out

    def vector(self, index: int) -> Tensor:
        """q_i (n,)."""
        found = torch.zeros(self.shape[0], dtype=torch.float64)
        length = self._q.shape[1]
        found[index * length : (index + 1) * length] = self._q[index].double()
        return found


@dataclass(frozen=True)
class Draw:
    """A matrix and how to ask for `k` of its eigenvalues; `truth` (k,) in ascending order."""

    operator: LowRank
    k: int
    which: str
    options: dict
    truth: Tensor
    name: str
    memory_limit: int | None


def draw(seed: int, largest: int) -> Draw:
    """The matrix number `seed`, with up to `largest` rows."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=generator))

    def choice(*options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    size = int(10 ** uniform(3, math.log10(largest)))
    rank = min(50, int(math.exp(uniform(0, math.log(51)))))
    kind, way, k, which = choice(*KINDS), choice(*WAYS), choice(1, 1, 1, 3), choice("LA", "SA", "LM")
    values = _values(kind, rank, generator) * 10 ** uniform(-3, 3)
    single = choice(False, False, True)
    operator = LowRank(values, size, torch.float32 if single else torch.float64, generator)
    tolerance = choice(0.05, 0.005, 1e-5 if single else 1e-6)
    options, limit = {"tolerance": tolerance, "seed": seed}, None
    if way == "budget":
        options = {"matvecs": choice(3, 6, 12, 30), "seed": seed}
    elif way == "warm":
        noise = torch.randn(size, generator=generator, dtype=torch.float64) / size**0.5
        known = operator.vector(int(torch.randint(rank, (1,), generator=generator)))  # not the end, as a rule
        options["start"] = known + choice(0.0, 0.1) * noise
    elif way == "restarts":
        limit = 8 * size * (4 * k + 2 * k + choice(8, 12, 20))
    everything = torch.cat([values, torch.zeros(min(k, size - rank), dtype=torch.float64)])
    order = {"LM": -everything.abs(), "LA": -everything, "SA": everything}[which].argsort(stable=True)
    name = f"{seed}: {kind}, {way}, rank {rank}, n {size}, {which}, k {k}, {operator.dtype}"
    return Draw(operator, k, which, options, everything[order[:k]].sort().values, name, limit)


def _values(kind: str, rank: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(rank, generator=generator, dtype=torch.float64)
    if kind == "indefinite":
        return normal
    if kind == "one-sided":
        return normal.abs() * (1 if float(torch.rand(1, generator=generator)) < 0.5 else -1)
    if kind == "decaying":
        return torch.arange(1, rank + 1, dtype=torch.float64) ** -2.0 * normal.sign()
    width = 10.0 ** -float(6 * torch.rand(1, generator=generator))  # the ends are clusters of this width
    return normal.sign() * (1 + width * torch.rand(rank, generator=generator, dtype=torch.float64))


@dataclass(frozen=True)
class Outcome:
    """Of each eigenvalue asked for: whether the 95 % interval holds it, and whether it is said to have converged though
    its error is more than ten error bars."""

    held: tuple[bool, ...]
    confidently_wrong: tuple[bool, ...]
    products: int


def outcome(one: Draw, solve) -> Outcome:
    """Of `solve` on a draw. For the largest magnitudes the magnitude counts."""
    found = within(one.memory_limit, solve, one.operator, one.k, one.which, **one.options)
    size = abs if one.which == "LM" else float
    pairs = list(zip(found, found.converged, strict=True))
    truths = one.truth.tolist()
    if one.which == "LM":  # two of nearly the same size and opposite signs may stand in either order
        pairs.sort(key=lambda pair: abs(pair[0].value))
        truths.sort(key=abs)
    held, wrong = [], []
    for (value, converged), truth in zip(pairs, truths, strict=True):
        error, (low, high) = abs(size(value.value) - size(truth)), value.interval()
        held.append(error <= (high - low) / 2)
        wrong.append(converged and error > 10 * value.stderr)
    return Outcome(tuple(held), tuple(wrong), found.matvecs)
