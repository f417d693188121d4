"""The Jacobian of a weight, token by token, and the outer-product part of the Hessian that two of them make.

Every weight of every layer moves the output of token t by a vector times a matrix, J_t = z_t (x) A_t. With S the
Hessian of the loss at the output, the outer part of the block of two weights is

    sum_t z_t z'_t^T (x) A_t S_t A'_t^T        or, for a loss that mixes tokens,  sum_tu z_t z'_u^T (x) A_t S_tu A'_u^T
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.exact.attention.cores import Answered, Scores
from curvoscope.exact.attention.moments import Covariance, Response, rotated
from curvoscope.losses import Curvature, PairCurvature, Port, through
from curvoscope.losses.curvatures import ProjectedCurvature, seen_through
from curvoscope.operators.cores import Core, TokenForm
from curvoscope.operators.terms import Single, Term

TermList = list[Term | Single]

_KEPT_NUMBERS = 2**23


@dataclass(frozen=True)
class Factor:
    """J_t = z_t (x) A_t: a weight (a, p) moves the output (m) of token t by z_t[a] A_t[p, m].

    `vectors` z (T, ·) belong to the weight's `axis`. On the other axis, A_t = diag(s_t) M_t^T P: `port` P is a matrix
    (·, m) for all tokens, one for each (T, ·, m), or columns of the output; `scales` s (T, ·); `response` M_t of
    attention. One that is missing is the identity, or a vector of ones.
    """

    vectors: Tensor
    port: Port = None
    scales: Tensor | None = None
    response: Response | None = None
    axis: int = 0

    def width(self, output: int) -> int:
        """The number of rows of A, for an output of width m."""
        if self.response is not None:
            return self.response.feature.width
        return through(self.vectors.new_empty(1, output), self.port).shape[-1]

    def at_output(self, output: int) -> "Factor":
        """The same with a tensor for the port, or None, and no response."""
        port = self.port
        if isinstance(port, slice):
            port = torch.eye(output, dtype=self.vectors.dtype, device=self.vectors.device)[port]
        if self.response is not None:
            matrix = self.response.turned().mT
            port = matrix if port is None else matrix @ port
        return Factor(self.vectors, port, self.scales, None, self.axis)

    def cut(self, start: int, stop: int) -> "Factor":
        """The same for tokens start to stop."""
        port = self.port
        if isinstance(port, Tensor) and port.ndim == 3:
            port = port[start:stop]
        scales = None if self.scales is None else self.scales[start:stop]
        return Factor(self.vectors[start:stop], port, scales, None, self.axis)

    def times(self, right: Tensor) -> Tensor:
        """A_t B_t for B (T, m, q), of a factor `at_output`."""
        found = self.port @ right if isinstance(self.port, Tensor) else right
        return found if self.scales is None else self.scales[:, :, None] * found

    def times_transposed(self, left: Tensor) -> Tensor:
        """B_t A_t^T for B (T, q, m), of a factor `at_output`."""
        found = through(left, self.port)
        return found if self.scales is None else found * self.scales[:, None, :]

    def jacobian(self, output: int, name: str) -> Tensor:
        """dF/dW as a dense matrix: J[tm, ap] = z_t[a] A_t[p, m], for a vector on axis 0."""
        rows, columns = len(self.vectors) * output, self.vectors.shape[1] * self.width(output)
        fits_jacobian(rows, columns, name, self.vectors)
        identity = torch.eye(output, dtype=self.vectors.dtype, device=self.vectors.device)
        matrix = self.at_output(output).times(identity.expand(len(self.vectors), -1, -1))
        return torch.einsum("ta,tpm->tmap", self.vectors, matrix).reshape(rows, columns)

    def joined(self, other: "Factor") -> Term:
        """sum_t z_t z'_t^T (x) A_t A'_t^T, both `at_output` and the second with a matrix for each token."""
        return Term(self.vectors, other.vectors, _Joined(self, other), (self.axis, other.axis))


class Pairing:
    """J^T S J for pairs of factors, with S the `curvature` at an output of width m in sequences of `period` tokens."""

    def __init__(self, curvature: Curvature, output: int, period: int) -> None:
        self._curvature, self._output, self._period = curvature, output, period
        self._scaled: dict[tuple[int, int, int, int], tuple[Factor, Factor, Core]] = {}

    def __call__(self, left: Factor, right: Factor) -> TermList:
        """sum_t z_t z'_t^T (x) A_t S_t A'_t^T."""
        axes = (left.axis, right.axis)
        if isinstance(self._curvature, PairCurvature):
            return [self._over_pairs(left, right, self._curvature.blocks)]
        seen = self._seen(left, right)
        if seen.shared is not None and not bool(seen.shared.any()):
            return []  # such as two heads that fill different columns of the output
        vectors = left.vectors
        core: Core
        if left.response is not None and right.response is not None:
            core = Scores(left.response, seen, right.response)
        elif right.response is not None and seen.factor is not None:
            core = Covariance(right.response.rows, right.response.value, right.response.feature)
            vectors = seen.factor * left.vectors
        elif left.response is not None and seen.factor is not None:
            core = Covariance(left.response.rows, left.response.feature, left.response.value)
            vectors = seen.factor * left.vectors
        elif right.response is not None:
            core = Answered(seen, right.response)
        elif left.response is not None:
            core = Answered(self._seen(right, left), left.response).T
        elif left.scales is not None or right.scales is not None:
            core = self._scaled_core(left, seen, right)
        elif seen.shared is None:
            core = ProjectedCore(seen, None, None, self._period, len(left.vectors))
        else:
            outer, inner, same = left.vectors.T @ right.vectors, seen.shared, left is right
            if same:
                outer, inner = (outer + outer.T) / 2, (inner + inner.T) / 2
            return [Single(outer, inner, axes, symmetric=same)]
        return [Term(vectors, right.vectors, rotated(core, left.response, right.response), axes)]

    def _seen(self, left: Factor, right: Factor) -> ProjectedCurvature:
        return seen_through(self._curvature, left.port, right.port, self._output, left.vectors)

    def _scaled_core(self, left: Factor, seen: ProjectedCurvature, right: Factor) -> Core:
        """The core of two factors, kept because a weight and its bias have the same A."""
        key = (id(left.scales), id(right.scales), id(left.port), id(right.port))
        if key not in self._scaled:  # the factors keep their ids from reuse
            core = ProjectedCore(seen, left.scales, right.scales, self._period, len(left.vectors))
            self._scaled[key] = left, right, core
        return self._scaled[key][2]

    def _over_pairs(self, left: Factor, right: Factor, blocks: Tensor) -> Term:
        """The sum over pairs (t, u) of tokens of a group, for S as `blocks` (groups, g, m, g, m)."""
        groups, size = blocks.shape[:2]
        p, q = left.width(self._output), right.width(self._output)
        vectors = left.vectors.shape[1] + right.vectors.shape[1]
        checks.fits(
            groups * size * size * (2 * p * q + vectors) * blocks.element_size(),
            None,
            "a block of a loss that mixes tokens",
            "use fewer tokens, or products with @ of the whole matrix",
        )
        blocks = through(blocks, right.port)  # (groups, g, m, g, e')
        blocks = through(blocks.movedim(2, -1), left.port).movedim(-1, 2)
        if right.response is not None:
            matrix = right.response.turned().unflatten(0, (groups, size))
            blocks = torch.einsum("gteuf,gufq->gteuq", blocks, matrix)
        if left.response is not None:
            matrix = left.response.turned().unflatten(0, (groups, size))
            blocks = torch.einsum("gtep,gteuq->gtpuq", matrix, blocks)
        if left.scales is not None:
            blocks = blocks * left.scales.view(groups, size, p, 1, 1)
        if right.scales is not None:
            blocks = blocks * right.scales.view(groups, 1, 1, size, q)
        return Term.over_pairs(left.vectors, right.vectors, blocks, (left.axis, right.axis))


class ProjectedCore(Core):
    """C_t = diag(s_t) P S_t P'^T diag(s'_t): the loss Hessian through two ports, each behind an elementwise map.

    `left` s (T, p) and `right` s' (T, q); None is a vector of ones.
    """

    def __init__(
        self, seen: ProjectedCurvature, left: Tensor | None, right: Tensor | None, period: int, tokens: int
    ) -> None:
        super().__init__(seen.shape, period, seen.workspace, seen.symmetric and left is right)
        self._seen, self._left, self._right, self._tokens = seen, left, right, tokens
        self._last: tuple[int, int, Tensor] | None = None

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, p, q). Small ones with scales are kept: a weight and its bias share them."""
        if self._left is None and self._right is None:
            return self._seen.blocks(start, stop)
        if self._last is not None and self._last[:2] == (start, stop):
            return self._last[2]
        blocks = self._seen.blocks(start, stop)
        if self._left is not None:
            blocks = self._left[start:stop, :, None] * blocks
        blocks = blocks if self._right is None else blocks * self._right[start:stop, None, :]
        self._last = (start, stop, blocks) if blocks.numel() <= _KEPT_NUMBERS else None
        return blocks

    def diagonal(self, start: int, stop: int) -> Tensor:
        """(t, p), without forming the blocks if both ports are the same."""
        if self._seen.diagonal is None:
            return super().diagonal(start, stop)
        values = self._seen.diagonal(start, stop)
        for scales in (self._left, self._right):
            values = values if scales is None else values * scales[start:stop]
        return values

    def token_form(self) -> TokenForm | None:
        """B^T E_t B' over the words, if they are few and nothing is scaled."""
        if self._seen.words is None or self._left is not None or self._right is not None:
            return None
        left, right, covariance = self._seen.words
        features = left[None]
        return TokenForm(features, features if right is left else right[None], covariance, self._tokens)


class _Joined(Core):
    """C_t = A_t A'_t^T for a factor and one with a matrix A' (T, q, m) for each token."""

    def __init__(self, left: Factor, right: Factor) -> None:
        assert isinstance(right.port, Tensor) and right.port.ndim == 3
        self._left, self._right = left, right.port.mT
        shape = (left.width(self._right.shape[1]), self._right.shape[2])
        super().__init__(shape, 1, 2 * shape[0] * shape[1])

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, p, q)."""
        if stop - start == len(self._right):
            return self._left.times(self._right)
        return self._left.cut(start, stop).times(self._right[start:stop])


def fits_jacobian(rows: int, columns: int, name: str, like: Tensor) -> None:
    """Raise if a dense Jacobian exceeds the memory limit."""
    what = f"the Jacobian in {name}, {rows} x {columns}"
    checks.fits(rows * columns * like.element_size(), None, what, "use fewer tokens, or products of the Hessian")


def fits_jacobians(output: Tensor, sizes: Mapping[str, int]) -> None:
    """Raise if the Jacobians of an output in all named weights together exceed the memory limit."""
    fits_jacobian(output.numel(), sum(sizes.values()), ", ".join(sizes), output)
