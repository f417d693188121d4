"""The spectrum of the scalar model against float64 autodiff and against attention of width one."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jacfwd, jacrev

import curvoscope as cv
from curvoscope.errors import DtypeError, EmptyError, LossError, MaskError, NonFiniteError, ShapeError

LOSSES = ["mse", "logistic", "sequence", "batch", "linear"]
MASKS = ["none", "causal", "boolean", "sink"]
RELATIONS = ["any", "equal", "opposite", "no query", "no key", "neither", "orthogonal"]
TOLERANCE = 1e-10


class Case:
    """A scalar model, its input, mask and loss, and its function of theta = (w_Q, w_K, w_V) for autodiff."""

    def __init__(self, k, shape, mask="none", loss="mse", relation="any", seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        w_Q, w_K = self.normal(k), self.normal(k)
        if relation == "orthogonal":
            w_K = w_K - w_Q * (w_Q @ w_K) / (w_Q @ w_Q)
        self.w_Q, self.w_K = {
            "any": (w_Q, w_K),
            "equal": (w_Q, w_Q),
            "opposite": (w_Q, -w_Q),
            "no query": (0 * w_Q, w_K),
            "no key": (w_Q, 0 * w_K),
            "neither": (0 * w_Q, 0 * w_K),
            "orthogonal": (w_Q, w_K),
        }[relation]
        self.k, self.w_V = k, self.normal()
        self.x, self.y = self.normal(*shape), self.normal(*shape)
        length = shape[-1]
        self.causal = mask == "causal"
        self.mask = {
            "none": None,
            "causal": None,
            "boolean": torch.rand(length, length, generator=self.generator) < 0.5,
            "sink": torch.zeros(length, length, dtype=torch.float64),
        }[mask]
        if mask == "boolean":
            self.mask |= torch.eye(length, dtype=torch.bool)
        if mask == "sink":
            self.mask[:, 0] = 1.5
        self.loss = {
            "mse": lambda f: (f - self.y).square().mean(),
            "logistic": lambda f: torch.nn.functional.softplus(-f * self.y.sign()).mean(),
            "sequence": lambda f: (f.sum(-1) - 1).pow(4).mean() + (f * self.y).logsumexp(-1).sum(),
            "batch": lambda f: (f * self.y).sum().exp() + f.pow(3).mean(),
            "linear": lambda f: (f * self.y).sum(),
        }[loss]
        self.is_mse = loss == "mse"

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    @property
    def layer(self):
        return cv.exact.ScalarAttention(self.w_Q, self.w_K, self.w_V, causal=self.causal)

    def spectrum(self):
        if self.is_mse:
            return self.layer.spectrum(self.x, self.y, mask=self.mask)
        return self.layer.spectrum(self.x, loss=self.loss, mask=self.mask)

    @property
    def theta(self):
        return torch.cat([self.w_Q, self.w_K, self.w_V[None]])

    def attention(self, theta):
        w_Q, w_K = theta[: self.k], theta[self.k : 2 * self.k]
        query, key = self.x[..., None] * w_Q, self.x[..., None] * w_K
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.k)
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        elif self.mask is not None and self.mask.dtype == torch.bool:
            scores = scores.masked_fill(~self.mask, -math.inf)
        elif self.mask is not None:
            scores = scores + self.mask
        return scores.softmax(-1)

    def output(self, theta):
        return theta[-1] * (self.attention(theta) @ self.x[..., None])[..., 0]

    def dense(self):
        return jacfwd(grad(lambda theta: self.loss(self.output(theta))))(self.theta)

    def gauss_newton(self):
        J = jacrev(self.output)(self.theta).flatten(0, -2)
        f = self.output(self.theta)
        S = jacfwd(grad(self.loss))(f).reshape(f.numel(), f.numel())
        return J.T @ S @ J


cases = st.fixed_dictionaries(
    {
        "k": st.integers(1, 6),
        "shape": st.lists(st.integers(1, 5), min_size=1, max_size=2),
        "mask": st.sampled_from(MASKS),
        "loss": st.sampled_from(LOSSES),
        "relation": st.sampled_from(RELATIONS),
        "seed": st.integers(0, 10**6),
    }
)


def assert_spectrum(case):
    found, dense = case.spectrum(), case.dense()
    expected, scale = torch.linalg.eigvalsh(dense), 1e-8 + dense.abs().max()
    assert found.eigenvalues.shape == (2 * case.k + 1,)
    assert (found.eigenvalues - expected).abs().max() <= TOLERANCE * scale
    assert abs(found.trace - dense.trace()) <= TOLERANCE * scale
    return found, scale


class TestAgainstAutodiff:
    @settings(max_examples=150, deadline=None)
    @given(options=cases)
    def test_all_eigenvalues(self, options):
        case = Case(**options)
        found, scale = assert_spectrum(case)
        assert found.multiplicity == case.k - 1 and found.bulk >= 0
        assert torch.equal(found.outliers, found.outliers.sort().values)
        assert abs(found.determinant - found.outliers.prod()) <= TOLERANCE * scale**3 + 1e-20
        truth = torch.linalg.eigvalsh(case.gauss_newton())
        largest = truth[truth.abs().argsort(descending=True)[:2]].sort().values
        assert (found.gauss_newton - largest).abs().max() <= TOLERANCE * scale
        assert (case.layer(case.x, case.mask) - case.output(case.theta)).abs().max() <= 1e-13 * scale.clamp_min(1)

    @pytest.mark.parametrize("relation", RELATIONS)
    @pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
    def test_degenerate_weights(self, k, relation):
        for mask in MASKS:
            assert_spectrum(Case(k, (2, 5), mask, relation=relation, seed=k))

    @pytest.mark.parametrize("k", [1, 2, 5])
    def test_no_value_and_one_token(self, k):
        case = Case(k, (4,))
        case.w_V = case.w_V * 0
        assert_spectrum(case)
        case = Case(k, (1,))
        found, _ = assert_spectrum(case)
        assert found.bulk == 0 and not found.variance.any()  # the attention cannot move

    def test_bulk_is_an_eigenvalue_with_its_multiplicity(self):
        case = Case(6, (3, 7), "causal", "logistic")
        found, dense = case.spectrum(), case.dense()
        values = torch.linalg.eigvalsh(dense)
        for sign in (1, -1):
            assert int(((values - sign * found.bulk).abs() < 1e-10 * found.bulk).sum()) == found.multiplicity == 5

    def test_outliers_are_on_three_directions(self):
        """H maps span{e_V, (p; p), (m; -m)}, p = w_K + w_Q and m = w_K - w_Q, to itself."""
        case = Case(5, (4,), loss="batch")
        p, m = case.w_K + case.w_Q, case.w_K - case.w_Q
        basis = torch.zeros(11, 3, dtype=torch.float64)
        basis[:10, 0] = torch.cat([p, p]) / (math.sqrt(2) * p.norm())
        basis[:10, 1] = torch.cat([-m, m]) / (math.sqrt(2) * m.norm())
        basis[10, 2] = 1
        restricted = basis.T @ case.dense() @ basis
        assert (case.dense() @ basis - basis @ restricted).abs().max() <= TOLERANCE * restricted.abs().max()
        outliers = case.spectrum().outliers
        assert (outliers - torch.linalg.eigvalsh(restricted)).abs().max() <= TOLERANCE * outliers.abs().max()


class TestAgainstTheLayer:
    @settings(max_examples=40, deadline=None)
    @given(options=cases)
    def test_attention_of_width_one(self, options):
        case = Case(**options)
        layer = cv.exact.SelfAttention(case.w_Q[None], case.w_K[None], case.w_V[None, None], causal=case.causal)
        H = layer.hessian(case.x[..., None], lambda F: case.loss(F[..., 0]), case.mask)
        found, scale = case.spectrum(), 1e-8 + H.dense().abs().max()
        assert (found.eigenvalues - H.total.eigenvalues()).abs().max() <= TOLERANCE * scale
        moments = layer.moments(case.x[..., None], case.mask)
        for scalar, general in (
            (found.mean, moments.M1[..., 0]),
            (found.variance, moments.M2[..., 0, 0]),
            (found.third_moment, moments.M3[..., 0, 0]),
        ):
            assert scalar.shape == case.x.shape
            assert (scalar - general).abs().max() <= 1e-12 * (1 + general.abs().max())

    def test_cross_entropy(self):
        """Tokens that are numbers, classified through an unembedding of width 1."""
        case = Case(3, (2, 4))
        U = case.normal(1, 5)
        loss = cv.losses.CrossEntropy(torch.randint(0, 5, (2, 4), generator=case.generator), U)
        found = case.layer.spectrum(case.x, loss=loss)
        case.loss = lambda f: torch.nn.functional.cross_entropy(
            (f[..., None] @ U).flatten(0, 1), loss.targets.flatten()
        )
        expected = torch.linalg.eigvalsh(case.dense())
        assert (found.eigenvalues - expected).abs().max() <= TOLERANCE * expected.abs().max()

    def test_targets_and_their_loss_are_the_same(self):
        case = Case(3, (2, 4))
        by_targets = case.layer.spectrum(case.x, case.y)
        for loss in (cv.losses.MSE(case.y[..., None]), lambda f: (f - case.y).square().mean()):
            assert torch.allclose(by_targets.eigenvalues, case.layer.spectrum(case.x, loss=loss).eigenvalues)


class TestModel:
    def test_moments_are_those_of_the_rows(self):
        case = Case(2, (6,), "sink")
        found, A = case.spectrum(), case.attention(case.theta)
        for row in range(6):
            mean = (A[row] * case.x).sum()
            assert torch.isclose(found.mean[row], mean)
            assert torch.isclose(found.variance[row], (A[row] * (case.x - mean) ** 2).sum())
            assert torch.isclose(found.third_moment[row], (A[row] * (case.x - mean) ** 3).sum())

    def test_a_sink_takes_the_bulk_away(self):
        """In the limit of one-hot rows variance and third moment vanish; 2 x_1^2 remains."""
        case = Case(4, (6,), "sink")
        case.mask[:, 0] = 200.0
        values = case.spectrum().eigenvalues
        expected = torch.zeros(9, dtype=torch.float64)
        expected[-1] = 2 * case.x[0] ** 2
        assert (values - expected).abs().max() < 1e-12

    def test_wide_keys_need_no_wide_matrix(self):
        """k = 10^6: 4 10^12 entries, but the weights enter through s alone; autodiff over (w_V, s)."""
        case = Case(10**6, (5,))
        found, k = case.spectrum(), case.k

        def loss(at):
            A = (at[1] * torch.outer(case.x, case.x)).softmax(-1)
            return case.loss(at[0] * (A @ case.x))

        at = torch.stack([case.w_V, case.w_Q @ case.w_K / math.sqrt(k)])
        slope, curvature = grad(loss)(at), jacfwd(grad(loss))(at)
        trace = curvature[0, 0] + curvature[1, 1] * (case.w_Q.square().sum() + case.w_K.square().sum()) / k
        assert math.isclose(found.bulk, abs(slope[1]) / math.sqrt(k), rel_tol=1e-10)
        assert math.isclose(found.trace, trace, rel_tol=1e-10)
        assert math.isclose(found.outliers.sum(), trace, rel_tol=1e-10)
        assert found.eigenvalues.shape == (2 * k + 1,)

    def test_batches_add_up(self):
        case = Case(3, (4, 5))
        single = [case.layer.spectrum(x, y) for x, y in zip(case.x, case.y, strict=True)]
        assert math.isclose(case.spectrum().trace, sum(found.trace for found in single) / 4, rel_tol=1e-12)

    def test_value_as_a_number_and_dtype(self):
        case = Case(3, (5,))
        expected = case.spectrum()
        number = cv.exact.ScalarAttention(case.w_Q, case.w_K, float(case.w_V)).spectrum(case.x, case.y)
        assert torch.equal(number.eigenvalues, expected.eigenvalues)
        single = cv.exact.ScalarAttention(case.w_Q.float(), case.w_K.float(), float(case.w_V))
        found = single.spectrum(case.x.float(), case.y.float())
        assert found.eigenvalues.dtype == found.mean.dtype == torch.float32
        assert (found.eigenvalues - expected.eigenvalues).abs().max() < 1e-5
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.bulk = 0.0


class TestErrors:
    w = torch.ones(3, dtype=torch.float64)
    x = torch.ones(4, dtype=torch.float64)

    @pytest.mark.parametrize(
        ("weights", "error", "argument"),
        [
            ((torch.ones(3, 1, dtype=torch.float64), w, 1.0), ShapeError, "w_Q"),
            ((w, w[:2], 1.0), ShapeError, "w_K"),
            ((w, w, w), ShapeError, "w_V"),
            ((w, w.float(), 1.0), DtypeError, "w_K"),
            ((w.long(), w, 1.0), DtypeError, "w_Q"),
            ((w, w, torch.tensor(1.0)), DtypeError, "w_V"),
            ((w, w, math.nan), NonFiniteError, "w_V"),
            ((w, w * math.inf, 1.0), NonFiniteError, "w_K"),
            ((w * 1e200, w * 1e200, 1.0), NonFiniteError, "w_Q . w_K"),
            ((w[:0], w[:0], 1.0), EmptyError, "w_Q"),
        ],
    )
    def test_weights(self, weights, error, argument):
        with pytest.raises(error) as caught:
            cv.exact.ScalarAttention(*weights)
        assert caught.value.argument == argument

    @pytest.mark.parametrize(
        ("arguments", "error", "argument"),
        [
            ((torch.ones(2, 4, 1, dtype=torch.float64), x), ShapeError, "x"),
            ((x[:0], x), EmptyError, "x"),
            ((x.float(), x), DtypeError, "x"),
            ((x * math.nan, x), NonFiniteError, "x"),
            ((x, x[:3]), ShapeError, "y"),
            ((x, x.float()), DtypeError, "y"),
            ((x, None), LossError, "y"),
        ],
    )
    def test_inputs(self, arguments, error, argument):
        with pytest.raises(error) as caught:
            cv.exact.ScalarAttention(self.w, self.w, 1.0).spectrum(*arguments)
        assert caught.value.argument == argument

    def test_two_losses_at_once(self):
        layer = cv.exact.ScalarAttention(self.w, self.w, 1.0)
        with pytest.raises(LossError) as caught:
            layer.spectrum(self.x, self.x, loss=torch.sum)
        assert caught.value.argument == "loss"

    def test_masks(self):
        layer = cv.exact.ScalarAttention(self.w, self.w, 1.0)
        with pytest.raises(MaskError):
            layer.spectrum(self.x, self.x, mask=torch.zeros(4, 4, dtype=torch.bool))
        with pytest.raises(ShapeError) as caught:
            layer.spectrum(self.x, self.x, mask=torch.ones(3, 3, dtype=torch.bool))
        assert caught.value.argument == "mask"

    def test_overflow(self):
        layer = cv.exact.ScalarAttention(self.w, 0 * self.w, 1.0)
        x = torch.tensor([-1e120, 1e120], dtype=torch.float64)
        with pytest.raises(NonFiniteError) as caught:
            layer.spectrum(x, 0 * x)
        assert caught.value.argument == "x"
