"""Products by central differences of gradients, against dense nested autodiff in float64."""

import itertools
import math
import statistics

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens, truth
from curvoscope.curvature import CrossEntropy, MeanSquaredError, SecondDerivativeError, blocks_of, hessian
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


def test_both_parts(case):
    H, dense, dtype = case
    name = H.names[1]
    v = normal(2)(H[name].shape[0])
    columns = H.total.ranges[name]
    outer, functional = (H.stacked(name) @ v.to(dtype)).double().chunk(2)
    scale = dense.total[columns, columns] @ v
    assert relative(outer, dense.outer[columns, columns] @ v, scale) < PRECISION[dtype]
    assert relative(functional, dense.functional[columns, columns] @ v, scale) < PRECISION[dtype]


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

    def test_the_estimated_error_is_of_the_size_of_the_true_one(self, case, part):
        """That of one vector is a matter of its rounding: the root mean square of four."""
        H, dense, dtype = case
        vectors = normal(3)(H.shape[0], 4)
        found = (getattr(H, part) @ vectors.to(dtype)).double()
        assert _mean_error(found, getattr(dense, part) @ vectors) < 3 * H.difference_error


def _mean_error(found, expected):
    """The root mean square over the columns of their errors, relative to their lengths."""
    return float(((found - expected).norm(dim=0) / expected.norm(dim=0)).square().mean().sqrt())


class Deep(nn.Module):
    """Layers of one width, an activation between them, weights times a scale."""

    def __init__(self, activation, width=12, depth=3, scale=1.0):
        super().__init__()
        torch.manual_seed(3)
        sizes = [3, *[width] * depth, 2]
        layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(sizes)]
        self.net = nn.Sequential(*(m for layer in layers for m in (layer, activation())))[:-1]
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(scale)

    def forward(self, x):
        return self.net(x)


def _relu_gpt(layers):
    model = GPT(layers)
    for layer in model.h:
        layer.mlp.act = nn.ReLU()
    return model.double()


FITS, WORDS = (MeanSquaredError(), points), (CrossEntropy(), tokens)
MODELS = {  # the model, its loss and data; kinks, smooth functions, no truncation at all; weights of several scales
    "relu": (lambda: MLP(nn.ReLU), *FITS),
    "gelu": (lambda: MLP(nn.GELU), *FITS),
    "one linear layer": (lambda: Deep(nn.Identity, depth=0), *FITS),
    "three linear layers": (lambda: Deep(nn.Identity, 4, 2), *FITS),
    "deep relu": (lambda: Deep(nn.ReLU), *FITS),
    "wide relu": (lambda: Deep(nn.ReLU, 32, 1), MeanSquaredError(), lambda: points(64)),
    "tanh": (lambda: Deep(nn.Tanh), *FITS),
    "tanh, large weights": (lambda: Deep(nn.Tanh, scale=5.0), *FITS),
    "tanh, small weights": (lambda: Deep(nn.Tanh, scale=0.1), *FITS),
    "gpt, gelu": (GPT, *WORDS),
    "gpt, relu": (lambda: _relu_gpt(1), *WORDS),
    "deep gpt, relu": (lambda: _relu_gpt(4), *WORDS),
}
QUICK = {("relu", torch.float32), ("gelu", torch.float64)}
STEPS = [
    *itertools.product(MODELS, [torch.float64, torch.float32]),
    ("relu", torch.bfloat16),
    ("gpt, gelu", torch.bfloat16),
]
JITTER = torch.linspace(0.88, 1, 5, dtype=torch.float64)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("name", "dtype"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in STEPS]
)
class TestTheStep:
    """The automatic one against all others, for random vectors, a sharp direction and one weight.

    The error of a step is the root mean square of five steps up to it, so that its rounding is not that of a lucky
    moment. Below 10 epsilon there is nothing but the rounding of the last sum, and the best step means nothing.

    The rounding of a CPU decides which step is the best. Of 504 vectors, 180 of them on four kinds of CPU, half have no
    better step than theirs, one in ten has one that is twice as good, one in a hundred one that is 3 to 5.3 times as
    good. So the geometric mean over four vectors is below 3, and none is where only a wrong step comes.

    Along a vector in which the model is linear no step is the best: the error falls as far as one looks, and where the
    search ends depends on chance. There the error must be below that of smooth functions, epsilon^(2/3).
    """

    def test_no_other_is_three_times_better(self, name, dtype, part, monkeypatch):
        model, loss, data = MODELS[name]
        exact = _rounded(model(), dtype)
        inputs, targets = data()
        expected = getattr(hessian(exact, loss, [(inputs, targets)], method="autodiff"), part)
        H = hessian(_rounded(model(), dtype).to(dtype), loss, [(inputs, targets)], hvp="difference")
        vectors = _vectors(expected).to(H.total.dtype)
        found, products = _spied(H, part, vectors, monkeypatch), (expected @ vectors.T.double()).T
        factors = []
        for v, one, product in zip(vectors, found, products, strict=True):
            if not bool(product.any()):
                continue
            errors = _errors(H, part, v, product, one.displacement * 2.0 ** torch.arange(-8, 9, dtype=torch.float64))
            errors, epsilon = errors.nan_to_num(math.inf), torch.finfo(v.dtype).eps
            reached, is_linear = float(errors[8]), int(errors.argmin()) >= 14
            good = reached < (epsilon ** (2 / 3) if is_linear else 10 * epsilon)
            factors.append(1.0 if good else reached / float(errors.min()))
        assert not factors or (statistics.geometric_mean(factors) < 3 and max(factors) < 20)


def _rounded(model, dtype):
    """Weights that the precision represents, in float64: the truth of both."""
    return model.to(dtype).double()


def _vectors(expected):
    """(4, n): two random ones of lengths far apart, one turned towards the largest eigenvalue, and one weight."""
    size = expected.shape[0]
    vectors = normal(2)(4, size)
    vectors[1] *= 1e3
    for _ in range(5):
        product = expected @ vectors[2]
        vectors[2] = product / product.norm() if bool(product.any()) else vectors[2]
    vectors[3] = 0
    vectors[3, size // 2] = 1e-2
    return vectors.float().double()


def _spied(H, part, vectors, monkeypatch):
    """What the searches for the vectors found, in their order."""
    engine, found = H._engine, []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda *arguments: found.append(run(*arguments)) or found[-1])
    assert bool(torch.isfinite(getattr(H, part) @ vectors.T).all())
    return found[-1]


def _errors(H, part, vector, expected, steps):
    """Of each displacement: over five up to it, relative to the product."""
    engine, blocks = H._engine, list(H._engine.blocks.values())
    several = (steps[:, None] * JITTER).flatten()
    found = engine._differences(part, blocks, blocks, vector.expand(len(several), -1), several).double()
    return ((found - expected).norm(dim=1) / expected.norm()).view(-1, len(JITTER)).square().mean(1).sqrt()


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 1e-4)])
def test_the_error_by_precision(activation, dtype, most):
    """Half-precision weights are converted first, so that their products are as precise as those of float32."""
    (inputs, targets), model = points(), MLP(activation).to(dtype)
    exact = MLP(activation).to(dtype).double()
    dense = truth(exact, inputs, lambda F: (F - targets).square().mean(), blocks_of(exact))
    H = hessian(model, MeanSquaredError(), [(inputs, targets)], hvp="difference")
    for part in PARTS:
        vectors = normal(4)(H.shape[0], 4)
        found = (getattr(H, part) @ vectors.to(H.total.dtype)).double()
        expected = getattr(dense, part) @ vectors
        assert relative(found, expected) < most and _mean_error(found, expected) < 3 * H.difference_error


class Fused(nn.Module):
    """Attention by a kernel of torch that has no second derivative."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.query, self.key, self.value = (nn.Linear(3, 2, dtype=torch.float64) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(x)[None, None] for layer in (self.query, self.key, self.value))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v)[0, 0]


class Bag(nn.Module):
    """An embedding that torch sums itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.bag, self.down = nn.EmbeddingBag(3, 3, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x):
        return self.down(self.bag(x.argsort(-1)).tanh())


@pytest.mark.parametrize("model", [lambda: MLP(OnceTanh), Fused, Bag], ids=["once", "fused", "bag"])
class TestWithoutSecondDerivatives:
    def test_the_error_names_the_way_out(self, model):
        H = hessian(model(), MeanSquaredError(), [points()], method="autodiff")
        for part in PARTS:
            with pytest.raises(SecondDerivativeError, match=r"model: has a function without .*hvp='difference'"):
                getattr(H, part) @ torch.ones(H.shape[0], dtype=torch.float64)

    def test_it_is_found_automatically(self, model):
        H = hessian(model(), MeanSquaredError(), [points()], hvp="auto")
        v = normal(5)(H.shape[0])
        assert relative(H @ v, _five_points(model(), v)) < 1e-7
        assert H.method_of(H.names[0]) == "difference" and 0 < H.difference_error < 1e-7

    def test_exact_blocks_are_refused(self, model):
        with pytest.raises(ModelError, match="method: got 'exact', but products are differences of gradients"):
            hessian(model(), MeanSquaredError(), [points()], method="exact", hvp="auto")


def _five_points(model, v):
    """The Hessian times v by a fourth-order difference of gradients, its step by hand."""
    inputs, targets = points()
    start, step = parameters_to_vector(model.parameters()).detach(), 1e-3
    found = torch.zeros_like(start)
    for at, factor in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
        vector_to_parameters(start + at * step * v, model.parameters())
        loss = (model(inputs) - targets).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found += factor / (12 * step) * torch.cat([g.flatten() for g in gradients])
    return found


def test_automatically_exact_where_autograd_can():
    model = MLP()
    H, exact = (hessian(model, MeanSquaredError(), [points()], hvp=hvp) for hvp in ("auto", "autodiff"))
    v = normal(5)(H.shape[0])
    assert torch.equal(H @ v, exact @ v)
    assert H.difference_error is None and H.method_of("up.weight") == exact.method_of("up.weight")


def test_other_failures_are_not_taken_for_it():
    with pytest.raises(ZeroDivisionError):
        hessian(MLP(_Raising), MeanSquaredError(), [points()], hvp="auto")


class _Raising(nn.Module):
    """Fails in the first pass with derivatives."""

    def forward(self, x):
        return x / 0 if x.requires_grad and 1 // 0 else x


def test_a_model_without_second_derivatives():
    model, (inputs, targets) = MLP(OnceTanh), points()
    dense = truth(MLP(nn.Tanh), inputs, lambda F: (F - targets).square().mean(), blocks_of(model))
    H = hessian(model, MeanSquaredError(), [(inputs, targets)], hvp="difference")
    assert relative(H.dense(), dense.total) < 1e-8
    assert relative(H["up.weight", "down.weight"].dense(), dense.total[:12, 16:24], dense.total) < 1e-8
    assert math.isclose(float(H.total.eigenvalues(k=1)[0]), _largest(dense.total), rel_tol=1e-8)
    assert H.method_of("up.weight") == "difference"


def _largest(matrix):
    values = torch.linalg.eigvalsh(matrix)
    return float(values[values.abs().argmax()])


@pytest.mark.slow
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
        ({"hvp": "forward"}, RangeError, "hvp: got 'forward', expected one of 'autodiff', 'difference', 'auto'"),
        ({"hvp": "difference", "split": "layer"}, ModelError, "hvp: .* use split='model'"),
        ({"hvp": "difference", "method": "exact"}, ModelError, "method: got 'exact'"),
    ],
)
def test_bad_options(options, kind, said):
    with pytest.raises(kind, match=said):
        hessian(MLP(), MeanSquaredError(), [points()], **options)
