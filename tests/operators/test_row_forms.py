"""Inner products of cores that are diagonal plus outer products, against those of the dense cores."""

import math

import pytest
import torch

from curvoscope.exact.activations import DiagonalCore
from curvoscope.exact.attention.moments import Covariance, Rows, Third
from curvoscope.operators.cores import inner_by_rows, inner_by_rows_cost
from reference import normal

SEQUENCES, LENGTH = 3, 7
TOKENS = SEQUENCES * LENGTH


def _rows(seed, sharpness=1.0):
    scores = sharpness * normal(seed)(SEQUENCES, LENGTH, LENGTH)
    return Rows(scores.tril().masked_fill(torch.ones(LENGTH, LENGTH).triu(1) > 0, -math.inf).softmax(-1), None)


def _third(seed, same, sharpness=1.0, scale=1.0):
    rows = _rows(seed, sharpness)
    f = rows.feature(normal(10)(SEQUENCES, LENGTH, 4))
    g = f if same else rows.feature(normal(11)(SEQUENCES, LENGTH, 5))
    return Third(rows, rows.derivative(scale * normal(seed + 20)(SEQUENCES, LENGTH, LENGTH)), f, g)


def _covariance(seed, same):
    third = _third(seed, same)
    return Covariance(third._rows, third._f, third._g)


PAIRS = {
    "third moments of one feature": lambda: (_third(1, True), _third(2, True)),
    "third moments of two features": lambda: (_third(1, False), _third(2, False)),
    "a covariance and a third moment": lambda: (_covariance(1, False), _third(2, False)),
    "transposed": lambda: (_third(1, False).T, _covariance(2, False).T),
    "diagonals": lambda: (DiagonalCore(normal(1)(TOKENS, 6)), DiagonalCore(normal(2)(TOKENS, 6))),
    "rows that attend to almost one key": lambda: (_third(1, True, 40.0), _third(2, True, 40.0)),
    "tiny gradients": lambda: (_third(1, True, scale=1e-200), _third(2, True, scale=1e-200)),
}


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("budget", [2**30, 0])
def test_the_sum_over_pairs_of_tokens(case, budget, monkeypatch):
    """Of two terms, and of one with itself; without memory in the smallest chunks."""
    if not budget:
        monkeypatch.setattr("curvoscope.operators.cores.checks.LEAST_CHUNK", 16 * 8 * 9)  # three tokens at once
    x, y = PAIRS[case]()
    vectors = normal(5)(TOKENS, 8)
    weights = (vectors @ vectors.T).square()
    for first, second in ((x, y), (x, x)):
        value, exponent = inner_by_rows(first, second, lambda i, j: weights[i, j], budget, same=first is second)
        # by a power of two that brings the cores near one
        unit = 2.0 ** -(exponent // 2)
        dense, other = ((unit * core.dense(0, TOKENS)).flatten(1) for core in (first, second))
        expected = (weights * (dense @ other.T)).sum()
        size = (weights * (dense.norm(dim=1)[:, None] * other.norm(dim=1))).sum()
        assert abs(value * 2.0 ** (exponent % 2) - float(expected)) < 1e-13 * float(size)


def test_which_cores_have_no_such_form():
    sharp = _third(1, True, 40.0)
    assert Covariance(sharp._rows, sharp._f, sharp._g).row_form() is None  # its difference would have no digits left
    assert inner_by_rows_cost(DiagonalCore(normal(1)(TOKENS, 4)), _third(1, True)) > 2**60


def test_a_diagonal_core_is_never_made_dense():
    core, matrices = DiagonalCore(normal(1)(TOKENS, 6)), normal(2)(TOKENS, 6, 3)
    assert core.kept == 6 and core.with_numbers(TOKENS) is core
    assert torch.equal(core.times(core.numbers(0, TOKENS), matrices), core.diagonal(0, TOKENS)[..., None] * matrices)
