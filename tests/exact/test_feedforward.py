"""Feed-forward layers, plain and gated, against float64 autodiff: every block, part, product and contraction."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from torch.func import grad, vmap

import curvoscope as cv
import layer_cases as layers
from curvoscope.errors import (
    BlockNameError,
    DtypeError,
    EmptyError,
    LossError,
    MemoryLimitError,
    NonFiniteError,
    RangeError,
    ShapeError,
)
from curvoscope.exact.activations import ACTIVATIONS
from curvoscope.operators.kronecker import KroneckerSum, Single, Term
from layer_cases import PRIMITIVES, REFUSED, TOLERANCE, largest, parts
from layer_cases import FeedForwardCase as Case
from layer_cases import feedforward_cases as cases
from loss_cases import LOSSES
from matrices import within

SMOOTH = ["gelu", "gelu_tanh", "silu"]


class TestActivations:
    @pytest.mark.parametrize("name", list(PRIMITIVES))
    def test_derivatives(self, name):
        h = torch.linspace(-6, 6, 241, dtype=torch.float64) + 1e-3
        value, first, second = ACTIVATIONS[name](h)
        layers.assert_close(value, PRIMITIVES[name](h), 1)
        layers.assert_close(first, vmap(grad(PRIMITIVES[name]))(h), 1)
        if name == "relu":
            assert second is None
        else:
            layers.assert_close(second, vmap(grad(grad(PRIMITIVES[name])))(h), 1)

    @pytest.mark.parametrize(
        ("name", "first", "second"), [("gelu", 1.1289, 0.7979), ("gelu_tanh", 1.1290, 0.7979), ("silu", 1.0998, 0.5)]
    )
    def test_largest_derivatives(self, name, first, second):
        _, slope, bend = ACTIVATIONS[name](torch.linspace(-10, 10, 200001, dtype=torch.float64))
        assert abs(slope.abs().max() - first) < 1e-4
        assert abs(bend.abs().max() - second) < 1e-4

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("name", SMOOTH)
    def test_far_out(self, name, dtype):
        """Past the reach of the density an activation is 0 or the identity, also where h³ overflows."""
        far = torch.tensor([1e3, 1e20, torch.finfo(dtype).max / 4], dtype=dtype)
        for h, slope in ((far, 1.0), (-far, 0.0)):
            found = ACTIVATIONS[name](h)
            for values, expected in zip(found, (slope * h, slope + 0 * h, 0 * h), strict=True):
                assert torch.allclose(values, expected, atol=0.0)


class TestAgainstAutodiff:
    @settings(max_examples=25)
    @given(options=cases)
    def test_every_block_and_part(self, options):
        case = Case(**options)
        H, truth = case.hessian(), case.truth()
        assert H.names == [*case.parameters, "X"]
        for name, values in case.parameters.items():
            assert H.shapes[name] == (tuple(values.shape) if values.ndim == 2 else (1, len(values)))
        assert H.shapes["X"] == (case.X[..., 0].numel(), case.X.shape[-1])
        layers.assert_blocks(H, truth, largest(truth))

    @settings(max_examples=12)
    @given(options=cases)
    def test_chosen_blocks(self, options):
        case = Case(**options)
        truth = case.truth()
        for options in ({"wrt_input": False}, {"biases": False}):
            H = case.hessian(**options)
            biases = options.get("biases", True)
            names = [name for name in case.parameters if biases or name.startswith("W")]
            assert H.names == (names if "wrt_input" in options else [*names, "X"])
            for row, column in itertools.product(H.names, repeat=2):
                layers.assert_close(H[row, column].dense(), truth.hessian[row, column], largest(truth))

    @settings(max_examples=20)
    @given(options=cases)
    def test_products(self, options):
        case = Case(**options)
        truth = case.truth()
        layers.assert_products(case, case.hessian(), truth, largest(truth))

    @settings(max_examples=12)
    @given(options=cases)
    def test_contractions(self, options):
        case = Case(**options)
        H, truth = case.hessian(), case.truth()
        for part, blocks in parts(H, truth):
            for row, column in itertools.combinations_with_replacement(H.names, 2):
                block, dense = part[row, column], blocks[row, column]
                size = largest(truth) * dense.numel()
                # the norm of a block that is zero by cancellation comes from its square, to half the digits
                layers.assert_contractions(block, dense, size, row == column, norm=1e-7)
                assert abs(block.frobenius_norm() ** 2 - dense.square().sum()) <= TOLERANCE * size**2

    @settings(max_examples=20)
    @given(options=cases)
    def test_forward_pass_and_jacobian(self, options):
        case = Case(**options)
        layers.assert_forward_and_jacobian(case, case.truth())

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("kind", LOSSES)
    def test_products_with_blocks_whose_cores_are_not_kept(self, kind, gated, monkeypatch):
        case = Case((3, 4, 2), (2, 2), "silu", kind, gated)
        truth = case.truth()
        layers.assert_products_without_cores(case, case.hessian(), truth, largest(truth), monkeypatch)


class TestStructure:
    @settings(max_examples=12)
    @given(options=cases)
    def test_exact_identities(self, options):
        case = Case(**options)
        H = case.hessian()
        layers.assert_identities(H)
        for row, column in itertools.combinations_with_replacement(H.names, 2):
            if "b2" in (row, column) or row == column == "W2":
                assert not H.functional[row, column].dense().any()

    @pytest.mark.parametrize("kind", LOSSES)
    @pytest.mark.parametrize("gated", [False, True])
    def test_relu_has_no_functional_diagonal(self, kind, gated):
        H = Case((3, 5, 2), (2, 4), "relu", kind, gated).hessian()
        for name in H.names[:-1]:
            assert H.functional[name].terms == ()
            assert not H.functional[name].dense().any()
            assert torch.equal(H[name].dense(), H.outer[name].dense())
        assert H.functional["W1", "W2"].dense().abs().max() > 0
        if not gated:
            assert not H.functional["W1", "b1"].dense().any()
            assert not H.functional["X"].dense().any()

    @pytest.mark.parametrize("activation", SMOOTH)
    def test_smooth_activations_have_one_by_hidden_unit(self, activation):
        """H_f(W1, W1)[ae, bg] = 0 unless e = g, and is not small there."""
        H = Case((3, 5, 2), (2, 4), activation).hessian()
        block = H.functional["W1"].dense().view(3, 5, 3, 5)
        within = torch.eye(5, dtype=torch.bool)[:, None, :].expand(5, 3, 5).expand(3, 5, 3, 5)
        assert not block[~within].any()
        assert H.functional["W1"].frobenius_norm() > 0.02 * H.outer["W1"].frobenius_norm()

    def test_blocks_are_kronecker_sums(self):
        for kind, plain in (("mse", Single), ("cross-entropy", Term), ("batch", Term)):
            H = Case((3, 4, 2), (5,), "gelu", kind).hessian(wrt_input=False)
            for row, column in itertools.combinations_with_replacement(H.names, 2):
                assert isinstance(H.outer[row, column], KroneckerSum)
                behind = {row, column} <= {"W2", "b2"}
                assert [type(term) for term in H.outer[row, column].terms] == [plain if behind else Term]

    @pytest.mark.parametrize("kind", ["mse", "cross-entropy", "batch"])
    def test_relu_gauge(self, kind):
        """The layer does not see (W1, b1) -> (W1, b1) E, W2 -> E^-1 W2 for a positive diagonal E."""
        case = Case((10, 20, 7), (3, 5), "relu", kind)
        leaves = {name: values.clone().requires_grad_() for name, values in case.parameters.items()}
        g1, gb, g2 = torch.autograd.grad(case.loss(case.network(leaves)), [leaves[n] for n in ("W1", "b1", "W2")])
        D, W = case.normal(20), case.parameters
        zero = torch.zeros(7, dtype=torch.float64)
        direction = torch.cat([(W["W1"] * D).flatten(), W["b1"] * D, -(D[:, None] * W["W2"]).flatten(), zero])
        expected = torch.cat([-(g1 * D).flatten(), -gb * D, (D[:, None] * g2).flatten(), zero])
        layers.assert_close(case.hessian(wrt_input=False) @ direction, expected)

    def test_bias_is_a_constant_feature(self):
        """x -> [x, 1] and W1 -> [W1; b1]: the blocks of b1 are the last rows of the wider W1."""
        case = Case((3, 4, 2), (6,), "silu", "cross-entropy")
        W = case.parameters
        wide = cv.exact.FeedForward(torch.cat([W["W1"], W["b1"][None]]), None, W["W2"], W["b2"], "silu")
        H = wide.hessian(torch.cat([case.X, torch.ones(6, 1, dtype=torch.float64)], 1), case.loss)
        block = H["W1"].dense()
        layers.assert_close(case.hessian()["W1", "b1"].dense(), block[:12, 12:])
        layers.assert_close(case.hessian()["b1"].dense(), block[12:, 12:])

    def test_tokens_do_not_mix(self):
        """The input's block is kept by token, so that a long input costs no square matrix."""
        block = Case((4, 8, 3), (3, 1000), "gelu", "cross-entropy").hessian()["X"]
        assert block.blocks.shape == (3000, 4, 4)
        values = block.eigenvalues()
        assert abs(values.square().sum().sqrt() - block.frobenius_norm()) < 1e-10 * block.frobenius_norm()

    def test_contractions_at_a_larger_size(self):
        """Trace and norm of (W1, W1) as printed: no entry is needed."""
        case = Case((6, 24, 5), (2, 30), "gelu", "mse")
        H, W = case.hessian(), case.parameters
        x = case.X.flatten(0, 1)
        h = (x @ W["W1"] + W["b1"]).requires_grad_()
        slope = torch.autograd.grad(torch.nn.functional.gelu(h).sum(), h, create_graph=True)[0]
        bend = torch.autograd.grad(slope.sum(), h)[0]
        slope, c = slope.detach(), 2 / (60 * 5)
        q = bend * (c * (case.layer(case.X) - case.loss.Y).flatten(0, 1) @ W["W2"].T)
        cores = c * slope[:, :, None] * (W["W2"] @ W["W2"].T) * slope[:, None, :] + torch.diag_embed(q)
        trace = (x.square().sum(1) * cores.diagonal(dim1=1, dim2=2).sum(1)).sum()
        squared = ((x @ x.T).square() * torch.einsum("tef,uef->tu", cores, cores)).sum()
        assert abs(H["W1"].trace() - trace) < 1e-10 * trace
        assert abs(H["W1"].frobenius_norm() ** 2 - squared) < 1e-10 * squared

    def test_dtype_is_kept(self):
        case = Case((3, 4, 2), (2, 3), "gelu_tanh", "mse", gated=True)
        layer = cv.exact.FeedForward(
            **{name: values.float() for name, values in case.parameters.items()}, activation="gelu_tanh"
        )
        H = layer.hessian(case.X.float(), cv.losses.MSE(case.loss.Y.float()), wrt_input=True)
        assert H.dense().dtype == torch.float32
        assert (H.dense() - case.hessian().dense()).abs().max() < 1e-5


class TestErrors:
    W1, W2 = torch.ones(3, 4, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64)
    b1, b2 = torch.ones(4, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    X = torch.ones(5, 3, dtype=torch.float64)

    @pytest.mark.parametrize(
        ("changed", "error", "argument"),
        [
            ({"W1": b1}, ShapeError, "W1"),
            ({"W2": W1}, ShapeError, "W2"),
            ({"W2": W2[0]}, ShapeError, "W2"),
            ({"W2": W2.float()}, DtypeError, "W2"),
            ({"W1": torch.ones(3, 4, dtype=torch.int64)}, DtypeError, "W1"),
            ({"W1": W1[:0]}, EmptyError, "W1"),
            ({"b1": b2}, ShapeError, "b1"),
            ({"b1": b1[None]}, ShapeError, "b1"),
            ({"b2": b1}, ShapeError, "b2"),
            ({"b2": b2 * torch.nan}, NonFiniteError, "b2"),
            ({"W_gate": W1[:, :3]}, ShapeError, "W_gate"),
            ({"W_gate": W1, "b_gate": b2}, ShapeError, "b_gate"),
            ({"b_gate": b1}, RangeError, "b_gate"),
            ({"activation": "swish"}, RangeError, "activation"),
        ],
    )
    def test_weights(self, changed, error, argument):
        with pytest.raises(error) as caught:
            cv.exact.FeedForward(**{"W1": self.W1, "b1": self.b1, "W2": self.W2, "b2": self.b2, **changed})
        assert caught.value.argument == argument

    @pytest.mark.parametrize(
        ("X", "error"),
        [
            *REFUSED,
            (torch.full((5, 3), 1e308, dtype=torch.float64), NonFiniteError),
            (torch.full((5, 3), -1e308, dtype=torch.float64), NonFiniteError),
        ],
    )
    @pytest.mark.parametrize("method", ["__call__", "jacobian", "hessian"])
    def test_input(self, X, error, method):
        layers.assert_input_refused(cv.exact.FeedForward(self.W1, self.b1, self.W2, self.b2), method, X, error)

    def test_an_overflow_names_the_product(self):
        one, X = torch.eye(3).double(), torch.full((5, 3), 1e300, dtype=torch.float64)
        with pytest.raises(NonFiniteError, match=r"^X: X @ W1 overflows; scale"):
            cv.exact.FeedForward(1e10 * one, None, one, None, activation="relu")(X)
        with pytest.raises(NonFiniteError, match=r"^X: z @ W2 \+ b2 overflows; scale"):
            cv.exact.FeedForward(one, None, 1e10 * one, one[0], activation="relu")(X)

    def test_blocks_answer_to_their_names_in_a_network(self):
        H = cv.exact.FeedForward(self.W1, None, self.W2, self.b2, W_gate=self.W1).hessian(self.X, torch.sum)
        assert H.names == ["W1", "W2", "b2", "W_gate"]
        for matrix in (H, H.total, H.outer, H.functional):
            assert matrix["up"] is matrix["W1"] and matrix["gate", "b_down"].shape == matrix["W_gate", "b2"].shape
        assert H.outer["up", "down"] is H.outer["W1", "W2"] and H.total.select(["down"]).shape == H["W2"].shape
        with pytest.raises(BlockNameError, match="there is no 'b_up' among W1, W2, b2, W_gate"):
            H["b_up"]

    def test_losses_and_memory(self, monkeypatch):
        layer = cv.exact.FeedForward(self.W1, None, self.W2, None)
        with pytest.raises(ShapeError) as caught:
            layer.hessian(self.X, cv.losses.MSE(self.X))
        assert caught.value.argument == "Y"
        with pytest.raises(LossError):
            layer.hessian(self.X, lambda F: F)
        with pytest.raises(MemoryLimitError, match="dense block"):
            within(100, layer.hessian(self.X, torch.sum).dense)
        monkeypatch.setattr("curvoscope.checks.memory_budget", lambda: 1)
        with pytest.raises(MemoryLimitError, match="Jacobian"):
            layer.jacobian(self.X)
