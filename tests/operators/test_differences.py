"""Products by central differences of gradients, against dense nested autodiff in float64."""

import math

import pytest
import torch
from torch import nn

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens, truth
from curvoscope.curvature import CrossEntropy, MeanSquaredError, blocks_of, hessian
from curvoscope.errors import ModelError, RangeError
from distributed_workers import ROWS, OnceTanh, differences, launch
from reference import normal, relative

PARTS = ("total", "outer", "functional")
PRECISION = {torch.float64: 1e-9, torch.float32: 5e-4}


def _gpt(dtype):
    model, (inputs, targets) = GPT(), tokens()
    blocks = blocks_of(model)
    dense = truth(model, inputs, lambda F: cross_entropy(F, targets), blocks)
    return hessian(model.to(dtype), CrossEntropy(), [(inputs, targets)], hvp="difference", micro_batch=3), dense


def _mlp(dtype, activation=nn.GELU):
    (inputs, targets), model = points(), MLP(activation)
    dense = truth(model, inputs, lambda F: (F - targets).square().mean(), blocks_of(model))
    return hessian(model.to(dtype), MeanSquaredError(), [(inputs, targets)], hvp="difference"), dense


CASES = {"gpt": _gpt, "gelu": _mlp, "relu": lambda dtype: _mlp(dtype, nn.ReLU)}


@pytest.fixture(scope="module", params=[(name, dtype) for name in CASES for dtype in PRECISION], ids=str)
def case(request):
    name, dtype = request.param
    # weights that float32 represents, so that both precisions have one truth up to their own rounding
    return *CASES[name](dtype), dtype


@pytest.mark.parametrize("part", PARTS)
class TestAgainstDense:
    def test_products_whatever_the_length_of_the_vector(self, case, part):
        H, dense, dtype = case
        expected = getattr(dense, part)
        v = normal(1)(expected.shape[0])
        for length in (1e-3, 1.0, 1e4):
            found = (getattr(H, part) @ (length * v).to(dtype)).double() / length
            assert relative(found, expected @ v) < PRECISION[dtype]
        assert 0 < H.difference_error < PRECISION[dtype]

    def test_sharp_directions(self, case, part):
        H, dense, dtype = case
        values, vectors = torch.linalg.eigh(getattr(dense, part))
        v = vectors[:, values.abs().argmax()]
        found = (getattr(H, part) @ v.to(dtype)).double()
        assert relative(found, getattr(dense, part) @ v) < PRECISION[dtype]

    def test_no_step_is_three_times_better(self, case, part):
        H, dense, dtype = case
        kinked = isinstance(getattr(H._engine.model, "act", None), nn.ReLU) and part != "total"
        v = normal(2)(H.shape[0])
        expected = getattr(dense, part) @ v
        error = lambda x: float((x.double() - expected).norm() / expected.norm())  # noqa: E731
        reached = error(getattr(H, part) @ v.to(dtype))
        if kinked:  # F is linear up to the next kink: the longest step that meets none would be the best
            assert reached < (1e-12 if dtype == torch.float64 else 1e-4)
            return
        engine, blocks = H._engine, list(H._engine.blocks.values())
        displacement = engine._scales[part, tuple(H.names), tuple(H.names)].displacement
        steps = displacement * 2.0 ** torch.arange(-8, 9, dtype=torch.float64)
        columns = v.to(dtype).expand(len(steps), -1)
        others = [error(x) for x in engine._differences(part, blocks, blocks, columns, steps)]
        assert reached < 3 * min(others)

    def test_the_estimated_error_is_of_the_size_of_the_true_one(self, case, part):
        H, dense, dtype = case
        v = normal(3)(H.shape[0])
        found = (getattr(H, part) @ v.to(dtype)).double()
        expected = getattr(dense, part) @ v
        assert float((found - expected).norm() / expected.norm()) < 3 * H.difference_error


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 1e-4)])
def test_the_error_by_precision(activation, dtype, most):
    """Half-precision weights are converted first, so that their products are as precise as those of float32."""
    (inputs, targets), model = points(), MLP(activation).to(dtype)
    exact = MLP(activation).to(dtype).double()
    dense = truth(exact, inputs, lambda F: (F - targets).square().mean(), blocks_of(exact))
    H = hessian(model, MeanSquaredError(), [(inputs, targets)], hvp="difference")
    for part in PARTS:
        v = normal(4)(H.shape[0])
        found = (getattr(H, part) @ v.to(H.total.dtype)).double()
        error = relative(found, getattr(dense, part) @ v)
        assert error < most and error < 3 * H.difference_error


def test_a_model_without_second_derivatives():
    model, (inputs, targets) = MLP(OnceTanh), points()
    dense = truth(MLP(nn.Tanh), inputs, lambda F: (F - targets).square().mean(), blocks_of(model))
    H = hessian(model, MeanSquaredError(), [(inputs, targets)], hvp="difference")
    assert relative(H.dense(), dense.total) < 1e-8
    assert relative(H["up.weight", "down.weight"].dense(), dense.total[:12, 16:24], dense.total) < 1e-8
    assert math.isclose(float(H.total.eigenvalues(k=1).values[0]), _largest(dense.total), rel_tol=1e-8)
    assert H.method_of("up.weight") == "difference"


def _largest(matrix):
    values = torch.linalg.eigvalsh(matrix)
    return float(values[values.abs().argmax()])


def test_several_ranks(tmp_path):
    model, (inputs, targets) = GPT(), tokens(ROWS)
    dense = truth(model, inputs, lambda F: cross_entropy(F, targets), blocks_of(model))
    v = torch.linspace(-1, 1, len(dense.total), dtype=torch.float64)
    for product, error in launch(differences, 2, tmp_path, (5, 2)):
        assert relative(product, dense.total @ v) < 1e-9
        assert 0 < error < 1e-9


def test_zero_vectors_and_exact_products_have_no_error():
    H = hessian(MLP(), MeanSquaredError(), [points()], hvp="difference")
    columns = torch.zeros(H.shape[0], 2, dtype=torch.float64)
    assert not (H.total @ columns).any() and H.difference_error is None
    columns[0, 1] = 1
    assert not (H.total @ columns)[:, 0].any() and H.difference_error > 0
    assert hessian(MLP(), MeanSquaredError(), [points()]).difference_error is None


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"hvp": "forward"}, RangeError, "hvp: got 'forward', expected one of 'autodiff', 'difference'"),
        ({"hvp": "difference", "split": "layer"}, ModelError, "hvp: .* use split='model'"),
        ({"hvp": "difference", "method": "exact"}, ModelError, "method: got 'exact'"),
    ],
)
def test_bad_options(options, kind, said):
    with pytest.raises(kind, match=said):
        hessian(MLP(), MeanSquaredError(), [points()], **options)
