"""LayerNorm and RMSNorm against float64 autodiff: every block and part, exact norms, invariances."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from torch.func import grad, jacfwd, jacrev

import curvoscope as cv
import layer_cases as layers
from curvoscope.errors import (
    DtypeError,
    EmptyError,
    LossError,
    MemoryLimitError,
    NonFiniteError,
    RangeError,
    ShapeError,
)
from curvoscope.operators.kronecker import KroneckerSum, Single, Term
from layer_cases import NORMS, REFUSED, normalised, parts
from layer_cases import NormCase as Case
from layer_cases import norm_cases as cases
from loss_cases import LOSSES
from matrices import within


def rows(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def curvature_tensor(x, centred, eps):
    """d²x̂_a/dx_b dx_c of one row by autodiff, (d, d, d)."""
    return jacfwd(jacrev(lambda v: normalised(v, centred, eps)))(x)


class TestAgainstAutodiff:
    @settings(max_examples=40)
    @given(options=cases)
    def test_every_block_and_part(self, options):
        case = Case(**options)
        H, truth = case.hessian(), case.truth()
        d = len(case.parameters["gamma"])
        assert H.names == [*case.parameters, "X"]
        assert H.shapes == {**dict.fromkeys(case.parameters, (1, d)), "X": (case.X.numel() // d, d)}
        layers.assert_blocks(H, truth, case.scale(truth))

    @settings(max_examples=25)
    @given(options=cases)
    def test_weights_alone(self, options):
        case = Case(**options)
        H, truth = case.hessian(wrt_input=False), case.truth(wrt_input=False)
        assert H.names == list(case.parameters)
        for row, column in itertools.product(H.names, repeat=2):
            assert H.functional[row, column].terms == ()
            layers.assert_close(H[row, column].dense(), truth.hessian[row, column], case.scale(truth))

    @settings(max_examples=25)
    @given(options=cases)
    def test_products(self, options):
        case = Case(**options)
        truth = case.truth()
        layers.assert_products(case, case.hessian(), truth, case.scale(truth))

    @settings(max_examples=25)
    @given(options=cases)
    def test_contractions(self, options):
        case = Case(**options)
        H, truth = case.hessian(), case.truth()
        for part, blocks in parts(H, truth):
            for row, column in itertools.product(H.names, repeat=2):
                dense = blocks[row, column]
                layers.assert_contractions(part[row, column], dense, case.scale(truth) * dense.numel(), row == column)

    @settings(max_examples=25)
    @given(options=cases)
    def test_forward_pass_and_jacobians(self, options):
        case = Case(**options)
        layers.assert_forward_and_jacobian(case, case.truth())
        layers.assert_close(case.layer.x_hat(case.X), normalised(case.X, case.centred, case.eps), 1)
        d = case.X.shape[-1]
        single = torch.stack(
            [jacrev(lambda x: case.network({**case.parameters, "X": x}))(x) for x in case.X.view(-1, d)]
        )
        layers.assert_close(case.layer.input_jacobian(case.X), single, 1 + single.abs().max())

    @settings(max_examples=40)
    @given(options=cases)
    def test_contracted_second_derivative(self, options):
        case = Case(**options)
        d, gradient = case.X.shape[-1], case.normal(*case.X.shape)
        gamma = case.parameters["gamma"]

        def weighted(x, g):
            return (g * gamma * normalised(x, case.centred, case.eps)).sum()

        pairs = zip(case.X.view(-1, d), gradient.view(-1, d), strict=True)
        expected = torch.stack([jacfwd(grad(weighted))(x, g) for x, g in pairs])
        found = case.layer.second_derivative(case.X, gradient)
        layers.assert_close(found, expected, expected.abs().max() + 10 / case.layer.sigma(case.X).min() ** 2)
        assert torch.equal(found, found.mT)

    @pytest.mark.parametrize("kind", LOSSES)
    def test_products_with_blocks_whose_cores_are_not_kept(self, kind, monkeypatch):
        case = Case(4, (2, 3), "layer", kind)
        truth = case.truth()
        layers.assert_products_without_cores(case, case.hessian(), truth, case.scale(truth), monkeypatch)


class TestStructure:
    @settings(max_examples=40)
    @given(options=cases)
    def test_exact_identities(self, options):
        layers.assert_identities(Case(**options).hessian())

    @pytest.mark.parametrize("kind", ["mse", "cross-entropy", "batch"])
    def test_blocks_of_weights_are_kronecker_sums(self, kind):
        H = Case(4, (3,), "layer", kind).hessian()
        for row, column in itertools.combinations_with_replacement(["gamma", "beta"], 2):
            assert isinstance(H.outer[row, column], KroneckerSum)
            only_beta = row == column == "beta" and kind == "mse"
            assert [type(term) for term in H.outer[row, column].terms] == [Single if only_beta else Term]

    @pytest.mark.parametrize("kind", ["mse", "cross-entropy", "token"])
    def test_tokens_do_not_mix(self, kind):
        """The input's block is kept by token, so that a long input costs no square matrix."""
        case = Case(4, (3, 2000), "layer", kind)
        block = case.hessian()["X"]
        assert block.blocks.shape == (6000, 4, 4)
        assert len(block.eigenvalues()) == 24000
        assert abs(block.eigenvalues().sum() - block.trace()) < 1e-9 * block.frobenius_norm() * 24000**0.5
        with pytest.raises(MemoryLimitError):
            within(10**6, block.dense)

    @pytest.mark.parametrize("norm", NORMS)
    def test_invariances(self, norm):
        """LN(x + c) = LN(x); with eps = 0 also N(s x) = N(x): the gradient is of degree -1 in x, so H x = -g."""
        case = Case(6, (2, 5), norm, "sequence", eps=0.0)
        H, truth = case.hessian(), case.truth()
        weights = sum(v.numel() for v in case.parameters.values())
        direction = torch.zeros(H.shape[0], dtype=torch.float64)
        direction[weights:] = case.X.flatten()
        expected = torch.zeros_like(direction)
        expected[weights:] = -truth.gradient["X"].flatten()
        layers.assert_close(H @ direction, expected, case.scale(truth) * 10)
        J = case.layer.input_jacobian(case.X)
        assert (J @ case.X.view(-1, 6, 1)).abs().max() < 1e-13 * J.abs().max() * 10
        if case.centred:
            direction[weights:] = 1.0
            assert (H @ direction).abs().max() < 1e-12 * case.scale(truth)
            assert J.sum(-1).abs().max() < 1e-13 * J.abs().max()

    @pytest.mark.parametrize("eps", [1e-5, 0.5])
    @pytest.mark.parametrize("norm", ["layer", "rms"])
    def test_spectrum_of_the_jacobian(self, norm, eps):
        d = 6
        layer = _plain(norm, d, eps)
        X = rows(1, 4, d)
        sigma = layer.sigma(X)[:, None]
        zeros = torch.zeros(4, 1 if norm == "layer" else 0, dtype=torch.float64)
        many = (1 / sigma).expand(-1, d - 1 - zeros.shape[1])
        expected = torch.cat([zeros, eps / sigma**3, many], 1).sort(-1).values
        layers.assert_close(torch.linalg.eigvalsh(layer.input_jacobian(X)), expected)
        # the scale direction is annihilated up to eps
        x_hat = layer.x_hat(X)
        layers.assert_close((layer.input_jacobian(X) @ x_hat[..., None])[..., 0], eps / sigma**3 * x_hat, 1)

    def test_spectrum_of_the_contraction(self):
        """Without eps: 0 along 1, -a/(dσ²) d-3 times, and a 2 x 2 matrix in the plane of x̂ and P g."""
        d, X, g = 7, rows(2, 5, 7), rows(3, 5, 7)
        layer = _plain("layer", d, 0.0)
        values = torch.linalg.eigvalsh(layer.second_derivative(X, g))
        for x_hat, sigma, gradient, found in zip(layer.x_hat(X), layer.sigma(X), g, values, strict=True):
            a = gradient @ x_hat
            b = torch.linalg.norm(gradient - gradient.mean() - a / d * x_hat)
            plane = torch.tensor([[0.0, b * d**0.5], [b * d**0.5, a]], dtype=torch.float64)
            expected = torch.cat([torch.zeros(1), a.expand(d - 3), torch.linalg.eigvalsh(plane)])
            layers.assert_close(found, (-expected / (d * sigma**2)).sort().values)

    @pytest.mark.parametrize("eps", [1e-5, 0.3, 1.0, 30.0, 0.0])
    @pytest.mark.parametrize("d", [1, 2, 3, 4, 6])
    @pytest.mark.parametrize("norm", ["layer", "rms"])
    def test_exact_norms(self, norm, d, eps):
        eps = 1e-3 if norm == "layer" and d == 1 else eps  # one feature has no variance: σ = √eps
        layer, X, centred = _plain(norm, d, eps), rows(d, 4, d), norm == "layer"
        jacobians, tensors = [], []
        for x in X:
            jacobians.append(jacrev(lambda v: normalised(v, centred, eps))(x))
            tensors.append(curvature_tensor(x, centred, eps))
        first, second, size = torch.stack(jacobians), torch.stack(tensors), layer.sigma(X) ** -2
        layers.assert_close(layer.jacobian_norm(X), torch.linalg.matrix_norm(first, 2), 1 / layer.sigma(X).min())
        flat = torch.linalg.matrix_norm(second.reshape(4, d * d, d), 2)
        layers.assert_close(layer.second_derivative_norm(X, flattened=True), flat, size.max())
        found = layer.second_derivative_norm(X)
        assert ((found - _largest_cube(second)).abs() <= 1e-6 * found + 1e-12 * size).all()
        assert (found <= layer.second_derivative_norm(X, flattened=True) * (1 + 1e-12)).all()

    def test_norms_without_eps_and_uniform_bounds(self):
        X = rows(5, 50, 8)
        layer = _plain("layer", 8, 0.0)
        sigma = X.std(-1, correction=0)
        layers.assert_close(layer.jacobian_norm(X), 1 / sigma)
        layers.assert_close(layer.second_derivative_norm(X), 2 / (24**0.5 * sigma**2))
        layers.assert_close(layer.second_derivative_norm(X, flattened=True), (6 / 8) ** 0.5 / sigma**2)
        for scale in (1e-3, 1.0, 1e3):
            layer = _plain("layer", 8, 1e-4)
            assert (layer.jacobian_norm(scale * X) <= 1e2).all()
            assert (layer.second_derivative_norm(scale * X) <= 2 / 24**0.5 * 1e4).all()

    @pytest.mark.parametrize("norm", ["layer", "rms"])
    def test_constant_rows(self, norm):
        """Variance 0 with eps > 0: x̂ = 0 and J = P/√eps exactly, and no curvature."""
        layer = _plain(norm, 3, 1e-4)
        X = torch.full((2, 3), 0.1 if norm == "layer" else 0.0, dtype=torch.float64)
        assert torch.equal(layer.x_hat(X), torch.zeros_like(X))
        P = torch.eye(3, dtype=torch.float64) - (1 / 3 if norm == "layer" else 0.0)
        layers.assert_close(layer.input_jacobian(X), (P / 1e-2).expand(2, 3, 3))
        assert not layer.second_derivative(X, rows(0, 2, 3)).any()
        assert not layer.second_derivative_norm(X).any()
        layers.assert_close(layer.jacobian_norm(X), torch.full((2,), 100.0, dtype=torch.float64))

    def test_one_feature(self):
        """LayerNorm of one feature is constant: all curvature is that of beta."""
        case = Case(1, (4,), "layer")
        H = case.hessian()
        assert torch.equal(case.layer(case.X), case.parameters["beta"].expand(4, 1))
        expected = torch.zeros(6, 6, dtype=torch.float64)
        expected[1, 1] = 2.0
        layers.assert_close(H.dense(), expected)
        assert not case.layer.jacobian_norm(case.X).any()

    def test_large_offsets_keep_their_digits(self):
        """A common offset that float64 holds exactly changes nothing."""
        X = (rows(6, 3, 4) * 2**20).round() / 2**20
        layer = _plain("layer", 4, 1e-5)
        layers.assert_close(layer.x_hat(X + 2**30), layer.x_hat(X))

    def test_dtype_is_kept(self):
        case = Case(4, (2, 3), "layer", "mse", eps=1.0)
        layer = cv.exact.LayerNorm(case.parameters["gamma"].float(), case.parameters["beta"].float(), 1.0)
        H = layer.hessian(case.X.float(), cv.losses.MSE(case.loss.Y.float()), wrt_input=True)
        assert H.dense().dtype == torch.float32
        assert (H.dense() - case.hessian().dense()).abs().max() < 1e-5


def _plain(norm, d, eps):
    gamma = torch.ones(d, dtype=torch.float64)
    return cv.exact.LayerNorm(gamma, eps=eps) if norm == "layer" else cv.exact.RMSNorm(gamma, eps)


def _largest_cube(tensors):
    """max |T(u, u, u)| over unit u of symmetric tensors (n, d, d, d), by the shifted power method from many starts."""
    d = tensors.shape[-1]
    u = rows(9, len(tensors), 40, d)
    u = u / u.norm(dim=-1, keepdim=True)
    shift = tensors.flatten(1).norm(dim=1)[:, None, None]
    for _ in range(400):
        u = torch.einsum("nabc,nsb,nsc->nsa", tensors, u, u) + shift * u
        u = u / u.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("nabc,nsa,nsb,nsc->ns", tensors, u, u, u).abs().amax(1)


class TestErrors:
    gamma = torch.ones(3, dtype=torch.float64)
    X = rows(0, 5, 3)

    @pytest.mark.parametrize(
        ("arguments", "error", "argument"),
        [
            ((gamma[None],), ShapeError, "gamma"),
            ((gamma, gamma[:2]), ShapeError, "beta"),
            ((gamma, gamma[:, None]), ShapeError, "beta"),
            ((gamma, gamma.float()), DtypeError, "beta"),
            ((torch.ones(3, dtype=torch.int64),), DtypeError, "gamma"),
            ((gamma[:0],), EmptyError, "gamma"),
            ((gamma * torch.nan,), NonFiniteError, "gamma"),
            ((gamma, None, -1e-5), RangeError, "eps"),
            ((gamma, None, float("nan")), RangeError, "eps"),
            ((gamma, None, float("inf")), RangeError, "eps"),
        ],
    )
    def test_weights(self, arguments, error, argument):
        with pytest.raises(error) as caught:
            cv.exact.LayerNorm(*arguments)
        assert caught.value.argument == argument

    @pytest.mark.parametrize(("X", "error"), [*REFUSED, (1e200 * X, NonFiniteError)])
    @pytest.mark.parametrize("method", ["__call__", "jacobian", "hessian", "sigma", "jacobian_norm"])
    @pytest.mark.parametrize("norm", [cv.exact.LayerNorm, cv.exact.RMSNorm])
    def test_input(self, norm, X, error, method):
        layers.assert_input_refused(norm(self.gamma), method, X, error)

    @pytest.mark.parametrize("row", [0.0, 0.1, 1e-170])
    def test_variance_zero_without_eps(self, row):
        X = self.X.clone()
        X[3] = row * (torch.arange(3) if row < 1e-100 else 1)
        with pytest.raises(RangeError, match=r"eps: got 0\.0, and row 3 of X has variance .*use eps > 0"):
            cv.exact.LayerNorm(self.gamma, eps=0.0).hessian(X, torch.sum)
        if row < 0.1:
            with pytest.raises(RangeError, match=r"eps: .*row 3 of X"):
                cv.exact.RMSNorm(self.gamma, 0.0)(X)
        assert torch.isfinite(cv.exact.LayerNorm(self.gamma)(X)).all()

    def test_one_feature_without_eps(self):
        with pytest.raises(RangeError, match="eps"):
            cv.exact.LayerNorm(self.gamma[:1], eps=0.0)(self.X[:, :1])

    def test_gradient_and_losses(self, monkeypatch):
        layer = cv.exact.LayerNorm(self.gamma)
        for gradient, error in ((self.X[:4], ShapeError), (self.X.float(), DtypeError)):
            with pytest.raises(error) as caught:
                layer.second_derivative(self.X, gradient)
            assert caught.value.argument == "gradient"
        with pytest.raises(LossError):
            layer.hessian(self.X, lambda F: F)
        monkeypatch.setattr("curvoscope.checks.memory_budget", lambda: 1)
        with pytest.raises(MemoryLimitError, match="Jacobian"):
            layer.jacobian(self.X)


def test_an_epsilon_that_is_too_small_for_half_precision():
    rows = torch.tensor([[1e-3, -1e-3]]).half()
    with pytest.raises(RangeError, match=r"^eps: .*overflows in torch\.float16; convert to float32"):
        cv.exact.LayerNorm(torch.ones(2).half(), None, 1e-5)(rows)
