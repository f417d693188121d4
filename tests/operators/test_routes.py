"""The exact routes to a norm agree: from the entries, from the Gram matrix of the cores, in the space of tokens."""

import math

import pytest
import torch

import curvoscope as cv
from curvoscope import checks
from curvoscope.operators import cores, kronecker
from curvoscope.operators.terms import Term
from reference import normal


def _hessian(activation, cross_entropy):
    r = normal(0)
    N, L, d, k, e = 3, 4, 5, 6, 3
    layer = cv.exact.SelfAttention(r(d, k), r(d, k), r(d, e), r(e, 4), causal=True, activation=activation)
    X, targets = r(N, L, d), torch.arange(N * L).view(N, L) % 7
    return layer.hessian(X, cv.losses.CrossEntropy(targets, r(4, 7)) if cross_entropy else cv.losses.MSE(r(N, L, 4)))


@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize("cross_entropy", [False, True])
@pytest.mark.parametrize("pair", [("Q", "Q"), ("K", "K"), ("Q", "K"), ("Q", "V"), ("K", "V"), ("Q", "O"), ("V", "O")])
def test_all_routes_give_the_same_norm(activation, cross_entropy, pair):
    H = _hessian(activation, cross_entropy)
    taken = set()
    for part in (H.outer, H.functional, H.total):
        block = part[pair]
        expected = float(block.dense().square().sum())
        terms = kronecker.merged(block.terms)
        for budget in (10**9, 3000):  # with room for everything, and in many small chunks
            total = 0.0
            for i, x in enumerate(terms):
                for j, y in enumerate(terms[i:], i):
                    weight = 1 if i == j else 2
                    if not (isinstance(x, Term) and isinstance(y, Term)):
                        total += weight * math.ldexp(*kronecker.inner(x, y, budget))
                        continue
                    if x.axes != y.axes:
                        total += weight * math.ldexp(*kronecker._crossed_inner(x, y, budget))
                        taken.add("crossed")
                        continue
                    gram = math.ldexp(*kronecker._gram_inner(x, y, budget))
                    if cores.inner_by_tokens_cost(x.core, y.core) < 2**60:
                        found = cores.inner_by_tokens(
                            x.core, y.core, lambda a, b, x=x, y=y: kronecker._weights(x, y, a, b)
                        )
                        by_tokens = math.ldexp(*found)
                        assert abs(by_tokens - gram) <= 1e-11 * abs(gram) + 1e-14
                        taken.add("tokens")
                    total += weight * gram
            assert abs(total - expected) <= 1e-11 * expected + 1e-14
    if pair in (("Q", "Q"), ("K", "K"), ("Q", "K")) and (activation == "softmax" or pair[0] == pair[1]):
        assert "tokens" in taken


@pytest.mark.parametrize(
    "sizes, expected", [((64, 17, 128, 128), "tokens"), ((2, 64, 4, 4), "entries"), ((1, 64, 32, 16), "gram")]
)
def test_cheapest_route_is_taken(sizes, expected, monkeypatch):
    N, L, d, k = sizes
    r = normal(1, torch.float32)
    layer = cv.exact.SelfAttention(r(d, k), r(d, k), r(d, 8))
    block = layer.hessian(r(N, L, d), cv.losses.MSE(r(N, L, 8))).outer["Q"]
    taken = []
    monkeypatch.setattr(kronecker, "inner_by_tokens", lambda *a: taken.append("tokens") or (1.0, 0))
    monkeypatch.setattr(kronecker, "_gram_inner", lambda *a: taken.append("gram") or (1.0, 0))
    monkeypatch.setattr(type(block), "dense", lambda self: taken.append("entries") or torch.ones(1))
    block.frobenius_norm()
    assert taken == [expected]


def _assert_cover(ranges, tokens, period, room):
    """All tokens once, at most `room` at a time: whole sequences, or parts of one."""
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(tokens))
    for start, stop in ranges:
        whole = start % period == 0 and stop % period == 0
        assert stop - start <= room and (whole or start // period == (stop - 1) // period)


def test_chunks_cover_all_tokens_once():
    for tokens, period in ((12, 4), (4, 4), (7, 1), (34, 17)):
        for room in (1, 3, 4, 5, 9, 100):
            _assert_cover(list(checks.chunks(tokens, period, 8, 8 * room)), tokens, period, room)


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 6, 9, 100])
def test_chunks_of_the_second_factor_cover_all_tokens_once(room):
    r = normal(1)
    layer, X = cv.exact.SelfAttention(r(3, 2), r(3, 2), r(3, 3)), r(3, 4, 3)
    (term,) = layer.hessian(X, cv.losses.MSE(r(3, 4, 3))).outer["Q"].terms
    _assert_cover(kronecker._at_most(term, 2**30, room), 12, 4, room)
