"""The cores of attention's outer-product blocks.

Every weight of the layer moves the output of token i by a vector times a matrix, J_i = z_i (x) M_i, with

    M_i = Cov_i[V, f]      query, key (f the keys, the inputs)      M_i = I      value, output

in the space of the port through which the weight reaches the output: the head's e values, or the output itself. So
all outer blocks have the core M_i^T S_i M'_i, with S_i seen through the two ports.
"""

from torch import Tensor

from curvoscope.exact.attention.moments import Response, Rows
from curvoscope.losses.curvatures import ProjectedCurvature
from curvoscope.operators.cores import Core, TokenForm

_SHARP_NUMBERS = 2**22  # entries of the Gram matrices that are taken about single keys at a time


class Answered(Core):
    """C_i = S_i Cov_i[V, f]: a value or output weight with a query or key weight; `turned`: its transpose."""

    def __init__(self, seen: ProjectedCurvature, right: Response, turned: bool = False) -> None:
        shape = (seen.shape[0], right.feature.width)
        workspace = seen.workspace + right.workspace + shape[0] * shape[1]
        super().__init__((shape[1], shape[0]) if turned else shape, right.rows.length, workspace)
        self._seen, self._right, self._turned = seen, right, turned

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, e, q), or (t, q, e)."""
        matrix = self._right.matrix(start, stop)
        if self._turned and self._seen.factor is None:
            return matrix.mT @ self._seen.blocks(start, stop).mT
        values = self._seen.times(matrix, start, stop)
        return values.mT if self._turned else values

    @property
    def T(self) -> Core:
        """The transposed cores, computed as such."""
        return Answered(self._seen, self._right, not self._turned)

    def token_form(self) -> TokenForm | None:
        """(V S^T)^T D_i f, where S is the same for all tokens."""
        if self._seen.shared is None:
            return None
        values, features = self._right.value.values @ self._seen.shared.mT, self._right.feature.values
        left, right = (features, values) if self._turned else (values, features)
        return TokenForm(left, right, self._right.rows.inner_derivative, self._right.rows.length)


class Scores(Core):
    """C_i = Cov_i[V, f]^T S_i Cov_i[V', g]: two query or key weights."""

    def __init__(self, left: Response, seen: ProjectedCurvature, right: Response) -> None:
        shape = (left.feature.width, right.feature.width)
        same = left.rows is right.rows and left.feature is right.feature
        (p, q), length = shape, left.rows.length
        self._left, self._seen, self._right, self._same = left, seen, right, same
        matrices = left.workspace + (0 if same else right.workspace)
        inside = 3 * length * length + length * q if self._by_tokens(shape) else matrices + p * q
        super().__init__(shape, length, seen.workspace + inside + p * q, seen.symmetric and same)

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, p, q), through the features or, if that is cheaper, through the tokens."""
        length = self._left.rows.length
        if self._by_tokens(self.shape) and start % length == 0 and stop % length == 0:
            form = self.token_form()
            n, last = start // length, stop // length
            inner = form.inner(start, stop).view(last - n, length, length, length)
            return (form.left[n:last].mT[:, None] @ (inner @ form.right[n:last, None])).flatten(0, 1)
        left, right = self._matrices(start, stop)
        if self._seen.factor is not None:
            return (left.mT @ right).mul_(self._seen.factor)
        return left.mT @ (self._seen.blocks(start, stop) @ right)

    def _by_tokens(self, shape: tuple[int, int]) -> bool:
        """Whether the way through the tokens is cheaper."""
        (e, f), (p, q), length = self._seen.shape, shape, self._left.rows.length
        by_features = length * (e * p + (0 if self._same else f * q)) + e * f * q + e * p * q
        return length * e * f + length * length * (f + 3 + q) + length * p * q < by_features

    @property
    def diagonal_workspace(self) -> int:
        """The matrices, and their product with S."""
        return self._seen.workspace + self._left.workspace + (0 if self._same else self._right.workspace)

    @property
    def trace_workspace(self) -> int:
        """A few rows of the Gram matrices, if the trace needs no more."""
        return 8 * self._left.rows.length if self._has_kernel else self.diagonal_workspace

    @property
    def _has_kernel(self) -> bool:
        rows = self._left.rows
        return self._seen.shared is not None and self._same and rows.softmax and rows is self._right.rows

    def diagonal(self, start: int, stop: int) -> Tensor:
        """sum_e M[e, p] (S M')[e, p], (t, p)."""
        left, right = self._matrices(start, stop)
        return (left * self._seen.times(right, start, stop)).sum(1)

    def trace(self, start: int, stop: int) -> Tensor:
        """tr C_i. With one S for all tokens, a kernel identity without feature dimensions:

        <Cov_i[V, f], S Cov_i[V, f]> = sum_jl A_ij A_il of the doubly centred Gram matrices of V S V^T and f f^T.
        """
        rows, shared = self._left.rows, self._seen.shared
        if shared is None or not self._has_kernel:
            return super().trace(start, stop)
        n, last = start // rows.length, -(-stop // rows.length)
        values, features = self._left.value.values[n:last], self._left.feature.values[n:last]
        kernel, other = values @ shared @ self._right.value.values[n:last].mT, features @ features.mT
        found = _centred_sum(rows.A[n:last], kernel, other).flatten()
        for at in rows.sharp(start, stop).split(max(1, _SHARP_NUMBERS // rows.length**2)):
            place = at - n * rows.length
            a, sequence, top = rows.A.flatten(0, 1)[at], place // rows.length, rows.tops(0, rows.tokens)[at]
            shifted = (_about_tops(gram[sequence], top, top) for gram in (kernel, other))
            found[place] = _centred_sum(a[:, None], *shifted)[:, 0]
        return found[start - n * rows.length : stop - n * rows.length]

    def token_form(self) -> TokenForm:
        """f^T (D_i V S_i V'^T D'_i) g."""
        return TokenForm(self._left.feature.values, self._right.feature.values, self._inner, self._left.rows.length)

    def _inner(self, start: int, stop: int) -> Tensor:
        """D_i (V S_i V'^T) D'_i, (t, L, L)."""
        left, right, length = self._left.rows, self._right.rows, self._left.rows.length
        n, last = start // length, -(-stop // length)
        skip = slice(start - n * length, stop - n * length)
        values, others = self._left.value.values[n:last], self._right.value.values[n:last]
        kernel = self._seen.kernel(values, others, n * length, last * length)
        kernel = kernel.expand(last - n, length, length, length).flatten(0, 1)[skip]
        a, b = (_row_weights(rows)[n:last].flatten(0, 1)[skip] for rows in (left, right))
        if left.softmax:
            if len(left.sharp(start, stop)) or len(right.sharp(start, stop)):
                kernel = _about_tops(kernel, left.tops(start, stop), right.tops(start, stop))
            kernel_b = (kernel @ b[:, :, None])[..., 0]
            a_kernel = (a[:, None, :] @ kernel)[:, 0]
            constant = (a * kernel_b).sum(1)
            kernel = kernel - kernel_b[:, :, None] - a_kernel[:, None, :] + constant[:, None, None]
        return a[:, :, None] * kernel * b[:, None, :]

    def _matrices(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        left = self._left.matrix(start, stop)
        return left, left if self._same else self._right.matrix(start, stop)


def _centred_sum(A: Tensor, kernel: Tensor, other: Tensor) -> Tensor:
    """sum_jl a_j a_l K_jl O_jl for the rows a of A (n, r, L), both Gram matrices (n, L, L) centred by a: (n, r)."""
    first, second = A @ kernel, A @ other
    found = (A * (A @ (kernel * other))).sum(-1) - 2 * (A * first * second).sum(-1)
    return found + (A * first).sum(-1) * (A * second).sum(-1)


def _about_tops(kernel: Tensor, top: Tensor, other: Tensor) -> Tensor:
    """v_j S v'_l (t, L, L) as (v_j - v_top) S (v'_l - v'_other), for the keys of largest weight `top` and `other`
    (t, 1): their row and their column are zero to the bit."""
    length = kernel.shape[-1]
    kernel = kernel - kernel.gather(1, top[:, :, None].expand(-1, 1, length))
    return kernel - kernel.gather(2, other[:, :, None].expand(-1, length, 1))


def _row_weights(rows: Rows) -> Tensor:
    """The weights that D_i puts on the keys: a_i with a softmax, the mask without."""
    return rows.A if rows.open_keys is None else rows.open_keys.expand_as(rows.A)
