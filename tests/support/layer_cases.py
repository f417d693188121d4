"""Norms, feed-forward layers and linear networks: drawn layers beside the same functions for autodiff."""

import itertools
import math

import pytest
import torch
from hypothesis import strategies as st

import curvoscope as cv
from curvoscope.errors import DtypeError, EmptyError, NonFiniteError, ShapeError
from curvoscope.papers.theorems.autodiff import differentiate
from curvoscope.papers.theorems.calculus import assemble
from loss_cases import LOSSES, Draws

NORMS = ["layer", "layer without beta", "rms"]
PRIMITIVES = {
    "relu": lambda h: h.clamp_min(0),
    "gelu": lambda h: h * (1 + torch.erf(h / math.sqrt(2))) / 2,
    "gelu_tanh": lambda h: h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2,
    "silu": lambda h: h / (1 + torch.exp(-h)),
    "quick_gelu": lambda h: h / (1 + torch.exp(-1.702 * h)),
    "relu2": lambda h: h.clamp_min(0).square(),
    "gelu_bloom": lambda h: h * (1 + torch.tanh(0.79788456 * (h + 0.044715 * h**3))) / 2,
}

TOLERANCE = 1e-10
REFUSED = [  # by a layer of three inputs in float64
    (torch.ones(5, 4, dtype=torch.float64), ShapeError),
    (torch.ones(3, dtype=torch.float64), ShapeError),
    (torch.ones(0, 3, dtype=torch.float64), EmptyError),
    (torch.ones(0, 4, 3, dtype=torch.float64), EmptyError),
    (torch.ones(5, 3), DtypeError),
    (torch.ones(5, 3, dtype=torch.int64), DtypeError),
    *((torch.full((5, 3), value, dtype=torch.float64), NonFiniteError) for value in (torch.nan, torch.inf)),
]


def assert_close(found, expected, scale=None):
    """To rounding of the largest entry, or of a scale that is given."""
    assert found.shape == expected.shape
    scale = expected.abs().max() if scale is None else scale
    assert (found - expected).abs().max() <= TOLERANCE * (1e-8 + scale)


def parts(H, truth):
    """Both parts and the total, each beside the blocks that autodiff gives."""
    return (H.outer, truth.outer), (H.functional, truth.functional), (H.total, truth.hessian)


def largest(truth):
    """The largest entry of the whole Hessian."""
    return max(block.abs().max() for block in truth.hessian.values())


def assert_blocks(H, truth, scale):
    """Every block of both parts and of the total."""
    for part, blocks in parts(H, truth):
        for pair in itertools.product(H.names, repeat=2):
            assert_close(part[pair].dense(), blocks[pair], scale)


def assert_products(case, H, truth, scale):
    """Products of the whole matrix and of every block, with one vector and with several."""
    columns, size = case.normal(H.shape[1], 3), scale * H.shape[1]
    for part, blocks in parts(H, truth):
        matrix = assemble(blocks, H.names)
        assert_close(part @ columns, matrix @ columns, size)
        assert_close(part @ columns[:, 0], matrix @ columns[:, 0], size)
        for pair in itertools.product(H.names, repeat=2):
            few = case.normal(part[pair].shape[1], 2)
            assert_close(part[pair] @ few, blocks[pair] @ few, size)


def assert_products_without_cores(case, H, truth, scale, monkeypatch):
    """Products with blocks of which memory leaves no room for the cores."""
    pairs = list(itertools.combinations_with_replacement(H.names, 2))
    made = {pair: H[pair] for pair in pairs}
    monkeypatch.setattr("curvoscope.checks.memory_budget", lambda: 1)
    for pair in pairs:
        columns = case.normal(made[pair].shape[1], 2)
        for part, blocks in parts(H, truth):
            assert_close(part[pair] @ columns, blocks[pair] @ columns, 100 * scale)


def assert_contractions(block, dense, size, diagonal, norm=TOLERANCE):
    """Norms of a block; of a diagonal one also its trace, diagonal and eigenvalues."""
    assert abs(block.frobenius_norm() - torch.linalg.norm(dense)) <= norm * size
    assert abs(block.spectral_norm() - torch.linalg.matrix_norm(dense, 2)) <= TOLERANCE * size
    if diagonal:
        assert abs(block.trace() - dense.trace()) <= TOLERANCE * size
        assert_close(block.diagonal(), dense.diagonal(), size)
        assert_close(block.eigenvalues(), torch.linalg.eigvalsh((dense + dense.T) / 2), size)


def assert_identities(H):
    """Symmetry to the last bit, and the total as the sum of its parts."""
    for part in (H.outer, H.functional, H.total):
        dense = part.dense()
        assert torch.equal(dense, dense.T)
    rounding = 1e-13 * (H.outer.dense().norm() + H.functional.dense().norm())
    assert (H.outer.dense() + H.functional.dense() - H.dense()).abs().max() <= rounding
    for pair in itertools.product(H.names, repeat=2):
        assert (H.outer[pair].dense() + H.functional[pair].dense() - H[pair].dense()).abs().max() <= rounding


def assert_forward_and_jacobian(case, truth):
    """The output, and its derivative with respect to the weights and the input."""
    jacobian = case.layer.jacobian(case.X)
    assert list(jacobian) == [*case.parameters, "X"]
    assert_close(case.layer(case.X), truth.output)
    for name, matrix in jacobian.items():
        assert_close(matrix, truth.jacobian[name], 1 + truth.jacobian[name].abs().max())


def assert_input_refused(layer, method, X, error):
    """The error, with the argument's name."""
    arguments = (X, torch.sum) if method == "hessian" else (X,)
    with pytest.raises(error) as caught:
        getattr(layer, method)(*arguments)
    assert caught.value.argument == "X"


def normalised(x, centred, eps):
    """x̂ from primitives: the native layer norm is wrong under nested transforms."""
    c = x - x.mean(-1, keepdim=True) if centred else x
    return c / (c.square().mean(-1, keepdim=True) + eps).sqrt()


class NormCase(Draws):
    """A norm, an input, a loss and what autodiff says of them."""

    def __init__(self, d, batch, norm="layer", kind="mse", eps=1e-2, seed=0, constant=False, dtype=torch.float64):
        super().__init__(seed, dtype)
        self.centred, self.eps = norm != "rms", eps
        self.parameters = {"gamma": self.normal(d)}
        if norm == "layer":
            self.parameters["beta"] = self.normal(d)
        self.X = self.normal(*batch, d)
        if constant:
            self.X[..., 0, :] = 0.1 if self.centred else 0.0
        own = self.own(self.parameters)
        self.layer = (cv.exact.LayerNorm if self.centred else cv.exact.RMSNorm)(**own, eps=eps)
        self.make_loss(kind, (*batch, d))

    def network(self, p):
        return p["gamma"] * normalised(p.get("X", self.X), self.centred, self.eps) + p.get("beta", 0.0)

    def truth(self, wrt_input=True):
        parameters = {**self.parameters, "X": self.X} if wrt_input else self.parameters
        return differentiate(self.network, self.loss, parameters)

    def hessian(self, wrt_input=True):
        return self.layer.hessian(self.own(self.X), self.own_loss, wrt_input=wrt_input)

    def scale(self, truth):
        """The size that rounding errors are measured by: the entries, and what cancels in them where σ is small."""
        cancelling = truth.loss_gradient.abs().max() * self.parameters["gamma"].abs().max()
        return largest(truth) + cancelling / self.layer.sigma(self.own(self.X)).min() ** 2


norm_cases = st.fixed_dictionaries(
    {
        "d": st.integers(1, 5),
        "batch": st.lists(st.integers(1, 3), min_size=1, max_size=2),
        "norm": st.sampled_from(NORMS),
        "kind": st.sampled_from(LOSSES),
        "eps": st.sampled_from([1e-5, 1e-2, 1.0]),
        "seed": st.integers(0, 10**6),
        "constant": st.booleans(),
    }
)


class FeedForwardCase(Draws):
    """A layer, an input, a loss and what autodiff says of them."""

    def __init__(
        self, sizes, batch, activation="gelu", kind="mse", gated=False, absent=(), seed=0, dtype=torch.float64
    ):
        super().__init__(seed, dtype)
        d, f, m = sizes
        self.activation, self.gated = activation, gated
        every = {
            "W1": self.normal(d, f) / d**0.5,
            "b1": self.normal(f),
            "W2": self.normal(f, m) / f**0.5,
            "b2": self.normal(m),
        }
        if gated:
            every |= {"W_gate": self.normal(d, f) / d**0.5, "b_gate": self.normal(f)}
        self.parameters = {name: values for name, values in every.items() if name not in absent}
        given = {name: self.parameters.get(name) for name in ("W1", "b1", "W2", "b2", "W_gate", "b_gate")}
        self.layer = cv.exact.FeedForward(**self.own(given), activation=activation)
        self.X = self.normal(*batch, d)
        self.make_loss(kind, (*batch, m))

    def network(self, p):
        x, phi = p.get("X", self.X), PRIMITIVES[self.activation]
        h = x @ p["W1"] + p.get("b1", 0.0)
        z = phi(x @ p["W_gate"] + p.get("b_gate", 0.0)) * h if self.gated else phi(h)
        return z @ p["W2"] + p.get("b2", 0.0)

    def truth(self):
        return differentiate(self.network, self.loss, {**self.parameters, "X": self.X})

    def hessian(self, **options):
        return self.layer.hessian(self.own(self.X), self.own_loss, **{"wrt_input": True, **options})


feedforward_cases = st.fixed_dictionaries(
    {
        "sizes": st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
        "batch": st.lists(st.integers(1, 2), min_size=1, max_size=2),
        "activation": st.sampled_from(list(PRIMITIVES)),
        "kind": st.sampled_from(LOSSES),
        "gated": st.booleans(),
        "absent": st.sets(st.sampled_from(["b1", "b2", "b_gate"])),
        "seed": st.integers(0, 10**6),
    }
)


class LinearCase(Draws):
    """A network, an input, a loss and what autodiff says of them."""

    def __init__(self, widths, batch, kind, seed=0, dtype=torch.float64):
        super().__init__(seed, dtype)
        self.weights = [self.normal(a, b) / a**0.5 for a, b in itertools.pairwise(widths)]
        self.parameters = {f"W{i + 1}": weight for i, weight in enumerate(self.weights)}
        self.X = self.normal(*batch, widths[0])
        self.layer = cv.exact.LinearMLP([self.own(weight) for weight in self.weights])
        self.make_loss(kind, (*batch, widths[-1]))
        self.kind = kind

    def truth(self, wrt_input=False):
        parameters = {**self.parameters, "X": self.X} if wrt_input else self.parameters

        def network(weights):
            F = weights.get("X", self.X)
            for name in weights:
                F = F if name == "X" else torch.matmul(F, weights[name])
            return F

        return differentiate(network, self.loss, parameters)

    def hessian(self, **options):
        return self.layer.hessian(self.own(self.X), self.own_loss, **options)


linear_cases = st.fixed_dictionaries(
    {
        "widths": st.lists(st.integers(1, 4), min_size=2, max_size=5),
        "batch": st.lists(st.integers(1, 3), min_size=1, max_size=2),
        "kind": st.sampled_from(LOSSES),
        "seed": st.integers(0, 10**6),
    }
)
