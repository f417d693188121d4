import dataclasses
import re

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, jacfwd

from curvoscope.analysis import PARTS, BlockRow, block_rows, block_table, headline, verdict
from curvoscope.errors import BlockNameError
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import addition, answer_targets


def measured(norm="none", activation="softmax", d=4, sequences=6, dtype=torch.float64):
    """The table of a small model, and the dense parts of its Hessian by autodiff of the whole network."""
    tokens = addition(sequences, seed=2)
    inputs, targets = tokens[:, :-1], answer_targets(tokens)
    model = GPT2(d, norm=norm, activation=activation, seed=2, dtype=dtype)
    X = model.attention_input(inputs)
    H = model.attention().hessian(X, model.tail(inputs, targets))
    weights = dict(model.named_parameters())
    names = [f"blocks.0.W_{name}" for name in "QKVO"]
    flat = torch.cat([weights[name].detach().flatten() for name in names])

    def replaced(flat):
        return {**weights, **dict(zip(names, flat.view(4, d, d), strict=True))}

    def loss(flat):
        logits = functional_call(model, replaced(flat), inputs)
        return -logits[:, 11:17].log_softmax(-1).gather(-1, targets[:, 11:17, None]).mean()

    block = model.blocks[0]
    local = dict(block.named_parameters())

    def attention(flat):
        query, key, value, output = flat.view(4, d, d)
        scores = (X @ query) @ (X @ key).mT / d**0.5
        future = torch.ones(17, 17).triu(1).bool()
        if activation == "softmax":
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        else:
            weights = scores.masked_fill(future, 0)
        return weights @ (X @ value) @ output

    assert all(not bool(local[f"b_{name}"].any()) for name in "QKVO")  # the reference above leaves them out
    gradient = grad(model.tail(inputs, targets))(attention(flat)).detach()
    total = jacfwd(grad(loss))(flat).detach()
    functional = jacfwd(grad(lambda flat: (gradient * attention(flat)).sum()))(flat).detach()
    return block_table(H), {"total": total, "functional": functional, "outer": total - functional}


@pytest.mark.parametrize(
    ("norm", "activation"), [("none", "softmax"), ("pre", "softmax"), ("none", "linear"), ("pre", "linear")]
)
def test_the_table_against_autodiff_of_the_whole_network(norm, activation):
    rows, dense = measured(norm, activation)
    assert len(rows) == 3 * (4 + 6)
    ranges = {name: slice(16 * i, 16 * i + 16) for i, name in enumerate("QKVO")}
    for row in rows:
        scale = float(dense["total"][ranges[row.row], ranges[row.column]].abs().max())
        block = dense[row.part][ranges[row.row], ranges[row.column]].numpy()
        near = {"rel": 1e-9, "abs": 1e-12 * scale}
        assert row.frobenius_norm == pytest.approx(np.sqrt((block**2).sum()), **near)
        assert row.median_absolute == pytest.approx(np.sort(np.abs(block), axis=None)[127:129].mean(), **near)
        if row.row != row.column:
            spectrum = (row.trace, row.largest_eigenvalue, row.smallest_eigenvalue, row.negative_share)
            assert spectrum == (None,) * 4 and not row.diagonal
            continue
        eigenvalues = np.linalg.eigvalsh((block + block.T) / 2)
        assert row.trace == pytest.approx(np.trace(block), **near)
        assert row.largest_eigenvalue == pytest.approx(eigenvalues[-1], **near)
        assert row.smallest_eigenvalue == pytest.approx(eigenvalues[0], **near)
        assert row.negative_share == pytest.approx((eigenvalues < -1e-11 * scale).mean())


def test_zeros_are_exact_where_the_algebra_says_so():
    rows, _ = measured()
    zero = {(row.row, row.column) for row in rows if row.part == "functional" and row.frobenius_norm == 0}
    assert zero == {("V", "V"), ("O", "O")}
    rows, _ = measured(activation="linear")
    zero = {(row.row, row.column) for row in rows if row.part == "functional" and row.frobenius_norm == 0}
    assert zero == {("Q", "Q"), ("K", "K"), ("V", "V"), ("O", "O")}


def test_the_null_space_of_a_positive_block_is_not_counted_as_negative():
    # Without norm the tail is affine between kinks, then convex: the outer parts are positive semi-definite.
    # A token adds rank 8 at most, so that the six with a loss leave a null space in each 64 x 64 block.
    for dtype in (torch.float64, torch.float32):
        tokens = addition(1, seed=0)
        inputs, targets = tokens[:, :-1], answer_targets(tokens)
        model = GPT2(8, dtype=dtype)
        H = model.attention().hessian(model.attention_input(inputs), model.tail(inputs, targets))
        for row in block_rows(H):
            if row.part == "outer" and row.diagonal:
                assert row.negative_share == 0
                assert abs(row.smallest_eigenvalue) <= row.eigenvalue_tolerance
                assert row.eigenvalue_tolerance == pytest.approx(torch.finfo(dtype).eps * 64 * row.largest_eigenvalue)


def rows_with(query, value, query_functional=1.0, value_functional=0.0):
    """A table whose query and value blocks have the given (norm, median)."""
    return [
        BlockRow("Q", "Q", "total", *query),
        BlockRow("V", "V", "total", *value),
        BlockRow("Q", "Q", "functional", query_functional, 0.0),
        BlockRow("V", "V", "functional", value_functional, 0.0),
        BlockRow("Q", "V", "functional", 1.0, 0.0),
    ]


def test_the_verdict_says_smaller_larger_and_equal_as_measured():
    text = verdict(rows_with((1e-4, 2e-7), (1e-2, 1e-5)))
    assert "query block is 100 times smaller than the value block in Frobenius norm" in text
    assert "(1.00e-04 against 1.00e-02)" in text
    assert "median entry 50 times smaller than the value block's (2.00e-07 against 1.00e-05)" in text
    assert "functional part is exactly zero" in text and "below one" in text and "above one" not in text

    text = verdict(rows_with((3.0, 1.0), (1.0, 2.0)))
    assert "query block is 3.0 times larger than the value block" in text
    assert "median entry 2.0 times smaller than" in text
    assert "above one" in text and "below one" not in text

    text = verdict(rows_with((1.0, 1.01), (1.0, 1.0)))
    assert "query block is as large as the value block" in text and "median entry as large as" in text

    assert "exactly zero" not in verdict(rows_with((1.0, 1.0), (2.0, 2.0), value_functional=1.0))
    assert "median" not in verdict(rows_with((1.0, 0.0), (2.0, 1.0))).split(".")[0]


def test_the_verdict_without_softmax_gives_another_reason():
    text = verdict(rows_with((1.0, 1.0), (2.0, 1.0), query_functional=0.0))
    assert "Without softmax both functional parts are exactly zero" in text and "third" not in text


def test_the_verdict_on_blocks_that_are_zero_or_absent():
    assert verdict(rows_with((0.0, 0.0), (1.0, 1.0))).startswith("Exactly zero: the query block")
    assert "the query and the value block" in verdict(rows_with((0.0, 0.0), (0.0, 0.0)))
    with pytest.raises(BlockNameError, match=r"^rows: there is no block 'V'"):
        verdict([row for row in rows_with((1.0, 1.0), (1.0, 1.0)) if row.row != "V"])


@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize("norm", ["none", "pre"])
def test_the_verdict_states_the_measured_ratio(norm, activation):
    rows, dense = measured(norm, activation)
    query, value = (dense["total"][part, part] for part in (slice(0, 16), slice(32, 48)))
    text = verdict(rows)
    for ratio, words in (
        (query.norm() / value.norm(), "block is"),
        (np.median(query.abs()) / np.median(value.abs()), "median entry"),
    ):
        if abs(ratio - 1) < 0.05:
            assert f"{words} as large as" in text
        else:
            factor, word = re.search(rf"{words} ([\d.,]+) times (\w+) than", text).groups()
            stated = float(factor.replace(",", ""))
            assert stated == pytest.approx(float(ratio if word == "larger" else 1 / ratio), rel=0.05)
    assert ("Without softmax" in text) == (activation == "linear")


def test_the_headline_compares_medians():
    assert headline(rows_with((9.0, 1.0), (1.0, 1500.0))) == (
        "Query entries are 1,500 times smaller than value entries (median)"
    )
    assert "times" not in headline(rows_with((9.0, 0.0), (1.0, 1.0)))


def test_rows_are_plain_data():
    row = rows_with((1.0, 2.0), (3.0, 4.0))[0]
    assert dataclasses.asdict(row)["frobenius_norm"] == 1.0
    assert PARTS == ("outer", "functional", "total")
