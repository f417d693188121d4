"""Attention that puts almost all of its weight on one key: small blocks with all their digits.

The reference has 400 decimal digits, see `many_digits`.
"""

import mpmath
import pytest
import torch

from many_digits import Case

SHARPNESS = [1.0, 8.0, 30.0, 200.0, 900.0]
"""Factors on the scores: the weight beside the largest goes down to 1e-300."""


@pytest.fixture(scope="module", params=SHARPNESS)
def case(request):
    with mpmath.workdps(400):
        yield Case(Q=request.param)


@pytest.mark.parametrize("pair", ["QQ", "QK", "QV", "KK", "KV", "VV"])
def test_blocks_to_relative_precision(case, pair):
    with mpmath.workdps(400):
        truth = case.block("QKV".index(pair[0]), "QKV".index(pair[1]))
    scale = float(truth.abs().max())
    assert scale > 0
    block = case.H[pair[0], pair[1]]
    assert float((block.dense() - truth).abs().max()) < 1e-11 * scale
    products = torch.stack([block @ e for e in torch.eye(4, dtype=torch.float64)], 1)
    assert float((products - truth).abs().max()) < 1e-11 * scale
    assert abs(float(block.frobenius_norm()) - float(truth.norm())) < 1e-11 * float(truth.norm())
    if pair[0] == pair[1]:
        assert abs(float(block.trace()) - float(truth.trace())) < 1e-10 * max(abs(float(truth.trace())), scale)
        assert float((block.diagonal() - truth.diagonal()).abs().max()) < 1e-11 * scale
