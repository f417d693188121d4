"""Audits in the span of the inputs against dense matrices in all directions, in float64."""

import sys

import pytest
import torch

from curvoscope.analysis.audit import DEFAULT
from curvoscope.analysis.audit_samples import _BlockSamples
from curvoscope.approximations import GradientFactors, GradientSource, factors, projections
from curvoscope.approximations.names import approximation
from reference import normal

INPUTS, OUTPUTS, HEADS = 12, 6, 2
KEPT = ("diagonal", "neurons", "heads")


def samples(flipped: bool, by_output: bool, tokens: int, seed: int = 0) -> GradientSource:
    """Samples of two sequences."""
    r = normal(seed)
    parts = tuple(GradientFactors(r(1, tokens, INPUTS), r(1, n, tokens, OUTPUTS), flipped) for n in (7, 9))
    axis = 1 if by_output != flipped else 0
    return GradientSource("W", parts, False, HEADS, axis)


def formed(source: GradientSource) -> torch.Tensor:
    return torch.cat([part.gradients().flatten(1) for part in source.parts])


def kept_entries(source: GradientSource, name: str) -> torch.Tensor:
    """Which entries of H an approximation keeps, as zeros and ones."""
    if name == "diagonal":
        return torch.eye(INPUTS * OUTPUTS, dtype=torch.float64)
    rows, columns = source.shape
    axis, parts = (source.outputs_axis, OUTPUTS) if name == "neurons" else (source.axis, HEADS)
    place = torch.arange(rows)[:, None].expand(rows, columns) if axis == 0 else torch.arange(columns).expand(rows, -1)
    number = (place * parts // source.shape[axis]).flatten()
    return (number[:, None] == number).double()


@pytest.mark.parametrize("tokens", [2, 7, 15])  # in all fewer than the inputs, or more; or more in each part
@pytest.mark.parametrize("by_output", [True, False])
@pytest.mark.parametrize("flipped", [False, True])
def test_numbers_of_the_audit_are_those_of_dense_matrices(flipped, by_output, tokens, monkeypatch):
    monkeypatch.setattr(factors, "_PANELS", (4, 4))  # of six outputs, so that the second has two
    monkeypatch.setattr(projections, "_AT_ONCE", 4 * 16 * INPUTS)
    source = samples(flipped, by_output, tokens)
    first, second = source.halves()
    assert source.spanned().silent == max(0, INPUTS - 2 * tokens)
    assert torch.equal(formed(second), formed(source)[source.second_half])
    for name in DEFAULT:
        found = _BlockSamples(source).compared(name, lambda half, name=name: approximation(half, name), given=False)
        A = approximation(first, name)
        gradients = formed(source if name in KEPT else second)
        squares = (gradients @ gradients.mT).square()
        close = 1e-6 if name == "shampoo:1/4" else 1e-9  # roots of eigenvalues that are zero but for rounding
        if name in KEPT:
            lone = torch.einsum("ia,ib->iab", gradients, gradients) * kept_entries(source, name)
            pairs = lone.flatten(1) @ lone.flatten(1).mT
        else:
            dense = A.dense()
            values = (gradients @ dense * gradients).sum(1)
            pairs = torch.outer(values, values)
            assert found.square == pytest.approx(float(dense.square().sum()), rel=close), name
            assert found.trace == pytest.approx(float(dense.trace()), rel=close), name
        assert torch.allclose(found.products, pairs.sum(1) - pairs.diagonal(), rtol=close), name
        assert torch.allclose(found.squares, squares.sum(1) - squares.diagonal(), rtol=1e-9), name
        assert torch.allclose(found.lengths, gradients.square().sum(1), rtol=1e-9), name
        assert found.floats == A.floats, name


@pytest.mark.parametrize("seed", range(3))
def test_single_precision_stops_where_the_nearest_product_is_as_good(seed, monkeypatch):
    monkeypatch.setattr(sys.modules["curvoscope.approximations.kronecker"], "_DENSE", 0)
    source = samples(False, True, 3, seed)
    single = GradientSource(
        "W", tuple(GradientFactors(part.inputs.float(), part.cotangents.float()) for part in source.parts), False
    )
    H = source.dense()
    errors = [float((approximation(one, "kronecker:1").dense().double() - H).norm()) for one in (single, source)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-2)
