"""A Hessian is that of the weights and inputs it was made of: trained parameters, and changes in place afterwards."""

import copy

import pytest
import torch
from torch import nn

import curvoscope as cv
from reference import normal, relative

SHAPES = {"W1": (3, 2), "b1": (2,), "W2": (2, 3), "Q": (3, 3), "K": (3, 3), "V": (3, 3)}
SHAPES |= {"gamma": (3,), "beta": (3,), "scale": (3,), "unembedding": (3, 4)}
BLOCKS = {
    "norm": ["gamma", "beta"],
    "scale": ["scale"],
    "feedforward": ["W1", "b1", "W2"],
    "linear": ["W1", "W2"],
    "attention": ["Q", "K", "V"],
    "block": ["gamma", "Q", "K", "V", "W1", "W2", "b1"],
}


def layer_of(kind, w):
    norm = cv.exact.RMSNorm(w["gamma"], 0.1)
    attention = cv.exact.SelfAttention(w["Q"], w["K"], w["V"])
    feedforward = cv.exact.FeedForward(w["W1"], w["b1"], w["W2"], None, "gelu")
    return {
        "norm": lambda: cv.exact.LayerNorm(w["gamma"], w["beta"], 0.1),
        "scale": lambda: cv.exact.LayerScale(w["scale"]),
        "feedforward": lambda: feedforward,
        "linear": lambda: cv.exact.LinearMLP([w["W1"], w["W2"]]),
        "attention": lambda: attention,
        "block": lambda: cv.exact.TransformerBlock(attention, feedforward, norm, copy.copy(norm), "post"),
    }[kind]()


def output(kind, w, X):
    def attended(x):
        scores = (x @ w["Q"]) @ (x @ w["K"]).mT / 3**0.5
        return scores.softmax(-1) @ x @ w["V"]

    def fed(x):
        return nn.functional.gelu(x @ w["W1"] + w["b1"]) @ w["W2"]

    def normed(x):
        return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * w["gamma"]

    if kind == "norm":
        return nn.functional.layer_norm(X, (3,), w["gamma"], w["beta"], 0.1)
    if kind == "block":
        Y = normed(X + attended(X))
        return normed(Y + fed(Y))
    plain = {"scale": lambda x: x * w["scale"], "feedforward": fed, "linear": lambda x: x @ w["W1"] @ w["W2"]}
    return {**plain, "attention": attended}[kind](X)


class Case:
    """A layer of parameters that require gradients, its input, and its Hessian over the weights by autodiff."""

    def __init__(self, kind, loss_kind):
        r = normal(3)
        self.weights = {name: r(*shape).requires_grad_() for name, shape in SHAPES.items()}
        self.X, self.Y, self.targets = r(2, 3, 3).requires_grad_(), r(2, 3, 3), torch.tensor([[0, 1, 3], [2, 2, 0]])
        self.kind, self.layer = kind, layer_of(kind, self.weights)
        U = self.weights["unembedding"]
        if loss_kind == "mse":
            self.loss, self.function = cv.losses.MSE(self.Y.requires_grad_()), lambda F: (F - self.Y).square().mean()
        elif loss_kind == "cross_entropy":
            self.loss = cv.losses.CrossEntropy(self.targets, U)
            self.function = lambda F: nn.functional.cross_entropy((F @ U).flatten(0, 1), self.targets.flatten())
        else:
            self.loss = self.function = lambda F: (F.sum(1) @ U).pow(3).mean()
        # the one γ of both norms of the block is two weights to the layer
        self.names = [name for name in BLOCKS[kind] if not (kind == "block" and name == "gamma")]

    def truth(self):
        leaves = [self.weights[name].detach().clone().requires_grad_() for name in self.names]
        W = {**self.weights, **dict(zip(self.names, leaves, strict=True))}
        value = self.function(output(self.kind, W, self.X))
        first = torch.cat([g.flatten() for g in torch.autograd.grad(value, leaves, create_graph=True)])
        rows = [torch.autograd.grad(entry, leaves, retain_graph=True, materialize_grads=True) for entry in first]
        return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])

    def hessian(self):
        return self.layer.hessian(self.X, self.loss)

    def names_of(self, H):
        if self.kind != "block":
            return self.names
        inside = {"Q": "attn.Q", "K": "attn.K", "V": "attn.V", "W1": "mlp.up", "W2": "mlp.down", "b1": "mlp.b_up"}
        return [inside[name] for name in self.names]


@pytest.mark.parametrize("loss_kind", ["mse", "cross_entropy", "function"])
@pytest.mark.parametrize("kind", BLOCKS)
class TestHessian:
    def test_of_parameters_that_require_gradients(self, kind, loss_kind):
        case = Case(kind, loss_kind)
        H = case.hessian()
        found = H.total.select(case.names_of(H)).dense()
        assert relative(found, case.truth()) < 1e-10
        answers = [H.dense(), H.outer.dense(), H @ torch.ones(H.shape[0]).double(), H.eigenvalues(), H.diagonal()]
        answers += [H[row, column].dense() for row in H.names for column in H.names]
        assert not any(answer.requires_grad for answer in answers)
        assert H.trace() == pytest.approx(float(H.dense().trace()), rel=1e-10, abs=1e-14)
        assert all(weight.requires_grad and weight.grad is None for weight in case.weights.values())

    def test_after_a_change_in_place(self, kind, loss_kind):
        case = Case(kind, loss_kind)
        truth, H = case.truth(), case.hessian()
        with torch.no_grad():
            for tensor in (*case.weights.values(), case.X, case.Y):
                tensor.mul_(1.5)
            case.targets.fill_(1)
        names = case.names_of(H)
        assert relative(H.total.select(names).dense(), truth) < 1e-10
        if len(names) == len(H.names) and names == H.names:
            v = normal(1)(H.shape[0])
            assert relative(H @ v, truth @ v) < 1e-10


@pytest.mark.parametrize("kind", BLOCKS)
def test_copies(kind):
    H = Case(kind, "mse").hessian()
    assert torch.equal(copy.deepcopy(H).dense(), H.dense())


@pytest.mark.parametrize("kind", BLOCKS)
def test_jacobian_of_parameters_that_require_gradients(kind):
    case = Case(kind, "mse")
    found = case.layer.jacobian(case.X)
    F = output(kind, case.weights, case.X)
    expected = [torch.autograd.grad(entry, case.X, retain_graph=True)[0].flatten() for entry in F.flatten()]
    assert relative(found["X"], torch.stack(expected)) < 1e-10
    assert not any(values.requires_grad for values in found.values())


def test_a_forward_pass_is_differentiable():
    case = Case("block", "mse")
    found = torch.autograd.grad(case.layer(case.X).pow(2).sum(), [case.weights["Q"], case.X])
    expected = torch.autograd.grad(output("block", case.weights, case.X).pow(2).sum(), [case.weights["Q"], case.X])
    assert all(relative(one, other) < 1e-12 for one, other in zip(found, expected, strict=True))


def test_mask_is_kept():
    r = normal(2)
    layer, X, Y = cv.exact.SelfAttention(r(2, 2), r(2, 2), r(2, 2)), r(1, 3, 2), r(1, 3, 2)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    expected = layer.hessian(X, cv.losses.MSE(Y), mask.clone()).dense()
    H = layer.hessian(X, cv.losses.MSE(Y), mask)
    mask.fill_(True)
    assert torch.equal(H.dense(), expected)
    trained = torch.zeros(3, 3).double().masked_fill(~torch.ones(3, 3).tril().bool(), -torch.inf).requires_grad_()
    assert relative(layer.hessian(X, cv.losses.MSE(Y), trained).dense(), expected) < 1e-12


def test_scalar_attention_of_parameters_that_require_gradients(recwarn):
    r = normal(4)
    w_Q, w_K, w_V, x, y = (r(*shape).requires_grad_() for shape in ((2,), (2,), (1,), (3,), (3,)))

    def value(weights):
        f = (x[:, None] * x * (weights[:2] @ weights[2:4]) / 2**0.5).softmax(-1) @ x * weights[4]
        return (f - y).square().mean()

    truth = torch.func.jacfwd(torch.func.grad(value))(torch.cat([w_Q, w_K, w_V]).detach())
    recwarn.clear()
    found = cv.exact.ScalarAttention(w_Q, w_K, w_V[0]).spectrum(x, y)
    assert not recwarn.list and not found.outliers.requires_grad
    assert relative(found.eigenvalues, torch.linalg.eigvalsh(truth.detach())) < 1e-10


@pytest.mark.parametrize("kind", ["attention", "feedforward", "norm"])
def test_bounds_of_parameters_that_require_gradients(kind, recwarn):
    case = Case(kind, "mse")
    plain = layer_of(kind, {name: weight.detach() for name, weight in case.weights.items()})
    bound = {"attention": cv.exact.bounds.attention, "feedforward": cv.exact.bounds.feed_forward}.get(kind)
    if bound is None:
        bound = lambda layer, X, loss: cv.exact.bounds.layer_norm(layer, X)  # noqa: E731
    found, expected = (bound(layer, X, case.loss) for layer, X in ((case.layer, case.X), (plain, case.X.detach())))
    keys = list(expected) if kind == "norm" else [(name, name) for name in case.names]
    assert [(found[key].value, found[key].measured) for key in keys] == [
        (expected[key].value, expected[key].measured) for key in keys
    ]
    assert not recwarn.list
