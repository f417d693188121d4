"""G and S at the output of every layer, and Hessians of stacks, against float64 autodiff."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jacfwd, jacrev

import curvoscope as cv
from curvoscope.errors import DtypeError, EmptyError, RangeError, ShapeError
from curvoscope.exact.grouped import Grouped
from curvoscope.losses import PairCurvature, TokenCurvature
from curvoscope.papers.theorems.autodiff import differentiate
from curvoscope.papers.theorems.calculus import assemble
from matrices import within
from network_cases import EPS, BlockCase, Draw, assert_close, normalise


class Network:
    """A stack of blocks with a final norm, an input and a loss; `at(name)` differentiates in a layer's output."""

    def __init__(self, depth=2, batch=(2, 3), kind="mse", final=True, seed=0, **options):
        draw = Draw(seed)
        self.cases = [BlockCase(draw, **options) for _ in range(depth)]
        d = self.cases[0].block.d
        layers = [case.block for case in self.cases]
        self.weights = {f"h.{i}.{name}": w for i, case in enumerate(self.cases) for name, w in case.weights.items()}
        if final:
            gamma, beta = 1 + draw(d) / 2, draw(d)
            layers.append(cv.exact.LayerNorm(gamma, beta, EPS))
            self.weights |= {"final_norm.gamma": gamma, "final_norm.beta": beta}
        self.stack, self.final = cv.exact.Stack(layers), final
        self.X, self.loss = draw(*batch, d), draw.loss(kind, (*batch, d))

    def __call__(self, p, X, add=lambda name, values: values):
        for i, case in enumerate(self.cases):
            own = {name: p[f"h.{i}.{name}"] for name in case.weights}
            X = case.network(own, X, lambda name, values, i=i: add(f"h.{i}.{name}", values))
        if self.final:
            X = add("final_norm", normalise(X, p["final_norm.gamma"].flatten(), p["final_norm.beta"]))
        return X

    def at(self, name, shape):
        """G, S and the Gauss-Newton part of S at the output of a layer, which is moved by δ while all else is held."""

        def moved(delta):
            def add(layer, values):
                return values + delta if layer == name else values

            return self(self.weights, self.X + delta if name == "input" else self.X, add)

        zero = torch.zeros(shape, dtype=torch.float64)
        output = moved(zero)
        size, inner = zero.numel(), jacfwd(grad(self.loss))(output).reshape(output.numel(), -1)
        J = jacrev(moved)(zero).reshape(output.numel(), size)
        S = jacfwd(grad(lambda delta: self.loss(moved(delta))))(zero).reshape(size, size)
        return grad(lambda delta: self.loss(moved(delta)))(zero), S, J.T @ inner @ J

    def records(self):
        return cv.exact.backpropagate(self.stack, self.X, self.loss)


def assert_record(network, record):
    shape = record.G.shape if network.X.ndim == 3 else record.G.shape[1:]
    G, S, gauss_newton = network.at(record.name, shape)
    scale = S.abs().max()
    assert_close(record.G.view(G.shape), G)
    assert_close(record.S.dense(), S, scale)
    assert_close(record.S_gn.dense(), gauss_newton, scale)
    assert_close(record.S_functional.dense(), S - gauss_newton, scale)


cases = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 3),
        "batch": st.lists(st.integers(1, 2), min_size=1, max_size=2),
        "kind": st.sampled_from(["mse", "cross-entropy", "token", "sequence", "batch"]),
        "final": st.booleans(),
        "d": st.integers(2, 3),
        "placement": st.sampled_from(["pre", "post", "none"]),
        "heads": st.sampled_from([1, 3]),
        "widths": st.tuples(st.integers(1, 2), st.integers(1, 2)),
        "hidden": st.integers(1, 3),
        "causal": st.booleans(),
        "norm": st.sampled_from(["layer", "rms"]),
        "activation": st.sampled_from(["relu", "gelu", "silu"]),
        "gated": st.booleans(),
        "seed": st.integers(0, 10**6),
    }
)


class TestRecords:
    @settings(max_examples=12)
    @given(cases, st.integers(0, 100))
    def test_against_autodiff(self, options, number):
        network = Network(**options)
        records = network.records()
        for record in {0: records[0], 1: records[-1], 2: records[number % len(records)]}.values():
            assert_record(network, record)

    @pytest.mark.parametrize("placement", ["pre", "post", "none"])
    def test_every_layer(self, placement):
        network = Network(depth=2, batch=(1, 2), placement=placement, kind="cross-entropy")
        for record in network.records():
            assert_record(network, record)

    def test_names_and_kinds(self):
        network = Network(depth=2)
        records = network.records()
        layers = ["norm1", "attn", "norm2", "mlp"]
        blocks = [f"h.{i}.{layer}" for i in (0, 1) for layer in layers]
        assert [record.name for record in records] == ["input", *blocks, "final_norm"]
        sizes = {record.name: record.S.size for record in records}
        for name in ("h.1.attn", "h.1.norm2", "h.1.mlp", "final_norm"):
            assert sizes[name] == 1  # a block for each token
        for name in ("input", "h.0.mlp", "h.0.attn", "h.1.norm1"):
            assert sizes[name] == 3  # a block for each sequence
        by_name = {record.name: record for record in records}
        assert isinstance(by_name["h.1.attn"].S.curvature(3), TokenCurvature)
        assert isinstance(by_name["h.0.attn"].S.curvature(3), PairCurvature)
        assert all(record.exact for record in records)

    def test_loss_hessian_at_the_last_output(self):
        network = Network(final=False)
        last = network.records()[-1]
        assert_close(last.S.dense(), torch.eye(18, dtype=torch.float64) * 2 / 18)
        assert not last.S_functional.dense().any()

    def test_jacobians(self):
        network = Network(depth=1, heads=2)
        records = {record.name: record for record in network.records()}
        assert records["input"].jacobian is None
        inputs = {"h.0.norm1": network.X, "h.0.attn": records["h.0.norm1"].output}
        for name, layer in (("h.0.norm1", "norm1"), ("h.0.attn", "attention")):
            own = getattr(network.stack.layers[0], layer)
            J = records[name].jacobian
            expected = own.jacobian(inputs[name])["X"]
            assert_close(J.dense(), expected)
            assert J.spectral_norm() == pytest.approx(float(torch.linalg.matrix_norm(expected, 2)))
            assert float(J.frobenius_norm()) == pytest.approx(float(expected.norm()))

    def test_weights_of_a_layer(self):
        """Its own blocks are those of the whole network."""
        network = Network(depth=2, batch=(1, 2), heads=2)
        names = list(network.weights)
        truth = differentiate(lambda p: network(p, network.X), network.loss, network.weights)
        for record in network.records()[1:]:
            H = record.hessian()
            own = [name for name in names if name.startswith(record.name)]
            labels = {name: name.removeprefix(record.name + ".") for name in own}
            local = {"up": "W1", "down": "W2", "b_up": "b1", "b_down": "b2"}
            for row in own:
                for column in own:
                    pair = tuple(local.get(labels[name], labels[name]) for name in (row, column))
                    assert_close(H[pair].dense(), truth.hessian[row, column], 1)
                    assert_close(H.outer[pair].dense(), truth.outer[row, column], 1)
        with pytest.raises(RangeError, match="'input' has no weights"):
            network.records()[0].hessian()


class TestStackHessian:
    @pytest.mark.parametrize("options", [{"depth": 1}, {"depth": 2, "placement": "post"}, {"depth": 3, "final": False}])
    def test_against_autodiff(self, options):
        network = Network(batch=(1, 2), heads=2, hidden=2, widths=(1, 2), **options)
        H = network.stack.hessian(network.X, network.loss)
        weights = {name: network.weights[name] for name in H.names}
        truth = differentiate(lambda p: network(p, network.X), network.loss, weights)
        v = Draw(1)(H.shape[0])
        for found, expected in (
            (H.outer, truth.outer),
            (H.functional, truth.functional),
            (H.total, truth.hessian),
        ):
            expected = assemble(expected, H.names)
            assert_close(found.dense(), expected)
            assert_close(found @ v, expected @ v)

    def test_blocks_of_any_two_layers(self):
        network = Network(batch=(1, 2), hidden=2)
        H = network.stack.hessian(network.X, network.loss, wrt_input=True)
        parameters = {**network.weights, "X": network.X}
        truth = differentiate(lambda p: network(p, p["X"]), network.loss, parameters)
        names = ["h.0.norm1.gamma", "h.0.attn.Q", "h.0.mlp.up", "h.1.attn.K", "h.1.mlp.down", "final_norm.gamma", "X"]
        for row in names:
            for column in names:
                assert_close(H.functional[row, column].dense(), truth.functional[row, column], 1)

    def test_single_layers(self):
        """Layers without residual connections, of different widths."""
        draw = Draw(0)
        attention = cv.exact.SelfAttention(draw(3, 2), draw(3, 2), draw(3, 4))
        mlp = cv.exact.FeedForward(draw(4, 3), None, draw(3, 2), draw(2), activation="silu")
        stack = cv.exact.Stack([attention, mlp])
        X, loss = draw(2, 3, 3), draw.loss("mse", (2, 3, 2))
        H = stack.hessian(X, loss)
        assert H.names == ["layer.0.Q", "layer.0.K", "layer.0.V", "layer.1.up", "layer.1.down", "layer.1.b_down"]
        p = {name: getattr(attention, f"W_{name[-1]}") for name in H.names[:3]}
        p |= {name: mlp.weights[w] for name, w in zip(H.names[3:], ("W1", "W2", "b2"), strict=True)}

        def network(p):
            A = ((X @ p["layer.0.Q"]) @ (X @ p["layer.0.K"]).mT / 2**0.5).softmax(-1)
            h = A @ (X @ p["layer.0.V"]) @ p["layer.1.up"]
            return h / (1 + torch.exp(-h)) @ p["layer.1.down"] + p["layer.1.b_down"]

        truth = differentiate(network, loss, p)
        for found, expected in ((H.outer, truth.outer), (H.functional, truth.functional), (H.total, truth.hessian)):
            assert_close(found.dense(), assemble(expected, H.names))


class TestPastTheSize:
    def matrix_free(self, **options):
        network = Network(depth=2, batch=(2, 4), **options)
        return network, network.records(), within(2**13, network.records)

    def test_products(self):
        network, exact, free = self.matrix_free(kind="cross-entropy")
        assert not all(record.exact for record in free)
        for one, other in zip(exact, free, strict=True):
            assert_close(other.G, one.G)
            for part in ("S", "S_gn", "S_functional"):
                assert_close(getattr(other, part).dense(), getattr(one, part).dense(), one.S.dense().abs().max())
        record = next(record for record in free if not record.exact)
        truth = network.at(record.name, record.G.shape)[1]
        assert_close(record.S.dense(), truth)

    def test_low_rank(self):
        """Eigenpairs and the norm of the rest, against the whole spectrum."""
        _, exact, free = self.matrix_free()
        one, other = exact[0], free[0]
        assert one.exact and not other.exact
        spectrum = torch.linalg.eigvalsh(one.S.dense())
        order = spectrum.abs().argsort(descending=True)
        for record in (one, other):
            found = record.low_rank(4)
            assert_close(found.values, spectrum[order[:4]].sort().values, 100 * spectrum.abs().max())
            rest = float(spectrum[order[4:]].norm())
            low, high = found.remainder.interval(0.999)
            assert low * (1 - 1e-12) <= rest <= high * (1 + 1e-12)  # exact when there are as many products as entries
            error = float((one.S.dense() - found.dense()).norm())
            assert error == pytest.approx(rest, rel=1e-6)
            assert float(found.frobenius_norm()) == pytest.approx(float(spectrum[order[:4]].norm()))
            assert float(found.trace()) == pytest.approx(float(found.dense().trace()))
            assert_close(found.diagonal(), found.dense().diagonal())
            assert_close(found.eigenvalues(), torch.linalg.eigvalsh(found.dense()), spectrum.abs().max())

    def test_estimates(self):
        _, exact, free = self.matrix_free()
        found = free[0].S.frobenius_norm(matvecs=24)
        low, high = found.interval(0.999)
        rounding = 1e-12 * found.value  # the estimate may be exact
        assert low - rounding <= float(exact[0].S.frobenius_norm()) <= high + rounding
        assert float(free[0].S.spectral_norm()) == pytest.approx(exact[0].S.spectral_norm(), rel=1e-5)
        with pytest.raises(RangeError, match="does not fit into memory"):
            free[1].hessian()

    def test_jacobian_by_products(self, monkeypatch):
        _, exact, free = self.matrix_free(heads=2)
        expected = exact[2].jacobian.dense()
        monkeypatch.setattr("curvoscope.checks.memory_budget", lambda: 2**12)
        J = free[2].jacobian
        assert not isinstance(J, Grouped)
        monkeypatch.undo()
        assert_close(J.dense(), expected)
        assert_close(J.T.dense(), expected.T)

    def test_low_rank_of_what_is_not_symmetric(self):
        network = Network(depth=1)
        with pytest.raises(RangeError, match="operator: is not symmetric"):
            cv.exact.low_rank(network.records()[1].jacobian, 2)


class TestErrors:
    def test_stack(self):
        draw = Draw(0)
        block = BlockCase(draw).block
        with pytest.raises(EmptyError, match="layers: is empty"):
            cv.exact.Stack([])
        with pytest.raises(ShapeError, match="layers: layer 1 has input width 2, the one before it gives 3"):
            cv.exact.Stack([block, cv.exact.RMSNorm(draw(2))])
        with pytest.raises(DtypeError, match=r"layers.*float32"):
            cv.exact.Stack([block, cv.exact.RMSNorm(draw(3).float())])

    def test_input(self):
        block = BlockCase(Draw(0)).block
        loss = cv.losses.MSE(torch.zeros(2, 4, dtype=torch.float64))
        with pytest.raises(ShapeError, match=r"X: expected \(L, 3\)"):
            cv.exact.backpropagate([block], torch.zeros(2, 4).double(), loss)
        with pytest.raises(ShapeError, match="Y"):
            cv.exact.backpropagate([block], torch.zeros(2, 3).double(), loss)
