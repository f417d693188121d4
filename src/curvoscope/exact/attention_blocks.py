"""The terms of attention's Hessian blocks: which vectors and which cores each pair of weights has.

Theorems 3.1 and 3.2 of the paper with the key blocks, for any loss, in index form. A weight of head h moves the
output of token i by z_i (x) M_i (see attention_cores), which gives every outer block; the functional part pairs two
weights of the same head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.exact.attention_cores import Answered, Response, Rotated, Scores
from curvoscope.exact.attention_layer import AttentionLayer, Pass
from curvoscope.exact.moments import Covariance, Feature, Rows, Third
from curvoscope.exact.ports import Plain, ProjectedCurvature, seen_through
from curvoscope.losses import LossAt, PairCurvature, Port, through
from curvoscope.operators.base import Shape
from curvoscope.operators.block_matrix import Slot
from curvoscope.operators.cores import Core
from curvoscope.operators.terms import Single, Term

Terms = list[Term | Single]


@dataclass(frozen=True)
class Weight:
    """One head's part of a weight: its role, whether it is a bias, its shape and place, and the heads that use it.

    Roles: Q, K, V, O, and M for the matrix W_Q W_K^T of the scores.
    """

    role: str
    bias: bool
    shape: Shape
    slot: Slot
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Factor:
    """J_i = z_i (x) M_i: vectors z (T, a) on `axis`, M_i = Cov_i[V, f] or (None) the identity, and the port."""

    vector: Tensor
    axis: int
    response: Response | None
    port: Port


def weights_of(layer: AttentionLayer, name: str, shape: Shape) -> list[Weight]:
    """The parts of a weight that single heads, or groups of heads, use."""
    bias, role = name.startswith("b_"), name.removeprefix("b_")[0]
    share = layer.heads // layer.kv_heads
    groups: dict[str, list[tuple[int, ...]]] = {
        "Q": [(head,) for head in range(layer.heads)],
        "K": [tuple(range(g * share, (g + 1) * share)) for g in range(layer.kv_heads)],
        "O": [tuple(range(layer.heads))] if bias else [(head,) for head in range(layer.heads)],
    }
    heads = groups["K" if role == "V" else role]
    axis = 0 if role == "O" and not bias else 1
    width = shape[axis] // len(heads)
    part = (width, shape[1]) if axis == 0 else (shape[0], width)
    return [Weight(role, bias, part, Slot(axis, i * width, (i + 1) * width), used) for i, used in enumerate(heads)]


class AttentionBlocks:
    """Makes the terms of any pair of weights from one forward pass and the loss at its output."""

    def __init__(self, layer: AttentionLayer, passed: Pass, loss: LossAt) -> None:
        self._layer, self._passed, self._loss = layer, passed, loss
        self._heads: dict[int, _Head] = {}
        self._factors: dict[tuple[str, bool, int], Factor] = {}
        self._scaled: dict[bool, Tensor] = {}

    # ---- outer part

    def outer(self, left: Weight, right: Weight) -> Terms:
        """J^T S J: over all pairs of heads that use the two weights."""
        pairs = [(h, g) for h in self._users(left) for g in self._users(right)]
        return [
            term
            for h, g in pairs
            if self._moves(left) and self._moves(right)
            for term in self._outer_term(self._factor(left, h), self._factor(right, g), left, right)
        ]

    def _outer_term(self, left: Factor, right: Factor, row: Weight, column: Weight) -> Terms:
        axes = (left.axis, right.axis)
        curvature = self._loss.curvature
        if isinstance(curvature, PairCurvature):
            return [self._pair_term(left, right, row, column, curvature)]
        seen = self._seen(left.port, right.port)
        if seen.shared is not None and not bool(seen.shared.any()):
            return []  # two heads that fill different columns of the output
        if left.response is None and right.response is None and seen.shared is not None:
            outer, inner, same = left.vector.T @ right.vector, seen.shared, left is right
            if same:
                outer, inner = (outer + outer.T) / 2, (inner + inner.T) / 2
            return [Single(outer, inner, axes, symmetric=same)]
        core: Core
        if left.response is not None and right.response is not None:
            core = Scores(left.response, seen, right.response)
        elif right.response is not None and seen.factor is not None:
            response = right.response
            core = Covariance(response.rows, response.value, response.feature)
            scaled = seen.factor * left.vector
            return [Term(scaled, right.vector, self._turned(core, row, column), axes)]
        elif right.response is not None:
            core = Answered(seen, right.response)
        elif left.response is not None:
            core = Answered(self._seen(right.port, left.port), left.response).T
        else:
            core = Plain(seen, self._passed.X.shape[1], left.vector.shape[0])
        return [Term(left.vector, right.vector, self._turned(core, row, column), axes)]

    def _pair_term(self, left: Factor, right: Factor, row: Weight, column: Weight, curvature: PairCurvature) -> Term:
        """A loss that mixes tokens: the sum runs over pairs (t, u) of a group, with cores M_t^T S_tu M'_u."""
        blocks = through(curvature.blocks, right.port)  # (groups, g, m, g, e')
        blocks = through(blocks.movedim(2, -1), left.port).movedim(-1, 2)
        groups, size, e, _, f = blocks.shape
        p = e if left.response is None else left.response.feature.width
        q = f if right.response is None else right.response.feature.width
        checks.fits(
            groups * size * size * p * q * blocks.element_size(),
            None,
            "a block of a loss that mixes tokens",
            "use fewer tokens, or products with @",
        )
        if right.response is not None:
            matrix = self._dense_response(right.response, column).view(groups, size, f, q)
            blocks = torch.einsum("gteuf,gufq->gteuq", blocks, matrix)
        if left.response is not None:
            matrix = self._dense_response(left.response, row).view(groups, size, e, p)
            blocks = torch.einsum("gtep,gteuq->gtpuq", matrix, blocks)
        return Term.over_pairs(left.vector, right.vector, blocks, (left.axis, right.axis))

    def _dense_response(self, response: Response, weight: Weight) -> Tensor:
        matrix = response.matrix(0, self._passed.X.shape[0] * self._passed.X.shape[1])
        if weight.role == "Q" and self._layer.rotary is not None:
            positions = torch.arange(matrix.shape[0], device=matrix.device) % self._passed.X.shape[1]
            matrix = self._layer.rotary.turn(matrix, positions[:, None], back=True)
        return matrix

    def reaches(self, weight: Weight) -> list[tuple[Tensor, int, Tensor | None]]:
        """J_i = z_i (x) A_i for each head that uses the weight: z (T, a), its axis, and A at the output: (T, p, m), or
        (p, m) for all tokens, or None for the identity."""
        if not self._moves(weight):
            return []
        found = []
        for h in self._users(weight):
            factor = self._factor(weight, h)
            port = factor.port
            if isinstance(port, slice):
                port = torch.eye(self._layer.d_out, dtype=self._passed.X.dtype, device=self._passed.X.device)[port]
            matrix = port
            if factor.response is not None:
                matrix = self._dense_response(factor.response, weight).mT
                matrix = matrix if port is None else matrix @ port
            found.append((factor.vector, factor.axis, matrix))
        return found

    # ---- functional part

    def functional(self, left: Weight, right: Weight) -> Terms:
        """The Hessian of <G, F> at fixed G: over the heads that use both weights."""
        return [
            *self.functional_at_scores(left, right),
            *self.t_functional(left, right),
            *self._bilinear(left, right),
        ]

    def functional_at_scores(self, left: Weight, right: Weight) -> Terms:
        """s^2 sum_i z_i z'_i (x) the third attention moment: query and key weights; zero without a softmax."""
        if {left.role, right.role} - {"Q", "K", "M"} or not (self._moves(left) and self._moves(right)):
            return []
        terms: Terms = []
        for h in self._shared_heads(left, right):
            head, first, second = self._head(h), self._factor(left, h), self._factor(right, h)
            if head.rows.softmax:
                assert first.response is not None and second.response is not None
                core: Core = Third(head.rows, head.P, first.response.feature, second.response.feature)
                core = self._turned(core, left, right)
                terms.append(Term(first.vector, second.vector, core, (first.axis, second.axis)))
        return terms

    def t_functional(self, left: Weight, right: Weight) -> Terms:
        """s B (x) I with B = X^T P X (or a bias row of it): a query with a key weight."""
        if (left.role, right.role) == ("K", "Q"):
            return [term.T for term in self.t_functional(right, left)]
        if (left.role, right.role) != ("Q", "K") or not self._moves(right):
            return []
        identity = torch.eye(self._layer.d_k, dtype=self._passed.X.dtype, device=self._passed.X.device)
        return [
            Single(self.score_gradient(h, left.bias, right.bias), identity) for h in self._shared_heads(left, right)
        ]

    def score_gradient(self, h: int, query_bias: bool, key_bias: bool) -> Tensor:
        """s B of head h: s sum_n f_n^T P_n g_n with f, g the inputs, or 1 for a bias."""
        P = self._head(h).P
        return self._layer.scale * (self._input(query_bias).mT @ P @ self._input(key_bias)).sum(0)

    def _bilinear(self, left: Weight, right: Weight) -> Terms:
        """The output is bilinear in values and attention, and in values and W_O."""
        order = "OVQKM"
        if order.index(left.role) > order.index(right.role):
            return [term.T for term in self._bilinear(right, left)]
        if left.role == right.role or left.role not in "OV" or (left.role == "O" and left.bias):
            return []
        pair = self._output_with_value if right.role == "V" else self._output_with_score
        return [term for h in self._shared_heads(left, right) for term in pair(left, right, h)]

    def _output_with_value(self, left: Weight, right: Weight, h: int) -> Terms:
        """delta_ef (M1^T G)[b, m]: W_O with a value weight."""
        outer = self._gradient_tokens().T @ self._factor(right, h).vector
        return [Single(outer, torch.eye(left.shape[0], dtype=outer.dtype, device=outer.device), (1, 0))]

    def _output_with_score(self, left: Weight, right: Weight, h: int) -> Terms:
        """s sum_i g_i z_i (x) Cov_i[f, .]: W_O (f the values) or a value weight (f the inputs) with a query or key."""
        head = self._head(h)
        if not self._moves(right) or (left.bias and head.rows.softmax):
            return []  # a covariance with a constant
        second = self._factor(right, h)
        assert second.response is not None
        vector, feature = head.gradient, head.input_feature(left.bias)
        if left.role == "O":
            vector, feature = self._gradient_tokens(), second.response.value
        core = self._turned(Covariance(head.rows, feature, second.response.feature), left, right)
        return [Term(vector, second.vector, core, (1, second.axis))]

    # ---- pieces

    def _moves(self, weight: Weight) -> bool:
        """Softmax ignores what a key bias adds to a row of scores: its blocks are zero."""
        return not (weight.role == "K" and weight.bias and self._passed.open_keys is None)

    def _users(self, weight: Weight) -> tuple[int, ...]:
        return weight.heads[:1] if weight.role == "O" and weight.bias else weight.heads

    def _shared_heads(self, left: Weight, right: Weight) -> list[int]:
        return [h for h in left.heads if h in right.heads]

    def _factor(self, weight: Weight, h: int) -> Factor:
        key = (weight.role, weight.bias, h)
        if key not in self._factors:
            self._factors[key] = self._make_factor(weight, h)
        return self._factors[key]

    def _make_factor(self, weight: Weight, h: int) -> Factor:
        head, port = self._head(h), self._layer.port(h)
        if weight.role in "QM":
            if weight.bias not in self._scaled:
                self._scaled[weight.bias] = self._layer.scale * self._input(weight.bias).flatten(0, 1)
            feature = head.key if weight.role == "Q" else head.input_feature(False)
            return Factor(self._scaled[weight.bias], 0, head.response(feature), port)
        if weight.role == "K":
            return Factor(head.scaled_query, 1, head.response(head.input_feature(weight.bias)), port)
        if weight.role == "V":
            return Factor((head.rows.A @ self._input(weight.bias)).flatten(0, 1), 0, None, port)
        if weight.bias:
            return Factor(self._input(True).flatten(0, 1), 0, None, None)
        return Factor(self._passed.head_output[:, h].flatten(0, 1), 0, None, None)

    def _input(self, bias: bool) -> Tensor:
        X = self._passed.X
        return X.new_ones(*X.shape[:2], 1) if bias else X

    def _gradient_tokens(self) -> Tensor:
        return self._loss.gradient.flatten(0, 1)

    def _head(self, h: int) -> "_Head":
        if h not in self._heads:
            self._heads[h] = _Head(self._layer, self._passed, self._loss, h)
        return self._heads[h]

    def _seen(self, left: Port, right: Port) -> ProjectedCurvature:
        return seen_through(self._loss.curvature, left, right, self._layer.d_out, self._passed.X)

    def _turned(self, core: Core, row: Weight, column: Weight) -> Core:
        rotary = self._layer.rotary
        if rotary is None or "Q" not in (row.role, column.role):
            return core
        return Rotated(
            core,
            lambda vectors, positions: rotary.turn(vectors, positions, back=True),
            row.role == "Q",
            column.role == "Q",
        )


class _Head:
    """One head's row statistics and features."""

    def __init__(self, layer: AttentionLayer, passed: Pass, loss: LossAt, h: int) -> None:
        group = h // (layer.heads // layer.kv_heads)
        open_keys = passed.open_keys
        if open_keys is not None:
            open_keys = open_keys.expand(-1, layer.heads, -1, -1)[:, h]
        self.rows = Rows(passed.A[:, h], open_keys)
        value = passed.value[:, group]
        self._inputs = {False: passed.X, True: passed.X.new_ones(*passed.X.shape[:2], 1)}
        self._features: dict[bool, Feature] = {}
        columns = slice(group * layer.d_v, (group + 1) * layer.d_v)
        self.value = self.rows.feature(value, (self.input_feature(False), layer.W_V[:, columns]))
        self.key = self.rows.feature(passed.key[:, group])
        gradient = through(loss.gradient, layer.port(h))
        self.gradient = gradient.flatten(0, 1)
        self.P = self.rows.derivative(gradient @ value.mT)
        self.scaled_query = layer.scale * passed.query[:, h].flatten(0, 1)

    def input_feature(self, bias: bool) -> Feature:
        """The inputs, or 1 for a bias, as features of the keys."""
        if bias not in self._features:
            self._features[bias] = self.rows.feature(self._inputs[bias])
        return self._features[bias]

    def response(self, feature: Feature) -> Response:
        """How the head's output answers to scores along the feature."""
        return Response(self.rows, self.value, feature)


TermsOf = Callable[[Weight, Weight], Terms]
