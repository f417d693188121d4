"""Transformer blocks against float64 autodiff: all blocks of the Hessian, its parts, Jacobians."""

import pytest
import torch
from hypothesis import given, settings

import curvoscope as cv
from curvoscope.errors import BlockNameError, DtypeError, EmptyError, MemoryLimitError, RangeError, ShapeError
from curvoscope.operators.block_matrix import Tiles
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.papers.theorems.calculus import assemble
from matrices import within
from network_cases import BlockCase, Compared, Draw, assert_close
from network_cases import block_cases as cases

NAMES = ["norm1.gamma", "norm1.beta", "attn.Q", "attn.K", "attn.V", "attn.O", "norm2.gamma", "norm2.beta"]
NAMES += ["mlp.up", "mlp.down", "mlp.b_up", "mlp.b_down"]


class TestAgainstAutodiff:
    @settings(max_examples=6)
    @given(cases)
    def test_whole(self, options):
        Compared(**options).assert_whole()

    @settings(max_examples=2)
    @given(cases)
    def test_blocks(self, options):
        Compared(**{**options, "batch": (2, 2)}).assert_blocks()

    @pytest.mark.parametrize("placement", ["pre", "post", "none"])
    @pytest.mark.parametrize("heads", [1, 3])
    @pytest.mark.parametrize("kind", ["mse", "cross-entropy"])
    def test_placements(self, placement, heads, kind):
        Compared(placement=placement, heads=heads, kind=kind, wrt_input=False).assert_whole()

    @pytest.mark.parametrize("options", [{"rotary": 10.0}, {"kv_heads": 1}, {"rotary": 10.0, "kv_heads": 1}])
    def test_variants_of_attention(self, options):
        compared = Compared(heads=2, biases=True, placement="post", wrt_input=False, **options)
        compared.assert_whole()
        compared.assert_blocks()

    @pytest.mark.parametrize("batch", [(1,), (1, 1), (1, 4), (4, 1)])
    def test_one_token_or_sequence(self, batch):
        Compared(batch=batch).assert_whole()

    def test_jacobian(self):
        for placement in ("pre", "post", "none"):
            compared = Compared(placement=placement, heads=2)
            found = compared.case.block.jacobian(compared.X)
            assert list(found) == compared.H.names
            for name, expected in compared.truth.jacobian.items():
                assert_close(found[name], expected, expected.abs().max())

    def test_forward(self):
        for placement in ("pre", "post", "none"):
            compared = Compared(placement=placement)
            assert_close(compared.case.block(compared.X), compared.truth.output, 1)
            assert_close(compared.case.block(compared.X[0]), compared.truth.output[0], 1)

    def test_one_sequence_without_a_batch_axis(self):
        draw, shapes = Draw(0), set()
        block, X, Y = BlockCase(draw).block, draw(4, 3), draw(4, 3)

        def loss(F):
            shapes.add(tuple(F.shape))
            return (F - Y).square().mean()

        assert_close(block.hessian(X, loss).dense(), block.hessian(X[None], cv.losses.MSE(Y[None])).dense())
        assert shapes == {(4, 3)}

    def test_float32(self):
        draw = Draw(0)
        double = BlockCase(draw)
        X, Y = draw(2, 3, 3), draw(2, 3, 3)
        layers = [double.block.attention, double.block.feedforward, double.block.norm1, double.block.norm2]
        attention, mlp, first, second = layers
        single = cv.exact.TransformerBlock(
            cv.exact.SelfAttention(*(getattr(attention, f"W_{n}").float() for n in "QKVO"), causal=True),
            cv.exact.FeedForward(*(mlp.weights[n].float() for n in ("W1", "b1", "W2", "b2")), activation="gelu"),
            *(cv.exact.LayerNorm(norm.gamma.float(), norm.beta.float(), norm.eps) for norm in (first, second)),
        )
        found = single.hessian(X.float(), cv.losses.MSE(Y.float())).dense()
        expected = double.block.hessian(X, cv.losses.MSE(Y)).dense()
        assert found.dtype == torch.float32
        assert (found.double() - expected).abs().max() < 1e-4 * expected.abs().max()


class TestStructure:
    @pytest.mark.parametrize("placement", ["pre", "post", "none"])
    @pytest.mark.parametrize("heads", [1, 2])
    def test_sums_and_exact_symmetry(self, placement, heads):
        compared = Compared(placement=placement, heads=heads)
        H = compared.H
        total = H.dense()
        assert_close(total, assemble(compared.truth.hessian, H.names), compared.scale)
        assert (H.outer.dense() + H.functional.dense() - total).abs().max() <= 1e-13 * total.norm()
        for matrix in (total, H.outer.dense(), H.functional.dense()):
            assert torch.equal(matrix, matrix.T)

    def test_names_and_shapes(self):
        H = Compared(wrt_input=False).H
        assert H.names == NAMES
        assert Compared(placement="post", wrt_input=False).H.names == NAMES
        assert H.shapes["attn.Q"] == (3, 2)
        assert H.shapes["mlp.b_up"] == (1, 4)
        assert H.shapes["norm1.gamma"] == (1, 3)
        gated = Compared(placement="none", gated=True).H
        assert gated.names == [*NAMES[2:6], "mlp.gate", *NAMES[8:], "X"]
        assert gated.shapes["X"] == (6, 3)

    @pytest.mark.parametrize("placement", ["pre", "post"])
    def test_blocks_above_attention_are_sums_over_tokens(self, placement):
        H = Compared(placement=placement, heads=2, kind="cross-entropy", wrt_input=False).H
        above = [name for name in H.names if placement == "post" or not name.startswith("norm1")]
        for row in above:
            for column in above:
                for part in (H.outer, H.functional):
                    assert isinstance(part[row, column], KroneckerSum | Tiles)

    def test_contractions(self):
        """Trace, diagonal and norms of diagonal and cross blocks, against the dense truth."""
        compared = Compared(heads=2, kind="cross-entropy", placement="post", wrt_input=False)
        for found, expected in compared.parts():
            for pair in (("attn.Q", "mlp.up"), ("attn.O", "norm2.gamma"), ("norm1.beta", "mlp.down")):
                block, truth = found[pair], expected[pair]
                assert block.shape == truth.shape
                assert float(block.frobenius_norm()) == pytest.approx(float(truth.norm()), rel=1e-7)
                assert block.spectral_norm() == pytest.approx(float(torch.linalg.matrix_norm(truth, 2)), rel=1e-7)
                v = compared.v[: truth.shape[1]]
                assert_close(block @ v, truth @ v, compared.scale * len(truth))
                assert_close(block.T @ truth, truth.T @ truth, compared.scale**2 * len(truth))
            for name in ("attn.V", "mlp.up", "norm1.gamma"):
                block, truth = found[name], expected[name, name]
                assert float(block.trace()) == pytest.approx(float(truth.trace()), abs=1e-9)
                assert_close(block.diagonal(), truth.diagonal(), compared.scale)
                assert_close(block.eigenvalues(), torch.linalg.eigvalsh(truth), compared.scale)
        assert float(compared.H.total.trace()) == pytest.approx(
            sum(float(compared.truth.hessian[name, name].trace()) for name in compared.H.names)
        )

    def test_output_weights_are_outer_alone_where_nothing_follows(self):
        H = Compared(placement="pre").H
        assert not H.functional["mlp.down"].dense().any()
        assert not H.functional["mlp.b_down"].dense().any()
        assert Compared(placement="post").H.functional["mlp.down"].dense().any()  # a norm follows

    def test_select(self):
        compared = Compared(wrt_input=False)
        names = ["mlp.up", "attn.Q", "norm1.gamma"]
        assert_close(compared.H.total.select(names).dense(), assemble(compared.truth.hessian, names), compared.scale)

    def test_independent_of_the_cut_into_chunks(self, monkeypatch):
        compared = Compared()
        expected = compared.H.dense()
        v = compared.v
        product = compared.H @ v
        for module in ("assembly", "chain", "links"):
            chunks = lambda n, workspace: [(i, min(i + 7, n)) for i in range(0, n, 7)]  # noqa: E731
            monkeypatch.setattr(f"curvoscope.exact.{module}.column_chunks", chunks)
        H = compared.case.block.hessian(compared.X, compared.loss, wrt_input=True)
        assert_close(H @ v, product, compared.scale)
        assert_close(H.dense(), expected, compared.scale)


class TestGaugeSymmetry:
    def test_query_and_key_scale(self):
        """W_Q -> W_Q (1 + t), W_K -> W_K / (1 + t) leaves the loss: H u = -(∂_t u) g at u = (W_Q, -W_K)."""
        compared = Compared(heads=2, wrt_input=False, kind="cross-entropy")
        H, weights, gradient = compared.H, compared.case.weights, compared.truth.gradient
        direction = {name: torch.zeros_like(values) for name, values in compared.parameters.items()}
        direction["attn.Q"], direction["attn.K"] = weights["attn.Q"], -weights["attn.K"]
        expected = {name: torch.zeros_like(values) for name, values in compared.parameters.items()}
        expected["attn.Q"], expected["attn.K"] = -gradient["attn.Q"], gradient["attn.K"]
        u, moved = (torch.cat([values.flatten() for values in each.values()]) for each in (direction, expected))
        assert_close(H @ u, moved, compared.scale)


class TestErrors:
    def parts(self, d=3):
        case = BlockCase(Draw(0), d=d)
        return case.block.attention, case.block.feedforward, case.block.norm1, case.block.norm2

    def test_placement(self):
        attention, mlp, first, second = self.parts()
        with pytest.raises(RangeError, match=r"placement.*'sandwich'.*'pre', 'post', 'none'"):
            cv.exact.TransformerBlock(attention, mlp, first, second, placement="sandwich")
        with pytest.raises(RangeError, match=r"norm1: is missing.*'pre'"):
            cv.exact.TransformerBlock(attention, mlp)
        with pytest.raises(RangeError, match=r"norm2: is missing.*'post'"):
            cv.exact.TransformerBlock(attention, mlp, first, placement="post")
        with pytest.raises(RangeError, match="placement: got 'none' together with norm2"):
            cv.exact.TransformerBlock(attention, mlp, norm2=second, placement="none")

    def test_widths(self):
        attention, mlp, first, second = self.parts()
        narrow = self.parts(2)
        with pytest.raises(ShapeError, match=r"feedforward: maps width 2 to 2.*width 3"):
            cv.exact.TransformerBlock(attention, narrow[1], first, second)
        with pytest.raises(ShapeError, match=r"norm2: maps width 2 to 2.*width 3"):
            cv.exact.TransformerBlock(attention, mlp, first, narrow[3])
        bare = cv.exact.SelfAttention(attention.W_Q, attention.W_K, attention.W_V)
        with pytest.raises(ShapeError, match="attention: maps width 3 to 2"):
            cv.exact.TransformerBlock(bare, mlp, first, second)

    def test_dtypes(self):
        attention, mlp, first, second = self.parts()
        single = cv.exact.LayerNorm(first.gamma.float())
        with pytest.raises(DtypeError, match=r"norm1.*float32.*float64"):
            cv.exact.TransformerBlock(attention, mlp, single, second)
        halves = {name: weight.float() for name, weight in mlp.weights.items()}
        with pytest.raises(DtypeError, match=r"feedforward.*float32.*float64"):
            cv.exact.TransformerBlock(
                attention, cv.exact.FeedForward(**({"b1": None, "b2": None} | halves)), first, second
            )
        block = cv.exact.TransformerBlock(attention, mlp, first, second)
        with pytest.raises(DtypeError, match=r"X.*float32"):
            block.hessian(torch.zeros(2, 3), cv.losses.MSE(torch.zeros(2, 3)))

    @pytest.mark.parametrize("call", ["__call__", "jacobian", "hessian"])
    def test_input(self, call):
        block = cv.exact.TransformerBlock(*self.parts())
        extra = (cv.losses.MSE(torch.zeros(1, 3, dtype=torch.float64)),) if call == "hessian" else ()
        for X, error in (
            (torch.zeros(2, 4).double(), ShapeError),
            (torch.zeros(3).double(), ShapeError),
            (torch.zeros(0, 2, 3).double(), EmptyError),
        ):
            with pytest.raises(error, match="X"):
                getattr(block, call)(X, *extra)

    def test_blocks(self):
        H = Compared().H
        with pytest.raises(BlockNameError, match=r"attn\.q.*attn\.Q"):
            H["attn.q"]
        with pytest.raises(MemoryLimitError, match="dense"):
            within(1000, H.dense)
