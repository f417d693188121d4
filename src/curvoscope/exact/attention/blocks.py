"""The terms of attention's Hessian blocks: which vectors and which cores each pair of weights has.

Theorems 3.1 and 3.2 of the paper with the key blocks, for any loss, in index form. A weight of head h moves the
output of token i by z_i (x) M_i (see cores), which gives every outer block; the functional part pairs two
weights of the same head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvoscope.exact.assembly import WeightPart
from curvoscope.exact.attention.layer import AttentionLayer, Pass, ProjectionMap
from curvoscope.exact.attention.moments import Covariance, Feature, Response, Rows, Third, rotated
from curvoscope.exact.attention.query_key_norm import HeadMap
from curvoscope.exact.attention.rotary_keys import KeySequence, RotaryKeys
from curvoscope.exact.factor import Factor, Pairing, TermList
from curvoscope.losses import LossAt, through
from curvoscope.operators.base import Shape
from curvoscope.operators.block_matrix import Slot
from curvoscope.operators.cores import DenseCore
from curvoscope.operators.terms import Single, Term


@dataclass(frozen=True)
class HeadWeight(WeightPart):
    """One head's part of a weight: also its role, whether it is a bias, and the heads that use it.

    Roles: Q, K, V, O, and M for the matrix W_Q W_K^T of the scores.
    """

    role: str
    bias: bool
    heads: tuple[int, ...]


def weights_of(layer: AttentionLayer, name: str, shape: Shape) -> list[HeadWeight]:
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
    return [HeadWeight(part, Slot(axis, i * width, (i + 1) * width), role, bias, used) for i, used in enumerate(heads)]


class AttentionBlocks:
    """Makes the terms of any pair of weights from one forward pass and the loss at its output."""

    def __init__(self, layer: AttentionLayer, passed: Pass, loss: LossAt) -> None:
        self._layer, self._passed, self._loss = layer, passed, loss
        self._paired = Pairing(loss.curvature, layer.d_out, passed.X.shape[1])
        self._heads: dict[int, _Head] = {}
        self._factors: dict[tuple[str, bool, int], Factor] = {}
        self._scaled: dict[bool, Tensor] = {}
        self._mapped: dict[int, HeadMap | None] = {}

    # ---- outer part

    def outer(self, left: HeadWeight, right: HeadWeight) -> TermList:
        """J^T S J: over all pairs of heads that use the two weights."""
        rows, columns = self.factors(left), self.factors(right)
        return [term for row in rows for column in columns for term in self._paired(row, column)]

    def factors(self, weight: HeadWeight) -> list[Factor]:
        """J_i = z_i (x) A_i for each head that uses the weight; none if the output does not see it."""
        return [self._factor(weight, h) for h in self._users(weight)] if self._moves(weight) else []

    # ---- functional part

    def functional(self, left: HeadWeight, right: HeadWeight) -> TermList:
        """The Hessian of <G, F> at fixed G: over the heads that use both weights."""
        return [
            *self.functional_at_scores(left, right),
            *self._functional_at_norm(left, right),
            *self.t_functional(left, right),
            *self._bilinear(left, right),
        ]

    def functional_at_scores(self, left: HeadWeight, right: HeadWeight) -> TermList:
        """s^2 sum_i z_i z'_i (x) the third attention moment: query and key weights; zero without a softmax."""
        if {left.role, right.role} - {"Q", "K", "M"} or not (self._moves(left) and self._moves(right)):
            return []
        terms: TermList = []
        for h in self._shared_heads(left, right):
            head, first, second = self._head(h), self._factor(left, h), self._factor(right, h)
            if head.rows.softmax:
                assert first.response is not None and second.response is not None
                core = Third(head.rows, head.P, first.response.feature, second.response.feature)
                turned = rotated(core, first.response, second.response)
                terms.append(Term(first.vectors, second.vectors, turned, (first.axis, second.axis)))
        return terms

    def _functional_at_norm(self, left: HeadWeight, right: HeadWeight) -> TermList:
        """sum_i f_i f'_i^T (x) the second derivative of the norm of the queries, f the inputs or 1 for a bias."""
        terms: TermList = []
        for h in self._shared_heads(left, right) if (left.role, right.role) == ("Q", "Q") else ():
            head, mapped = self._head(h), self._query_map(h)
            gradient = (self._layer.scale * head.P @ self._passed.key[:, h // self._share]).flatten(0, 1)
            bent = None if mapped is None else mapped.curvature(gradient, self._passed.X.shape[1])
            if bent is not None:
                first = self._input(left.bias).flatten(0, 1)
                second = first if left.bias == right.bias else self._input(right.bias).flatten(0, 1)
                terms.append(Term(first, second, DenseCore(bent, symmetric=True)))
        return terms

    def turned_keys(self, weight: HeadWeight) -> RotaryKeys:
        """The functional part of one head's key weight behind positions, if `layer.turns_keys`."""
        positions, heads = self._layer.key_rotary, [self._head(h) for h in weight.heads]
        assert positions is not None
        queries = self._layer.scale * self._passed.query[:, list(weight.heads)]
        sequences = [
            KeySequence(
                X,
                torch.cat([head.rows.A[n] for head in heads]),
                torch.cat([head.P[n] for head in heads]),
                queries[n].flatten(0, 1),
                positions.of_head(weight.heads[0] // self._share),
                n,
            )
            for n, X in enumerate(self._passed.X)
        ]
        return RotaryKeys(sequences, weight.shape, self._passed.X)

    def t_functional(self, left: HeadWeight, right: HeadWeight) -> TermList:
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

    def _bilinear(self, left: HeadWeight, right: HeadWeight) -> TermList:
        """The output is bilinear in values and attention, and in values and W_O."""
        order = "OVQKM"
        if order.index(left.role) > order.index(right.role):
            return [term.T for term in self._bilinear(right, left)]
        if left.role == right.role or left.role not in "OV" or (left.role == "O" and left.bias):
            return []
        pair = self._output_with_value if right.role == "V" else self._output_with_score
        return [term for h in self._shared_heads(left, right) for term in pair(left, right, h)]

    def _output_with_value(self, left: HeadWeight, right: HeadWeight, h: int) -> TermList:
        """delta_ef (M1^T G)[b, m]: W_O with a value weight."""
        outer = self._gradient_tokens().T @ self._factor(right, h).vectors
        return [Single(outer, torch.eye(left.shape[0], dtype=outer.dtype, device=outer.device), (1, 0))]

    def _output_with_score(self, left: HeadWeight, right: HeadWeight, h: int) -> TermList:
        """s sum_i g_i z_i (x) Cov_i[f, .]: W_O (f the values) or a value weight (f the inputs) with a query or key."""
        head = self._head(h)
        if not self._moves(right) or (left.bias and head.rows.shifts):
            return []  # a covariance with a constant
        second = self._factor(right, h)
        assert second.response is not None
        vector, feature = head.gradient, head.input_feature(left.bias)
        if left.role == "O":
            vector, feature = self._gradient_tokens(), second.response.value
        core = rotated(Covariance(head.rows, feature, second.response.feature), None, second.response)
        return [Term(vector, second.vectors, core, (1, second.axis))]

    # ---- pieces

    def _moves(self, weight: HeadWeight) -> bool:
        """Softmax ignores what a key bias adds to a row of scores, unless there is a sink: its blocks are zero."""
        ignored = self._passed.open_keys is None and self._layer.sinks is None
        return not (weight.role == "K" and weight.bias and ignored)

    def _users(self, weight: HeadWeight) -> tuple[int, ...]:
        return weight.heads[:1] if weight.role == "O" and weight.bias else weight.heads

    def _shared_heads(self, left: HeadWeight, right: HeadWeight) -> list[int]:
        return [h for h in left.heads if h in right.heads]

    def _factor(self, weight: HeadWeight, h: int) -> Factor:
        key = (weight.role, weight.bias, h)
        if key not in self._factors:
            self._factors[key] = self._make_factor(weight, h)
        return self._factors[key]

    def _make_factor(self, weight: HeadWeight, h: int) -> Factor:
        head, port = self._head(h), self._layer.port(h)
        if weight.role in "QM":
            if weight.bias not in self._scaled:
                self._scaled[weight.bias] = self._layer.scale * self._input(weight.bias).flatten(0, 1)
            response = Response(head.rows, head.value, head.input_feature(False))
            if weight.role == "Q":
                response = Response(head.rows, head.value, head.key, self._query_map(h))
            return Factor(self._scaled[weight.bias], port, response=response)
        if weight.role == "K":
            response = Response(head.rows, head.value, head.input_feature(weight.bias))
            return Factor(head.scaled_query, port, response=response, axis=1)
        if weight.role == "V":
            return Factor((head.rows.A @ self._input(weight.bias)).flatten(0, 1), port)
        return Factor((self._input(True) if weight.bias else self._passed.head_output[:, h]).flatten(0, 1))

    def _input(self, bias: bool) -> Tensor:
        X = self._passed.X
        return X.new_ones(*X.shape[:2], 1) if bias else X

    def _gradient_tokens(self) -> Tensor:
        return self._loss.gradient.flatten(0, 1)

    @property
    def _share(self) -> int:
        return self._layer.heads // self._layer.kv_heads

    @cached_property
    def _queries(self) -> ProjectionMap:
        return self._layer.projection("Q", self._passed.X)

    def _query_map(self, h: int) -> HeadMap | None:
        if h not in self._mapped:
            self._mapped[h] = self._queries.of_head(h)
        return self._mapped[h]

    def _head(self, h: int) -> "_Head":
        if h not in self._heads:
            self._heads[h] = _Head(self._layer, self._passed, self._loss, h)
        return self._heads[h]


class _Head:
    """One head's row statistics and features."""

    def __init__(self, layer: AttentionLayer, passed: Pass, loss: LossAt, h: int) -> None:
        group = h // (layer.heads // layer.kv_heads)
        open_keys = passed.open_keys
        if open_keys is not None:
            open_keys = open_keys.expand(-1, layer.heads, -1, -1)[:, h]
        self.rows = Rows(passed.A[:, h], open_keys, layer.sinks is not None)
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


TermsOf = Callable[[HeadWeight, HeadWeight], TermList]
