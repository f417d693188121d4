"""The small matrices C_t of a Kronecker sum, made when they are asked for, a range of tokens at a time.

Tokens come in sequences of `period`: a range is either whole sequences or a part of one. Many cores have a second form,
C_ni = f_n^T E_ni g_n with a small matrix E for each token and features f (F, p), g (F, q) shared by a group of tokens:
the L tokens of the sequence in attention, the words in cross-entropy. It makes inner products cheap when F is small.
Where E is a diagonal matrix plus a few outer products, as in a third moment of attention, inner products never need E
itself: they cost F multiplications instead of F² for each pair of tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.magnitudes import ScaledNumber, unit

_NEVER = 2**62  # the cost of a route that does not exist
_ROW_GRAMS = 16  # matrices of pairs of tokens at once while `inner_by_rows` multiplies them
_MIDDLES, _CARRIED = 4, 3  # tensors at once while the middles E are made, and while they are carried over


@dataclass(frozen=True)
class TokenForm:
    """C_ni = left_n^T E_ni right_n: features (groups, F, p) and (groups, F, q), and `inner(start, stop)` -> (t, F, F).

    Each group holds `tokens` tokens. For attention a group is a sequence, and its F = L features belong to its tokens.
    """

    left: Tensor
    right: Tensor
    inner: Callable[[int, int], Tensor]
    tokens: int


@dataclass(frozen=True)
class RowForm:
    """C_ni = 2^exponent f_n^T (diag(w_ni) + sum of c u_ni v_ni^T) g_n for the tokens i of each group n.

    Features `left` f (groups, F, p) and `right` g (groups, F, q), both None for the identity; `diagonal` w (groups,
    tokens, F). Each of the `outers` is a number c and the places of u and v among the `vectors`, shaped like w.
    """

    left: Tensor | None
    right: Tensor | None
    diagonal: Tensor
    vectors: tuple[Tensor, ...] = ()
    outers: tuple[tuple[float, int, int], ...] = ()
    exponent: int = 0


class Core(ABC):
    """C_t (p, q) for tokens t. `workspace` counts the numbers that a token needs while `dense` computes it."""

    def __init__(self, shape: tuple[int, int], period: int, workspace: int, symmetric: bool = False) -> None:
        self.shape, self.period, self.symmetric = shape, period, symmetric
        self.size = shape[0] * shape[1]
        self.workspace = max(workspace, self.size)

    @abstractmethod
    def dense(self, start: int, stop: int) -> Tensor:
        """(t, p, q); symmetric up to rounding when `symmetric`."""

    def diagonal(self, start: int, stop: int) -> Tensor:
        """The diagonals, (t, p)."""
        return self.dense(start, stop).diagonal(dim1=1, dim2=2)

    def trace(self, start: int, stop: int) -> Tensor:
        """The traces, (t,)."""
        return self.diagonal(start, stop).sum(1)

    @property
    def diagonal_workspace(self) -> int:
        """Numbers a token needs while `diagonal` computes it."""
        return self.workspace

    @property
    def trace_workspace(self) -> int:
        """Numbers a token needs while `trace` computes it."""
        return self.diagonal_workspace

    def token_form(self) -> TokenForm | None:
        """The token-space form, if there is one."""
        return None

    def row_form(self) -> RowForm | None:
        """The form with E a diagonal matrix plus outer products, if there is one."""
        return None

    def split(self) -> "tuple[Core, Tensor] | None":
        """Symmetric cores S and a matrix W with C_t = S_t W, if any: entries may then sum over the tokens first."""
        return None

    # ---- what a product keeps for the next one

    @property
    def kept(self) -> int:
        """Numbers of a token in `numbers`."""
        return self.size

    @property
    def numbers_workspace(self) -> int:
        """Numbers a token needs while `numbers` computes them."""
        return self.workspace

    def numbers(self, start: int, stop: int) -> Tensor:
        """The cores of some tokens in the form that `times` takes."""
        return self.dense(start, stop)

    def times(self, numbers: Tensor, matrices: Tensor) -> Tensor:
        """C_t M_t for matrices (t, q, n), with the `numbers` of the same tokens: (t, p, n)."""
        return numbers @ matrices

    def with_numbers(self, tokens: int) -> "Core":
        """The same cores as numbers, which can be sent to another process."""
        return DenseCore(self.dense(0, tokens), self.symmetric)

    @property
    def T(self) -> "Core":
        """The transposed cores."""
        return self if self.symmetric else _TransposedCore(self)


class DenseCore(Core):
    """Cores that are there already, (T, p, q)."""

    def __init__(self, values: Tensor, symmetric: bool = False) -> None:
        super().__init__((values.shape[1], values.shape[2]), 1, 0, symmetric)
        self._values = values

    def dense(self, start: int, stop: int) -> Tensor:
        """A slice of the values."""
        return self._values[start:stop]


class SumCore(Core):
    """The sum of cores over the same tokens."""

    def __init__(self, cores: Sequence[Core]) -> None:
        first = cores[0]
        symmetric = all(core.symmetric for core in cores)
        super().__init__(
            first.shape, max(core.period for core in cores), sum(core.workspace for core in cores), symmetric
        )
        self._cores = tuple(cores)

    def dense(self, start: int, stop: int) -> Tensor:
        """Sum of the cores."""
        total = self._cores[0].dense(start, stop)
        for core in self._cores[1:]:
            total = total + core.dense(start, stop)
        return total

    def diagonal(self, start: int, stop: int) -> Tensor:
        """Sum of the diagonals."""
        return torch.stack([core.diagonal(start, stop) for core in self._cores]).sum(0)

    def trace(self, start: int, stop: int) -> Tensor:
        """Sum of the traces."""
        return torch.stack([core.trace(start, stop) for core in self._cores]).sum(0)

    @property
    def diagonal_workspace(self) -> int:
        """Of the core that needs most, with the diagonals of the others."""
        return max(core.diagonal_workspace for core in self._cores) + len(self._cores) * self.shape[0]

    @property
    def trace_workspace(self) -> int:
        """Of the core that needs most."""
        return max(core.trace_workspace for core in self._cores)

    def token_form(self) -> TokenForm | None:
        """Sum of the inner matrices, when all share their features."""
        forms = [core.token_form() for core in self._cores]
        present = [form for form in forms if form is not None]
        if len(present) < len(forms) or any(
            form.left is not present[0].left or form.right is not present[0].right for form in present
        ):
            return None

        def inner(start: int, stop: int) -> Tensor:
            return torch.stack([form.inner(start, stop) for form in present]).sum(0)

        return TokenForm(present[0].left, present[0].right, inner, present[0].tokens)


class _TransposedCore(Core):
    def __init__(self, core: Core) -> None:
        super().__init__((core.shape[1], core.shape[0]), core.period, core.workspace)
        self._core = core

    def dense(self, start: int, stop: int) -> Tensor:
        return self._core.dense(start, stop).mT

    def diagonal(self, start: int, stop: int) -> Tensor:
        return self._core.diagonal(start, stop)

    def trace(self, start: int, stop: int) -> Tensor:
        return self._core.trace(start, stop)

    @property
    def diagonal_workspace(self) -> int:
        return self._core.diagonal_workspace

    @property
    def trace_workspace(self) -> int:
        return self._core.trace_workspace

    def token_form(self) -> TokenForm | None:
        form = self._core.token_form()
        return form and TokenForm(form.right, form.left, lambda start, stop: form.inner(start, stop).mT, form.tokens)

    def row_form(self) -> RowForm | None:
        form = self._core.row_form()
        outers = tuple((number, v, u) for number, u, v in form.outers) if form else ()
        return form and replace(form, left=form.right, right=form.left, outers=outers)

    @property
    def T(self) -> Core:
        return self._core


def inner_by_tokens_cost(x: Core, y: Core) -> int:
    """Multiplications of `inner_by_tokens`."""
    first, second = x.token_form(), y.token_form()
    if first is None or second is None:
        return _NEVER
    (n, f, p), (m, g, _), q = first.left.shape, second.left.shape, first.right.shape[2]
    pairs = n * (n + 1) // 2 if x is y else n * m
    return pairs * (f * g * (p + q) + first.tokens * f * g * (f + g) + first.tokens * second.tokens * g * g)


def inner_by_tokens_fits(x: Core, y: Core, itemsize: int, budget: int) -> bool:
    """Whether `inner_by_tokens` fits into the budget: E of all tokens, and of one group with all the others."""
    first, second = x.token_form(), y.token_form()
    assert first is not None and second is not None
    (groups, f, _), (others, g, _) = first.left.shape, second.left.shape
    kept = groups * first.tokens * f * f * (0 if x is y else 1) + others * second.tokens * g * g
    needed = itemsize * (_MIDDLES * kept + _CARRIED * others * first.tokens * g * max(f, g))
    fit = needed <= max(budget, checks.LEAST_CHUNK)
    checks.predict(needed if fit else 0)
    return fit


def inner_by_tokens(x: Core, y: Core, weights: Callable[[slice, slice], Tensor]) -> ScaledNumber:
    """sum_tu w_tu <C_t, C'_u> without cores: <C_t, C'_u> = <(f f'^T)^T E_t (g g'^T), E'_u> in the space of tokens."""
    first, second = x.token_form(), y.token_form()
    assert first is not None and second is not None
    (groups, f, _), (others, g, _) = first.left.shape, second.left.shape
    t, u = first.tokens, second.tokens
    inner, exponent = unit(second.inner(0, others * u))
    middles, other = (inner, exponent) if x is y else unit(first.inner(0, groups * t))
    middles, inner = middles.view(groups, t, f, f), inner.reshape(others, u, g * g)
    (ours, a), (theirs, b) = _unit_features(first), _unit_features(second)
    same_features = ours[0] is ours[1] and theirs[0] is theirs[1]
    total = 0.0
    for n in range(groups):
        later = slice(n if x is y else 0, None)  # <t, u> = <u, t>: of two groups each pair once
        right = theirs[1][later] @ ours[1][n].T  # (m, F', F)
        left = right if same_features else theirs[0][later] @ ours[0][n].T
        m = right.shape[0]
        half = right.view(m * g, f) @ middles[n].permute(2, 0, 1).reshape(f, t * f)  # (m F', t F)
        carried = half.view(m, g * t, f) @ left.mT  # (m, F' t, F')
        carried = carried.view(m, g, t, g).permute(0, 2, 3, 1).reshape(m, t, g * g)
        products = carried @ inner[later].mT  # (m, t, u)
        weight = weights(slice(n * t, (n + 1) * t), slice(later.start * u, None)).view(t, m, u).transpose(0, 1)
        if x is y:
            products[1:] *= 2
        total += float((weight * products).sum(dtype=torch.float64))
    return total, exponent + other + a + b


def _unit_features(form: TokenForm) -> tuple[tuple[Tensor, Tensor], int]:
    """Left and right features near one, and the exponent of their product."""
    left, first = unit(form.left)
    right, second = (left, first) if form.right is form.left else unit(form.right)
    return (left, right), first + second


def inner_by_rows_cost(x: Core, y: Core) -> int:
    """Multiplications of `inner_by_rows`."""
    first, second = x.row_form(), y.row_form()
    if first is None or second is None or (first.left is None) != (second.left is None):
        return _NEVER
    (n, t, f), (m, u, g) = first.diagonal.shape, second.diagonal.shape
    pairs = n * (n + 1) // 2 if x is y else n * m
    if first.left is None:
        return pairs * t * u * f
    a, b = len(first.vectors), len(second.vectors)
    return pairs * (f * g * (sum(x.shape) + u * (1 + 2 * b) + 2 * a * t) + t * u * (f + g + 2 * a * b * g))


def inner_by_rows(x: Core, y: Core, weights: Callable[[slice, slice], Tensor], budget: int, same: bool) -> ScaledNumber:
    """sum_tu w_tu <C_t, C'_u>, with <C_t, C'_u> = tr(E_t^T K E'_u K'^T), K = f f'^T and K' = g g'^T.

    Of two diagonals that is w^T (K o K') w', of a diagonal and an outer product w . (K u' o K' v'), and of two outer
    products (u . K u') (v . K' v'): products of matrices over tokens. `same`: both sums are one.
    """
    forms = x.row_form(), y.row_form()
    assert forms[0] is not None and forms[1] is not None
    (first, a), (second, b) = _unit_rows(forms[0]), _unit_rows(forms[1])
    (groups, t, _), (others, u, _) = first.diagonal.shape, second.diagonal.shape
    itemsize = first.diagonal.element_size()
    side = max(1, int((max(budget, checks.LEAST_CHUNK) / (_ROW_GRAMS * itemsize)) ** 0.5))
    checks.predict(_ROW_GRAMS * itemsize * min(side, t) * min(side, u))
    total = 0.0
    for n in range(groups):
        for m in range(n if same else 0, others):  # <t, u> = <u, t>: of two groups each pair once
            for last in range(0, u, side):
                columns = slice(last, min(last + side, u))
                carried = _Carried(first, second, n, m, columns)
                for start in range(0, t, side):
                    rows = slice(start, min(start + side, t))
                    weight = weights(_shifted(rows, n * t), _shifted(columns, m * u))
                    found = float((weight * carried.gram(first, n, rows)).sum(dtype=torch.float64))
                    total += 2 * found if same and m > n else found
    return total, a + b


class _Carried:
    """K E'_u K'^T for some tokens u of group m, for inner products with the tokens of group n."""

    def __init__(self, first: RowForm, second: RowForm, n: int, m: int, tokens: slice) -> None:
        self._diagonal, self._outers = second.diagonal[m, tokens].mT, second.outers
        self._grams: list[Tensor] = []
        for ours, theirs in ((first.left, second.left), (first.right, second.right)):
            if ours is not None and theirs is not None:
                self._grams.append(ours[n] @ theirs[m].mT)
            if first.left is first.right and second.left is second.right:
                break  # K' is K
        self._vectors = [[gram @ vector[m, tokens].mT for vector in second.vectors] for gram in self._grams]
        self._seen = self._diagonal
        if self._grams:
            self._seen = (self._grams[0] * self._grams[-1]) @ self._diagonal
            for number, u, v in second.outers:
                self._seen.addcmul_(self._vectors[0][u], self._vectors[-1][v], value=number)

    def gram(self, first: RowForm, n: int, rows: slice) -> Tensor:
        """<C_t, C'_u> for some tokens t of group n, (t, u)."""
        found = first.diagonal[n, rows] @ self._seen
        if not first.outers:
            return found
        vectors = [vector[n, rows] for vector in first.vectors]
        back = [[vector @ gram for vector in vectors] for gram in self._grams]
        pairs = [[[ours @ theirs for theirs in carried] for ours in vectors] for carried in self._vectors]
        seen = torch.zeros_like(back[0][0])
        for number, u, v in first.outers:
            seen.addcmul_(back[0][u], back[-1][v], value=number)
            for other, w, z in self._outers:
                found.addcmul_(pairs[0][u][w], pairs[-1][v][z], value=number * other)
        return found.addmm_(seen, self._diagonal)


def _unit_rows(form: RowForm) -> tuple[RowForm, int]:
    """The same cores, but for a power of two, with features near one; and its exponent."""
    if form.left is None or form.right is None:
        return form, form.exponent
    left, first = unit(form.left)
    right, second = (left, first) if form.right is form.left else unit(form.right)
    return replace(form, left=left, right=right), form.exponent + first + second


def _shifted(tokens: slice, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)
