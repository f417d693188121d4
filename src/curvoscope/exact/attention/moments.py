"""Statistics of the rows of an attention matrix: everything in attention's Hessian is built from them.

Row i of A is a distribution over keys j. For features f_j, g_j of the keys,

    mean_i[f]   = sum_j A_ij f_j
    Cov_i[f, g] = f^T D_i g                        D_i = dA_i/dT_i = diag(a) - a a^T
    Third_i     = f^T (diag(p) - p a^T - a p^T) g  p = P_i = D_i u_i: the third central moment, contracted with u

Without softmax A = T where the mask allows: D_i = diag(mask_i), and the third moment is zero.

Of a row that puts all but δ of its weight on one key, these moments are of order δ. They come out with all their digits
because they are taken about that key: D_i 1 = 0, so any shift may be chosen, and the mean would leave an error of
order one in the last digit. With a sink beside the keys, rows sum to less than 1: the formulas are the same, but D_i 1
is not 0, and nothing is shifted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope.exact.attention.rotary import TokenMap
from curvoscope.magnitudes import unit
from curvoscope.operators.cores import Core, RowForm, TokenForm

_KEPT_NUMBERS = 2**23
_SHARP = 2.0**-10  # δ below which a covariance taken about the mean of the sequence loses more than ten bits


@dataclass(frozen=True)
class Feature:
    """Features of the keys (N, L, p), shifted by the mean of their sequence, and their row means (N, L, p).

    The shift changes no covariance (D_i 1 = 0) and saves the digits that an offset would cost. `source`: other features
    and the matrix W that makes these of them, f = g W.
    """

    values: Tensor
    means: Tensor
    source: "tuple[Feature, Tensor] | None" = None

    @property
    def width(self) -> int:
        """Number of features."""
        return self.values.shape[-1]


class Rows:
    """The rows of one head's attention matrix A (N, L, L)."""

    def __init__(self, A: Tensor, open_keys: Tensor | None, sunk: bool = False) -> None:
        """`open_keys` (N or 1, L, L) in {0, 1}: linear attention's derivative of A in T; None for softmax. `sunk`: a
        part of the softmax goes to a sink."""
        self.A, self.open_keys = A, open_keys
        self.shifts = open_keys is None and not sunk  # D_i 1 = 0
        self.sequences, self.length = A.shape[0], A.shape[1]
        self.tokens = self.sequences * self.length
        weight, self._top = A.max(-1, keepdim=True)
        sharp = (weight > 1 - _SHARP).flatten() & self.shifts
        self._sharp = sharp.nonzero()[:, 0]
        self._single = self._sharp[:0]
        if len(self._sharp):  # where all other weights are zero, as in a first causal row, so are the moments, exactly
            alone = A.flatten(0, 1)[self._sharp].count_nonzero(-1) == 1
            self._single, self._sharp = self._sharp[alone], self._sharp[~alone]
        self._kept: dict[tuple[int, int], tuple[Feature, Feature, Tensor]] = {}
        self._last: tuple[Feature, Feature, tuple[int, int], Tensor] | None = None

    @property
    def softmax(self) -> bool:
        """Whether a softmax was taken over the keys."""
        return self.open_keys is None

    @property
    def any_sharp(self) -> bool:
        """Whether a token attends to almost one key alone, but not to it alone."""
        return len(self._sharp) > 0

    def sharp(self, start: int, stop: int) -> Tensor:
        """The indices of those tokens from start to stop that attend almost to a single key."""
        return self._sharp[(self._sharp >= start) & (self._sharp < stop)] if len(self._sharp) else self._sharp

    def tops(self, start: int, stop: int) -> Tensor:
        """The key of largest weight of each of the tokens start to stop, (t, 1)."""
        return _tokens(self._top, start, stop)

    def feature(self, values: Tensor, source: tuple[Feature, Tensor] | None = None) -> Feature:
        """Prepare features (N, L, p) for `covariance` and `third`."""
        if self.shifts:
            values = values - values.mean(1, keepdim=True)
        return Feature(values, self.A @ values, source if self.shifts else None)

    def derivative(self, u: Tensor) -> Tensor:
        """D_i u_i for every row: (..., N, L, L) -> (..., N, L, L)."""
        if self.open_keys is not None:
            return self.open_keys * u
        return softmax_derivative(self.A, about(u, self._top if self.shifts else None))

    def covariance(self, f: Feature, g: Feature, start: int, stop: int) -> Tensor:
        """Cov_i[f, g] for tokens start to stop: (t, p, q). Small ones are kept: several blocks share them."""
        if g.source is not None and f.source is None:
            return self.covariance(g, f, start, stop).mT
        if self.tokens * f.width * g.width > _KEPT_NUMBERS:
            return self._covariance(f, g, start, stop)
        key = (id(f), id(g))
        if key not in self._kept:
            self._kept[key] = (f, g, self._covariance(f, g, 0, self.tokens))  # f and g keep their ids from reuse
        return self._kept[key][2][start:stop]

    def _covariance(self, f: Feature, g: Feature, start: int, stop: int) -> Tensor:
        if self.open_keys is not None:
            return self._second(self.open_keys.expand_as(self.A), f, g, start, stop)
        if f.source is not None and f.source[0] is g and g.width <= self.length:
            return (self.covariance(g, g, start, stop) @ f.source[1]).mT  # W^T Cov_i[g, g], fewer multiplications
        f_mean, g_mean = _tokens(f.means, start, stop), _tokens(g.means, start, stop)
        found = self._second(self.A, f, g, start, stop).addcmul_(f_mean[:, :, None], g_mean[:, None, :], value=-1)
        found[self._single[(self._single >= start) & (self._single < stop)] - start] = 0  # fused, it leaves a rounding
        for at in self.sharp(start, stop).split(max(1, _KEPT_NUMBERS // (self.length * (f.width + g.width)))):
            found[at - start] = self._about_top(f, g, at)
        return found

    def _about_top(self, f: Feature, g: Feature, tokens: Tensor) -> Tensor:
        """Cov_i[f, g] of the tokens, (t, p, q), from the differences to the features of their key of largest weight."""
        sequence, top = tokens // self.length, self._top.flatten()[tokens]
        a = self.A.flatten(0, 1)[tokens]
        from_f, from_g = (x.values[sequence] - x.values[sequence, top][:, None] for x in (f, g))
        weighted = a[:, :, None] * from_f
        return weighted.mT @ from_g - weighted.sum(1)[:, :, None] * (a[:, None, :] @ from_g)

    def third(self, P: Tensor, f: Feature, g: Feature, start: int, stop: int) -> Tensor:
        """sum_j P_ij (f_j - mean)(g_j - mean)^T for tokens start to stop: (t, p, q). The rows of P sum to zero."""
        f_mean, g_mean = _tokens(f.means, start, stop), _tokens(g.means, start, stop)
        Pf, Pg = (self.apply(P, x.values, start, stop) for x in (f, g))
        left, right = torch.stack([Pf, f_mean], 2), torch.stack([g_mean, Pg], 1)
        return self._second(P, f, g, start, stop).baddbmm_(left, right, alpha=-1)

    def inner_derivative(self, start: int, stop: int) -> Tensor:
        """The matrices D_i, (t, L, L)."""
        if self.open_keys is not None:
            return torch.diag_embed(_tokens(self.open_keys.expand_as(self.A), start, stop))
        a, top = _tokens(self.A, start, stop), self.tops(start, stop)
        rest = 1 - a
        if self.shifts:
            rest.scatter_(-1, top, a.scatter(-1, top, 0).sum(-1, keepdim=True))  # 1 - a_top, without a difference
        found = -a[:, :, None] * a[:, None, :]
        found.diagonal(dim1=1, dim2=2).copy_(a * rest)
        return found

    def inner_third(self, P: Tensor, start: int, stop: int) -> Tensor:
        """diag(p) - p a^T - a p^T, (t, L, L)."""
        a, p = _tokens(self.A, start, stop), _tokens(P, start, stop)
        cross = p[:, :, None] * a[:, None, :]
        return torch.diag_embed(p) - cross - cross.mT

    def _pairs(self, f: Feature, g: Feature, first: int, last: int) -> Tensor:
        """f_j g_j^T for whole sequences, (n, L, p q). The last is kept: covariance and third moment share it."""
        if self._last is not None and self._last[0] is f and self._last[1] is g and self._last[2] == (first, last):
            return self._last[3]
        pairs = (f.values[first:last, :, :, None] * g.values[first:last, :, None, :]).flatten(2)
        self._last = (f, g, (first, last), pairs) if pairs.numel() <= _KEPT_NUMBERS else None
        return pairs

    def apply(self, weights: Tensor, values: Tensor, start: int, stop: int) -> Tensor:
        """sum_j w_ij f_j for tokens start to stop: (t, p)."""
        n, first = divmod(start, self.length)
        if first == 0 and stop % self.length == 0:
            last = stop // self.length
            return (weights[n:last] @ values[n:last]).flatten(0, 1)
        return weights[n, first : first + stop - start] @ values[n]

    def _second(self, weights: Tensor, f: Feature, g: Feature, start: int, stop: int) -> Tensor:
        """sum_j w_ij f_j g_j^T, (t, p, q): whole sequences by one product over the keys, otherwise row by row."""
        n, first = divmod(start, self.length)
        if first == 0 and stop % self.length == 0:
            last = stop // self.length
            pairs = self._pairs(f, g, n, last)
            return (weights[n:last] @ pairs).view(stop - start, f.width, g.width)
        rows = weights[n, first : first + stop - start]
        return (rows[:, :, None] * f.values[n]).mT @ g.values[n]


def about(u: Tensor, top: Tensor | None) -> Tensor:
    """u (..., L, L) less its entry at each row's key of largest weight, `top` (..., L, 1): D_i sees no shift."""
    return u if top is None else u - u.gather(-1, top.expand(*u.shape[:-1], 1))


def softmax_derivative(A: Tensor, u: Tensor) -> Tensor:
    """D_i u_i for every row of A, (..., L, L): to relative precision when u is taken `about` the largest weight."""
    return A * (u - (A * u).sum(-1, keepdim=True))


def _tokens(values: Tensor, start: int, stop: int) -> Tensor:
    """(N, L, ...) -> tokens start to stop, (t, ...)."""
    return values.flatten(0, 1)[start:stop]


class Covariance(Core):
    """C_i = Cov_i[f, g]."""

    def __init__(self, rows: Rows, f: Feature, g: Feature) -> None:
        super().__init__((f.width, g.width), rows.length, _workspace(rows, f, g), symmetric=f is g)
        self._rows, self._f, self._g = rows, f, g

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, p, q)."""
        return self._rows.covariance(self._f, self._g, start, stop)

    @property
    def T(self) -> Core:
        """Cov_i[g, f]."""
        return Covariance(self._rows, self._g, self._f)

    def split(self) -> tuple[Core, Tensor] | None:
        """Cov_i[f, f] W, if g = f W."""
        feature, matrix = self._g.source or (None, None)
        if feature is not self._f or matrix is None:
            return None
        return Covariance(self._rows, feature, feature), matrix

    def token_form(self) -> TokenForm:
        """f^T D_i g."""
        return TokenForm(self._f.values, self._g.values, self._rows.inner_derivative, self._rows.length)

    def row_form(self) -> RowForm | None:
        """f^T (diag(a) - a a^T) g. Of rows that attend to almost one key alone the difference has no digits left."""
        rows = self._rows
        if rows.open_keys is not None:
            return RowForm(self._f.values, self._g.values, rows.open_keys.expand_as(rows.A))
        if rows.any_sharp:
            return None
        return RowForm(self._f.values, self._g.values, rows.A, (rows.A,), ((-1.0, 0, 0),))


class Third(Core):
    """C_i = the third central moment of f and g, contracted with the gradient through P."""

    def __init__(self, rows: Rows, P: Tensor, f: Feature, g: Feature) -> None:
        super().__init__((f.width, g.width), rows.length, _workspace(rows, f, g), symmetric=f is g)
        self._rows, self._P, self._f, self._g = rows, P, f, g

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, p, q)."""
        return self._rows.third(self._P, self._f, self._g, start, stop)

    def diagonal(self, start: int, stop: int) -> Tensor:
        """P (f . g) - (P f) . mean[g] - mean[f] . (P g), (t, p)."""
        f, g = self._f, self._g
        Pfg, Pf, Pg = (
            self._rows.apply(self._P, values, start, stop) for values in (f.values * g.values, f.values, g.values)
        )
        return Pfg - Pf * _tokens(g.means, start, stop) - _tokens(f.means, start, stop) * Pg

    @property
    def diagonal_workspace(self) -> int:
        """A few vectors."""
        return 8 * self._f.width

    def token_form(self) -> TokenForm:
        """f^T (diag(p) - p a^T - a p^T) g."""
        return TokenForm(
            self._f.values,
            self._g.values,
            lambda start, stop: self._rows.inner_third(self._P, start, stop),
            self._rows.length,
        )

    def row_form(self) -> RowForm:
        """f^T (diag(p) - p a^T - a p^T) g, all of it of the size of p."""
        P, exponent = unit(self._P)
        outers = (-1.0, 0, 1), (-1.0, 1, 0)
        return RowForm(self._f.values, self._g.values, P, (P, self._rows.A), outers, exponent)


def _workspace(rows: Rows, f: Feature, g: Feature) -> int:
    """Numbers per token that a covariance needs: the result, the pairs, and rows times features."""
    return 3 * f.width * g.width + rows.length * min(f.width, g.width)


@dataclass(frozen=True)
class Response:
    """M_i = Cov_i[V, f]: how the head's output answers to scores that move along the features f.

    `rotary`: the weight moves queries that a norm or positions map by J_i, so that its matrix is M_i J_i.
    """

    rows: Rows
    value: Feature
    feature: Feature
    rotary: TokenMap | None = None

    def matrix(self, start: int, stop: int) -> Tensor:
        """Cov_i[V, f], (t, e, p)."""
        return self.rows.covariance(self.value, self.feature, start, stop)

    def turned(self) -> Tensor:
        """M_i J_i of all tokens, (T, e, p)."""
        matrix = self.matrix(0, self.rows.tokens)
        return matrix if self.rotary is None else self.rotary.back(matrix, 0, self.rows.length)

    @property
    def workspace(self) -> int:
        """Numbers that `matrix` needs for a token."""
        narrow, wide = sorted((self.value.width, self.feature.width))
        return 3 * narrow * wide + self.rows.length * narrow


def rotated(core: Core, left: Response | None, right: Response | None) -> Core:
    """Turn the core of two weights by the maps of their responses, if they have any."""
    rows, columns = (None if one is None else one.rotary for one in (left, right))
    return core if rows is None and columns is None else Rotated(core, rows, columns)


class Rotated(Core):
    """J_i^T C_i J_i, on the rows, the columns or both: the query side under norms and rotary positions."""

    def __init__(self, core: Core, rows: TokenMap | None, columns: TokenMap | None) -> None:
        super().__init__(core.shape, core.period, 3 * core.workspace, core.symmetric and rows is columns)
        self._core, self._rows, self._columns = core, rows, columns

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, p, q)."""
        values = self._core.dense(start, stop)
        if self._columns is not None:
            values = self._columns.back(values, start, self.period)
        if self._rows is not None:
            values = self._rows.back(values.mT, start, self.period).mT
        return values


@dataclass(frozen=True)
class Moments:
    """Attention moments of Definition 3.1. With several heads there is a head axis before L.

    `attention` (..., L, L), `M1` (..., L, d): row means of the inputs; `M2` (..., L, d, d): their covariances; `M3`
    (..., L, d^2, d): sum_j A_ij x (x) x x^T, x = x_j - M1_i; `entropy` (..., L) of the rows, in nats.
    """

    X: Tensor
    attention: Tensor

    @property
    def M1(self) -> Tensor:
        """Row means of the inputs."""
        return self.attention @ self.X

    @property
    def _centred(self) -> Tensor:
        return self.X[..., None, :, :] - self.M1[..., :, None, :]  # (..., i, j, d)

    @property
    def M2(self) -> Tensor:
        """Row covariances of the inputs."""
        centred = self._centred
        return (self.attention[..., None] * centred).mT @ centred

    @property
    def M3(self) -> Tensor:
        """Third central moments of the inputs, (d^2, d) for each row."""
        centred = self._centred
        pairs = (centred[..., :, None] * centred[..., None, :]).flatten(-2)
        return (self.attention[..., None] * pairs).mT @ centred

    @property
    def entropy(self) -> Tensor:
        """-sum_j A_ij log A_ij."""
        return -torch.special.xlogy(self.attention, self.attention).sum(-1)
