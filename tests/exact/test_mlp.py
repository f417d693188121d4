"""Linear networks against float64 autodiff: every block and part, and the formulas of section 2 of the paper."""

import itertools

import pytest
import torch
from hypothesis import given, settings

import curvoscope as cv
import layer_cases as layers
from curvoscope.errors import DtypeError, EmptyError, LossError, MemoryLimitError, NonFiniteError, ShapeError
from curvoscope.operators.kronecker import KroneckerSum, Single, Term
from layer_cases import REFUSED, largest
from layer_cases import LinearCase as Case
from layer_cases import linear_cases as cases
from loss_cases import LOSSES
from matrices import within


class TestAgainstAutodiff:
    @settings(max_examples=60, deadline=None)
    @given(options=cases)
    def test_every_block_and_part(self, options):
        case = Case(**options)
        H, truth = case.hessian(), case.truth()
        assert H.names == list(case.parameters)
        assert H.shapes == {name: tuple(weight.shape) for name, weight in case.parameters.items()}
        layers.assert_blocks(H, truth, largest(truth))

    @settings(max_examples=30, deadline=None)
    @given(options=cases)
    def test_blocks_with_the_input(self, options):
        case = Case(**options)
        H, truth = case.hessian(wrt_input=True), case.truth(wrt_input=True)
        assert H.names[-1] == "X" and H.shapes["X"] == (case.X[..., 0].numel(), case.X.shape[-1])
        layers.assert_blocks(H, truth, largest(truth))

    @settings(max_examples=30, deadline=None)
    @given(options=cases)
    def test_products(self, options):
        case = Case(**options)
        H, truth = case.hessian(wrt_input=True), case.truth(wrt_input=True)
        layers.assert_products(case, H, truth, largest(truth))

    @settings(max_examples=30, deadline=None)
    @given(options=cases)
    def test_jacobian_and_forward_pass(self, options):
        case = Case(**options)
        layers.assert_forward_and_jacobian(case, case.truth(wrt_input=True))

    @settings(max_examples=30, deadline=None)
    @given(options=cases)
    def test_contractions_without_entries(self, options):
        case = Case(**options)
        H, truth = case.hessian(), case.truth()
        for part, blocks in ((H.outer, truth.outer), (H.total, truth.hessian)):
            for row, column in itertools.combinations_with_replacement(H.names, 2):
                dense = blocks[row, column]
                layers.assert_contractions(part[row, column], dense, 1e-8 + dense.abs().sum(), row == column)

    @pytest.mark.parametrize("kind", LOSSES)
    def test_eigenvalues_with_fewer_tokens_than_inputs(self, kind):
        case = Case([7, 3, 2], (2,), kind)
        H, truth = case.hessian(), case.truth()
        for name in H.names:
            expected = torch.linalg.eigvalsh(truth.outer[name, name])
            layers.assert_close(H.outer[name].eigenvalues(), expected)
            layers.assert_close(H[name].eigenvalues(), expected)

    @pytest.mark.parametrize("kind", LOSSES)
    def test_products_with_blocks_whose_cores_are_not_kept(self, kind, monkeypatch):
        case = Case([3, 4, 2, 3], (2, 3), kind)
        H, truth = case.hessian(wrt_input=True), case.truth(wrt_input=True)
        layers.assert_products_without_cores(case, H, truth, largest(truth), monkeypatch)


class TestStructure:
    @pytest.mark.parametrize("kind", LOSSES)
    @settings(max_examples=8, deadline=None)
    @given(options=cases)
    def test_exact_identities(self, options, kind):
        case = Case(**{**options, "kind": kind})
        H = case.hessian(wrt_input=True)
        for name in H.names:
            assert H.functional[name].terms == ()
            assert torch.equal(H[name].dense(), H.outer[name].dense())
        layers.assert_identities(H)

    def test_blocks_are_kronecker_sums(self):
        for kind, terms in (("mse", Single), ("cross-entropy", Term), ("token", Term), ("batch", Term)):
            H = Case([3, 4, 2], (5,), kind).hessian()
            for key in ("W1", ("W1", "W2")):
                assert isinstance(H.outer[key], KroneckerSum)
                assert [type(term) for term in H.outer[key].terms] == [terms]
            assert [type(term) for term in H.functional["W1", "W2"].terms] == [Single]

    @pytest.mark.parametrize("depth", [1, 2, 4])
    def test_formula_of_section_2(self, depth):
        """For columns x and the loss E|F - y|^2 / 2, H_o(W^i, W^i) = B^T B (x) C Sigma C^T; here as rows."""
        case = Case([3, 4, 2, 5, 3][: depth + 1], (7,), "mse")
        Y, tokens = case.loss.Y, case.X.shape[0]
        H = case.layer.hessian(case.X, lambda F: (F - Y).square().sum() / (2 * tokens))
        columns = [weight.T for weight in case.weights]  # W^1, ..., W^D
        Sigma = case.X.T @ case.X / tokens
        for i in range(depth):
            B, C = torch.eye(columns[-1].shape[0], dtype=torch.float64), torch.eye(3, dtype=torch.float64)
            for weight in reversed(columns[i + 1 :]):
                B = B @ weight
            for weight in columns[:i]:
                C = weight @ C
            # vec of W^i = W_i^T: B^T B on the output's index, C Sigma C^T on the input's
            a, p = case.weights[i].shape
            printed = torch.kron(B.T @ B, C @ Sigma @ C.T).view(p, a, p, a).permute(1, 0, 3, 2)
            layers.assert_close(H[f"W{i + 1}"].dense().view(a, p, a, p), printed)

    def test_gauge(self):
        """F does not see W_1 -> W_1 E, W_2 -> E^-1 W_2: H (W_1 D, -D W_2) = (-g_1 D^T, D^T g_2)."""
        case = Case([30, 40, 20], (3, 50), "cross-entropy")
        W1, W2 = (weight.clone().requires_grad_() for weight in case.weights)
        g1, g2 = torch.autograd.grad(case.loss(case.X @ W1 @ W2), (W1, W2))
        D = case.normal(40, 40)
        direction = torch.cat([(case.weights[0] @ D).flatten(), -(D @ case.weights[1]).flatten()])
        expected = torch.cat([-(g1 @ D.T).flatten(), (D.T @ g2).flatten()])
        layers.assert_close(case.hessian() @ direction, expected)

    def test_two_layers_have_eigenvalue_pairs(self):
        """The functional part of two layers has eigenvalues +-sigma(B), d_1 times each, with B = X^T G."""
        case = Case([3, 4, 5], (6,), "token")
        gradient = torch.func.grad(case.loss)(case.layer(case.X))
        values = torch.linalg.svdvals(case.X.T @ gradient).repeat_interleave(4)
        zeros = torch.zeros(3 * 4 + 4 * 5 - 2 * len(values), dtype=torch.float64)
        expected = torch.cat([values, -values, zeros]).sort().values
        layers.assert_close(case.hessian().functional.eigenvalues(), expected)

    def test_one_layer_is_least_squares(self):
        case = Case([4, 3], (6,), "mse")
        expected = 2 / 18 * torch.kron(case.X.T @ case.X, torch.eye(3, dtype=torch.float64))
        layers.assert_close(case.hessian().dense(), expected)

    def test_dtype_is_kept(self):
        case = Case([3, 4, 2], (2, 5), "mse")
        layer = cv.exact.LinearMLP([weight.float() for weight in case.weights])
        H = layer.hessian(case.X.float(), cv.losses.MSE(case.loss.Y.float()))
        assert H.dense().dtype == torch.float32
        assert (H.dense() - case.hessian().dense()).abs().max() < 1e-5

    def test_long_batches_in_chunks(self):
        """A limit on memory changes how the sum over tokens is cut, not the sum."""
        case = Case([5, 6, 4], (8, 64), "cross-entropy")
        block = case.hessian().outer["W1"]
        whole, cut = block.frobenius_norm(), within(200_000, block.frobenius_norm)
        assert abs(whole - torch.linalg.norm(block.dense())) < 1e-10 * whole
        assert abs(cut - whole) < 1e-10 * whole


class TestErrors:
    W = torch.ones(3, 2, dtype=torch.float64)
    X = torch.ones(5, 3, dtype=torch.float64)

    @pytest.mark.parametrize(
        ("weights", "error", "argument"),
        [
            ([], EmptyError, "weights"),
            ([W, W], ShapeError, "W2"),
            ([W, torch.ones(2, 3)], DtypeError, "W2"),
            ([torch.ones(3, 2, dtype=torch.int64)], DtypeError, "W1"),
            ([W, W[0]], ShapeError, "W2"),
            ([W, torch.full((2, 2), torch.nan, dtype=torch.float64)], NonFiniteError, "W2"),
            ([W, torch.ones(2, 0, dtype=torch.float64)], EmptyError, "W2"),
        ],
    )
    def test_weights(self, weights, error, argument):
        with pytest.raises(error) as caught:
            cv.exact.LinearMLP(weights)
        assert caught.value.argument == argument

    @pytest.mark.parametrize(
        ("X", "error"), [*REFUSED, (torch.full((5, 3), 1e308, dtype=torch.float64), NonFiniteError)]
    )
    @pytest.mark.parametrize("method", ["__call__", "jacobian", "hessian"])
    def test_input(self, X, error, method):
        layers.assert_input_refused(cv.exact.LinearMLP([self.W]), method, X, error)

    def test_targets_and_losses(self):
        layer = cv.exact.LinearMLP([self.W])
        with pytest.raises(ShapeError) as caught:
            layer.hessian(self.X, cv.losses.MSE(torch.ones(5, 3, dtype=torch.float64)))
        assert caught.value.argument == "Y"
        with pytest.raises(LossError):
            layer.hessian(self.X, lambda F: F)

    def test_memory(self):
        layer = cv.exact.LinearMLP([self.W, self.W.T])
        with pytest.raises(MemoryLimitError, match="dense block"):
            within(100, layer.hessian(self.X, torch.sum).dense)

    def test_one_tensor_is_no_list(self):
        # Runtime type checks of the test run would see it first; the class says it to everyone else.
        with pytest.raises(Exception, match="weights"):
            cv.exact.LinearMLP(self.W)


@pytest.mark.parametrize("ask", ["hessian", "jacobian"])
def test_an_integer_input(ask):
    layer, X = cv.exact.LinearMLP([torch.eye(2).double()]), torch.eye(2, dtype=torch.long)
    with pytest.raises(DtypeError, match=r"^X: expected floating point"):
        layer.jacobian(X) if ask == "jacobian" else layer.hessian(X, cv.losses.MSE(torch.eye(2).double()))
