"""How far an eigenvalue that a Krylov method has not seen may lie beyond the Ritz values, with a given probability.

A small residual says that an eigenvalue is near a Ritz value, not that it is the end of the spectrum. The random start
bounds the end. Let the rows of V be orthonormal, B V^T = V^T T + U^T K with new orthonormal rows U, and let u be a unit
eigenvector with eigenvalue λ. Its coordinates y = V u and z = U u obey

    (λ - T) y = K^T z,    |y|² + |z|² ≤ 1.

A start of q standard normal rows G = S_V V + S_U U in the span of V and U has G u = S_V y + S_U z, so that

    |G u|² ≤ g(λ) = max_z |(S_V (λ - T)^-1 K^T + S_U) z|² / (|(λ - T)^-1 K^T z|² + |z|²).

G is drawn independently of B, so |G u|² is χ² with q degrees of freedom, and at least its quantile c of order δ with
probability 1 - δ. Then no λ with g(λ) < c is the eigenvalue of u. Away from the Ritz values g falls exponentially with
the number of steps. For q = 1 this is the bound of van Dorsselaer, Hochstenbach and van der Vorst,
"Computing probabilistic bounds for extreme eigenvalues of symmetric matrices with the Lanczos method", SIAM J. Matrix
Anal. Appl. 22 (2000): g is the Christoffel function of the Lanczos polynomials.

Three cases are added to theirs:

- Restarts. A Ritz vector x with Ritz value θ and coupling k that is dropped has <u, x> = k·z/(λ - θ), z being the
  coordinates on the new rows, which stay in the basis. So S depends on λ from then on (`_Restart`).
- Starts that are known vectors plus a random part: by Anderson's inequality |G u|² is stochastically at least that of
  the random part alone, whatever the known vectors.
- What is dropped as rounding: if the rows of U leave out a part of length ε, (λ - T) y = K^T z + e with |e| ≤ ε, which
  adds at most ε |S_V (λ - T)^-1| to |G u|. Other rounding errors do not depend on G u: they are a shift as above.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import scipy
import torch
from torch import Tensor

LEVELS = ((0.05, 1.96), (1e-4, 10.0))
"""(δ, r): with probability 1 - δ the end lies within r error bars of the outermost Ritz value."""
_POINTS = 96  # of the grid on which g is evaluated
_ROUNDS = 2  # of refinement
_REFINED = 8  # points of each
_CHUNK = 2**22  # numbers held at once


@dataclass(frozen=True, eq=False)
class Projection:
    """A Krylov basis at one moment: Ritz values θ (m,), Ritz vectors (m, m) in the basis as columns, and the coupling
    (new, m) between the rows of the basis that have not been multiplied and the Ritz vectors."""

    values: Tensor
    vectors: Tensor
    coupling: Tensor


@dataclass(frozen=True, eq=False)
class _Added:
    """Random vectors (q, rows of the basis)."""

    coordinates: Tensor

    def __call__(self, S: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """S (1 or λ, q, rows) with the new vectors below; nothing is lost."""
        rows = self.coordinates.shape[1]
        return torch.cat([_padded(S, rows), self.coordinates.expand(len(S), -1, -1)], 1), torch.zeros_like(at)


@dataclass(frozen=True, eq=False)
class _Restart:
    """The basis becomes the Ritz vectors `kept` and the rows that have not been multiplied."""

    projection: Projection
    kept: Tensor

    def __call__(self, S: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """S in the new basis, and |S_V (λ - T)^-1| (λ,) over the Ritz vectors that are dropped."""
        values, vectors, coupling = self.projection.values, self.projection.vectors, self.projection.coupling
        count = len(values)
        S = _padded(S, count + len(coupling))
        dropped = torch.ones(count, dtype=torch.bool, device=values.device)
        dropped[self.kept] = False
        turned = S[..., :count] @ vectors
        solved = turned[..., dropped] / _distances(at, values[dropped])[:, None]
        fresh = S[..., count:] + solved @ coupling[:, dropped].T
        kept = turned[..., self.kept].expand(len(at), -1, -1)
        return torch.cat([kept, fresh], 2), solved.flatten(1).norm(dim=1)


class Starts:
    """The random vectors that a Krylov run started from, and what has become of their coordinates in its basis."""

    def __init__(self) -> None:
        self._events: list[_Added | _Restart] = []
        self.bytes = 0  # that the records of restarts take
        self.count = 0  # q
        self._length = 0.0  # of all of them together
        self.lost = 0.0  # ε²: of what was dropped as rounding

    def add(self, coordinates: Tensor) -> None:
        """Standard normal vectors (q, rows), plus known ones or not, by their coordinates in the basis."""
        self._events.append(_Added(coordinates))
        self.count += len(coordinates)
        self._length = math.hypot(self._length, float(coordinates.norm()))

    def restart(self, projection: Projection, kept: Tensor) -> None:
        """The basis becomes the Ritz vectors `kept`, and then the rows that have not been multiplied."""
        self._events.append(_Restart(projection, kept))
        self.bytes += projection.vectors.nbytes

    def bars(
        self, projection: Projection, wanted: Tensor, signs: tuple[int, ...], scale: float, rounding: float
    ) -> Tensor:
        """Error bars (k,) for the eigenvalues that were not seen: see `LEVELS`.

        Eigenvalues are compared by t = λ or -λ, the larger the further out; with both signs by t = |λ|. The points with
        g ≥ c form an interval around each Ritz value, or around several. The outermost eigenvalue is not above the
        outermost of these points. The i-th is not above the top of the interval that holds the i-th Ritz value, unless
        an interval further out holds more eigenvalues than Ritz values: a multiplicity above the number of starts.

        Args:
            projection: of the present basis.
            wanted: t of the wanted Ritz values (k,), the outermost first.
            signs: (1,) for the largest, (-1,) for the smallest, (1, -1) for the largest magnitudes.
            scale: an estimate of |B|.
            rounding: lengths below this count as zero.
        """
        t = wanted.tolist()
        return _bars(lambda at: self._overlap(projection, signs, at), self.count, self._length, t, scale, rounding)

    def _overlap(self, projection: Projection, signs: tuple[int, ...], points: Tensor) -> Tensor:
        """sqrt(g(λ)) + ε |S_V (λ - T)^-1| at points t (n,), the largest over λ = sign·t."""
        width = (self.count + len(projection.coupling)) * (len(projection.values) + len(projection.coupling))
        parts = [
            torch.stack([self._overlap_at(projection, sign * part) for sign in signs]).amax(0)
            for part in points.to(projection.values.device).split(max(1, _CHUNK // width))
        ]
        return torch.cat(parts).cpu()

    def _overlap_at(self, projection: Projection, at: Tensor) -> Tensor:
        values, coupling = projection.values, projection.coupling
        S, lost = values.new_zeros(1, 0, 0), torch.zeros_like(at)
        for event in self._events:
            S, more = event(S, at)
            lost = lost + more
        count, new = len(values), len(coupling)
        S = _padded(S, count + new)
        solved = (S[..., :count] @ projection.vectors) / _distances(at, values)[:, None]  # S_V (λ - T)^-1
        found = (lost + solved.flatten(1).norm(dim=1)) * self.lost**0.5
        if not new:
            return found
        unit = torch.eye(new, dtype=values.dtype, device=values.device).expand(len(at), -1, -1)
        coordinates = torch.cat([coupling.T / _distances(at, values)[:, :, None], unit], 1)  # (y, z) for each column z
        triangle = torch.linalg.qr(coordinates, mode="r").R
        through = torch.linalg.solve_triangular(triangle, solved @ coupling.T + S[..., count:], upper=True, left=False)
        return found + torch.linalg.matrix_norm(through, 2)


def quadrature_bars(
    nodes: Tensor, first: Tensor, coupling: Tensor, lost: Tensor, size: int, sign: int, rounding: float
) -> float:
    """The error bar of the outermost Ritz value of several Lanczos runs, see `LEVELS`; not below rounding.

    |G u|² is then a sum over the p starts, each bounded by its own run. Starts of random signs are taken as normal
    ones: u must not be concentrated on few coordinates, where a sum of signs vanishes more often.

    Args:
        nodes: Ritz values (p, m).
        first: entries (p, m) of their vectors at the starts, which have length sqrt(size).
        coupling: of their vectors with the next ones (p, m).
        lost: lengths (p,) that were dropped as rounding.
        size: n.
        sign: 1 for the largest, -1 for the smallest.
        rounding: lengths below this, relative to the largest node or coupling, count as zero.
    """

    def overlap(points: Tensor) -> Tensor:
        inverse = 1 / _distances(sign * points.to(nodes.device), nodes[:, None])  # (p, points, m)
        solved, M = first[:, None] * inverse, coupling[:, None] * inverse
        through = (first[:, None] * M).sum(2).abs() / (1 + M.square().sum(2)).sqrt()
        return size**0.5 * (through + lost[:, None] * solved.norm(dim=2)).norm(dim=0).cpu()

    held = (sign * nodes)[first != 0]
    scale = float(torch.stack([nodes.abs().max(), coupling.abs().max()]).max())
    count = len(nodes)
    rounding *= scale
    return max(rounding, float(_bars(overlap, count, (count * size) ** 0.5, [float(held.max())], scale, rounding)[0]))


def _bars(
    overlap: Callable[[Tensor], Tensor],
    count: int,
    length: float,
    wanted: Sequence[float],
    scale: float,
    rounding: float,
) -> Tensor:
    """Error bars (k,) of wanted t, from sqrt(g) at points t and `count` starts of this length together."""
    found = torch.zeros(len(wanted), dtype=torch.float64)
    if not scale:
        return found
    for share, reach in LEVELS:
        least = (2 * float(scipy.special.gammaincinv(count / 2, share))) ** 0.5
        far = 2 * scale * (1 + count**0.5 * length / least) + 4 * rounding  # g < c beyond this
        tops = _Tops(overlap, least, rounding, far)
        found = torch.maximum(found, torch.tensor(tops.above(wanted), dtype=torch.float64) / reach)
    return found


@dataclass(frozen=True)
class _Tops:
    """Where the points with overlap ≥ least end: `overlap` is that of points t (n,), `far` beyond all of them."""

    overlap: Callable[[Tensor], Tensor]
    least: float
    rounding: float
    far: float

    def above(self, wanted: Sequence[float]) -> list[float]:
        """The distances from Ritz values, descending, to the tops of their intervals; that of the first to the last."""
        found: list[float] = []
        for i, value in enumerate(wanted):
            if i == 0:
                found.append(self._last(value, self.far))
                continue
            gap = wanted[i - 1] - value
            valley = self._valley(value, gap) if gap > 4 * self.rounding else None
            found.append(gap + found[-1] if valley is None else self._last(value, valley))
        return found

    def _valley(self, value: float, gap: float) -> float | None:
        """The distance at which the overlap is least between two Ritz values, None if it is not below `least`."""
        near = _geometric(self.rounding, gap / 2, _POINTS)
        distances = torch.cat([near, gap - near])
        overlap = self.overlap(value + distances)
        lowest = int(overlap.argmin())
        return float(distances[lowest]) if float(overlap[lowest]) < self.least else None

    def _last(self, value: float, far: float) -> float:
        """A distance above the largest one, up to `far`, with an overlap of at least `least`: 0 if there is none."""
        if far <= self.rounding:
            return 0.0
        low, high, points = self.rounding, far, _POINTS
        for _ in range(1 + _ROUNDS):
            distances = _geometric(low, high, points)
            seen = (self.overlap(value + distances) >= self.least).nonzero()
            if not len(seen):
                return 0.0 if points == _POINTS else low
            last = int(seen[-1])
            if last == points - 1:
                return high
            low, high, points = float(distances[last]), float(distances[last + 1]), _REFINED
        return high


def _geometric(low: float, high: float, points: int) -> Tensor:
    """`points` numbers from `low` to `high` in one ratio."""
    return torch.logspace(math.log(low), math.log(high), points, base=math.e, dtype=torch.float64)


def _distances(at: Tensor, values: Tensor) -> Tensor:
    """λ - θ (points, m), never zero."""
    found = at[:, None] - values
    return torch.where(found == 0, torch.finfo(found.dtype).tiny ** 0.5, found)


def _padded(S: Tensor, rows: int) -> Tensor:
    """S (..., rows): basis vectors that joined later are not in the span of earlier starts."""
    return torch.cat([S, S.new_zeros(*S.shape[:-1], rows - S.shape[-1])], -1)
