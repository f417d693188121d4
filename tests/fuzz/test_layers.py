"""Single layers of every variant, losses of every kind, float64 and float32, against float64 autodiff."""

import math

import torch
from hypothesis import strategies as st

from attention_cases import problems
from fuzz_cases import DTYPES, assert_agrees, assert_answers, dtypes, kinds
from layer_cases import FeedForwardCase, LinearCase, NormCase, feedforward_cases, linear_cases, norm_cases
from reference import dense_hessian

PARTS = ("total", "outer", "functional")
seeds = st.integers(0, 2**16)


def _matrices(truth):
    """The blocks of each part, and the largest entry of all."""
    found = {"total": truth.hessian, "outer": truth.outer, "functional": truth.functional}
    return found, max(float(block.abs().max()) for part in found.values() for block in part.values())


def _compare(case, H, chosen):
    """A block of each part, chosen by a number: all that can be asked of it."""
    truth = case.truth(wrt_input=True) if isinstance(case, LinearCase) else case.truth()
    found, size = _matrices(truth)
    if isinstance(case, NormCase):
        size = max(size, float(case.scale(truth)))
    for part in PARTS:
        matrix = getattr(H, part)
        for row in H.names:
            for column in H.names:
                assert_agrees(matrix[row, column].dense(), found[part][row, column], size, f"{part} {row} {column}")
    pairs = [(row, column) for row in H.names for column in H.names]
    pair = pairs[chosen % len(pairs)]
    part = PARTS[chosen % 3]
    assert_answers(getattr(H, part)[pair], found[part][pair], size, case.dtype, f"{part} {pair}")


def test_attention(fuzz):
    def check(problem, chosen):
        layer, X, mask, H, function, p, loss = problem
        truth = dense_hessian(function, p, loss)
        size = max(float(part.abs().max()) for part in (truth.total, truth.outer, truth.functional))
        assert_agrees(layer(X, mask), function(p), float(function(p).abs().max()), "forward")
        part = PARTS[chosen % 3]
        matrix, expected = getattr(H, part), getattr(truth, part)
        assert_answers(matrix, expected, size, X.dtype, part)
        pairs = [(row, column) for row in H.names for column in H.names]
        row, column = pairs[chosen % len(pairs)]
        block = expected[matrix.ranges[row], matrix.ranges[column]]
        assert_answers(matrix[row, column], block, size, X.dtype, f"{part} {row} {column}")
        assert [math.prod(shape) for shape in H.shapes.values()] == [w.numel() for w in p.values()]

    fuzz(check, problems(DTYPES), seeds, examples=3)


def test_heads(fuzz):
    """The block of a head is that of its columns of W_Q, W_K, W_V, and of its rows of W_O."""

    def check(problem, chosen):
        layer, X, mask, H, function, p, loss = problem
        split = layer.hessian(X, loss, mask, biases="b_Q" in p, wrt_input="X" in p, per_head=True)
        truth = dense_hessian(function, p, loss)
        size = max(float(part.abs().max()) for part in (truth.total, truth.outer, truth.functional))
        part, name = PARTS[chosen % 3], split.names[chosen % len(split.names)]
        weight, _, number = name.partition(".")
        axis, where = (0 if weight == "O" else 1), H.total.ranges[weight]
        width, shape = split.shapes[name][axis], H.shapes[weight]
        places = torch.arange(where.start, where.stop).view(shape).narrow(axis, int(number or 0) * width, width)
        expected = getattr(truth, part)[places.flatten()][:, places.flatten()]
        assert_answers(getattr(split, part)[name], expected, size, X.dtype, f"{part} {name}")

    fuzz(check, problems(), seeds, examples=3)


def test_norms(fuzz):
    def check(options, kind, dtype, chosen):
        case = NormCase(**{**options, "kind": kind}, dtype=dtype)
        _compare(case, case.hessian(), chosen)

    fuzz(check, norm_cases, kinds, dtypes, seeds, examples=2)


def test_feedforward(fuzz):
    def check(options, kind, dtype, chosen):
        case = FeedForwardCase(**{**options, "kind": kind}, dtype=dtype)
        _compare(case, case.hessian(), chosen)

    fuzz(check, feedforward_cases, kinds, dtypes, seeds, examples=2)


def test_linear_networks(fuzz):
    def check(options, kind, dtype, chosen):
        case = LinearCase(**{**options, "kind": kind}, dtype=dtype)
        _compare(case, case.hessian(wrt_input=True), chosen)

    fuzz(check, linear_cases, kinds, dtypes, seeds, examples=2)
