"""Error bars that are true on a network too: the Hessian of a small GPT-2, whole and block by block.

The truth is the dense Hessian by `jacfwd(grad)`. Three hundred seeds multiply with that matrix, which saves the runs
through the network; that `cv.hessian` makes the same products, and the same estimates from them, is tested beside.
"""

import pytest
import torch

import curvoscope as cv
from autodiff_cases import GPT, cross_entropy, tokens, truth
from curvoscope import estimate
from estimate.test_calibration import SEEDS, calibrated, holding
from matrices import Dense

BLOCKS = ["h.0.attn.Q", "h.0.attn.V", "h.1.mlp.up", "h.1.mlp.down"]
NAMES = [*BLOCKS, None]  # None: the whole
MATVECS = 32


@pytest.fixture(scope="module")
def hessian():
    """Of a GPT-2 with two layers, 1,352 parameters: by products, and its dense total."""
    model = GPT(layers=2, d=8, vocabulary=11, context=6).eval()
    inputs, targets = tokens(rows=5, length=6, vocabulary=11)
    blocks = cv.blocks_of(model)
    with torch.no_grad():  # a softer softmax, so that no part is negligible
        for parameter in model.parameters():
            parameter.mul_(0.5)
    H = cv.hessian(model, cv.curvature.CrossEntropy(), [(inputs, targets)], blocks, method="autodiff")
    return H, truth(model, inputs, lambda logits: cross_entropy(logits, targets), blocks).total


def _block(H, dense, name):
    if name is None:
        return H.total, dense
    start = 0
    for other in H.names:
        size = H.total[other].shape[0]
        if other == name:
            return H.total[name], dense[start : start + size, start : start + size]
        start += size
    raise KeyError(name)


@pytest.mark.parametrize("name", [BLOCKS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
class TestCoverage:
    def test_trace(self, hessian, name):
        operator, matrix = _block(*hessian, name)
        found = [estimate.trace(Dense(matrix), matvecs=MATVECS, seed=seed) for seed in range(SEEDS)]
        assert calibrated(holding(found, float(matrix.trace())))
        assert operator.trace(matvecs=MATVECS, seed=7).value == pytest.approx(found[7].value, rel=1e-6)

    def test_frobenius_norm(self, hessian, name):
        operator, matrix = _block(*hessian, name)
        found = [estimate.frobenius_norm(Dense(matrix), matvecs=MATVECS, seed=seed) for seed in range(SEEDS)]
        assert calibrated(holding(found, float(matrix.norm())))
        assert operator.frobenius_norm(matvecs=MATVECS, seed=7).value == pytest.approx(found[7].value, rel=1e-6)


@pytest.mark.slow
def test_density(hessian):
    operator, matrix = _block(*hessian, None)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    spread = float(eigenvalues[-1] - eigenvalues[0])
    assert operator.density(seed=0).wasserstein(eigenvalues) < 0.01 * spread
    for seed in range(8):
        assert estimate.density(Dense(matrix), seed=seed).wasserstein(eigenvalues) < 0.01 * spread
