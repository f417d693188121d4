"""G and S of the losses against autodiff, in the sparsest form that each has."""

import pytest
import torch
from torch import nn
from torch.func import grad, jacfwd
from torch.nn import functional

import curvoscope as cv
from curvoscope import losses
from curvoscope.errors import LossError, NonFiniteError
from curvoscope.losses import PairCurvature, ScalarCurvature, SoftmaxCurvature, TokenCurvature
from reference import normal, relative

N, L, M = 3, 4, 2


def _cases():
    r = normal(0)
    Y, targets = r(N, L, M), torch.arange(N * L).view(N, L) % 5
    ignored = targets.masked_fill(targets == 1, -100)
    return {
        "mse": (losses.MSE(Y), ScalarCurvature),
        "cross entropy": (losses.CrossEntropy(targets, r(M, 5)), SoftmaxCurvature),
        "ignored targets and bias": (losses.CrossEntropy(ignored, r(M, 5), r(5)), SoftmaxCurvature),
        "class probabilities": (losses.CrossEntropy(r(N, L, 5).softmax(-1), r(M, 5)), SoftmaxCurvature),
        "logits": (losses.CrossEntropy(targets % M), SoftmaxCurvature),
        "next word": (losses.CrossEntropy(ignored, r(M, 5), shift=True), SoftmaxCurvature),
        "per token": (lambda F: (F * Y).logsumexp(-1).sum(), TokenCurvature),
        "callable mse": (lambda F: ((F - Y) ** 2).mean(), TokenCurvature),
        "torch cross entropy": (
            lambda F: torch.nn.functional.cross_entropy(F.flatten(0, 1), targets.flatten() % M),
            TokenCurvature,
        ),
        "one sequence at a time": (lambda F: (F * Y).flatten(1).logsumexp(1).sum(), PairCurvature),
        "neighbouring tokens": (lambda F: (F[:, 1:] * F[:, :-1]).sum() ** 3, PairCurvature),
        "all sequences": (lambda F: (F * Y).flatten().logsumexp(0), PairCurvature),
        "two distant tokens": (lambda F: (F**2).sum() + F[0, 1, 0] * F[2, 3, 1], PairCurvature),
        "linear": (lambda F: (F * Y).sum(), TokenCurvature),
    }


@pytest.mark.parametrize("name", _cases())
def test_value_gradient_and_hessian(name):
    loss, kind = _cases()[name]
    F = normal(1)(N, L, M)
    found = losses.at(loss, F, squeeze=False)
    assert abs(found.value - float(loss(F))) < 1e-14 * (1 + abs(found.value))
    assert torch.allclose(found.gradient, grad(loss)(F), rtol=0, atol=1e-13)
    S = jacfwd(grad(loss))(F).reshape(N * L * M, N * L * M)
    identity = torch.eye(N * L * M, dtype=torch.float64).view(-1, N, L, M)
    applied = found.curvature.apply(identity).reshape(N * L * M, -1)
    assert relative(applied, S, scale=S.abs().max() + 1) < 1e-12
    assert isinstance(found.curvature, kind)
    if isinstance(found.curvature, PairCurvature):
        mixes_sequences = name in ("neighbouring tokens", "all sequences", "two distant tokens")
        assert found.curvature.blocks.shape[0] == (1 if mixes_sequences else N)


@pytest.mark.parametrize("ports", [(None, None), (slice(0, 1), slice(1, 2)), ("tensor", "tensor"), (None, "tensor")])
def test_curvature_through_ports(ports):
    r = normal(2)
    W, U, F = r(3, M), r(M, 5), r(N, L, M)
    ports = tuple(W if port == "tensor" else port for port in ports)
    left, right = (losses.through(torch.eye(M, dtype=torch.float64), port).T for port in ports)
    softmax = losses.CrossEntropy(torch.arange(N * L).view(N, L) % 5, U).at(F).curvature
    S = jacfwd(grad(losses.CrossEntropy(torch.arange(N * L).view(N, L) % 5, U)))(F).reshape(N * L, M, N * L, M)
    expected = torch.stack([left @ S[t, :, t] @ right.T for t in range(N * L)])
    assert torch.allclose(softmax.between(*ports, 0, N * L), expected, rtol=0, atol=1e-14)
    blocks = torch.stack([S[t, :, t] for t in range(N * L)]).view(N, L, M, M)
    assert torch.allclose(TokenCurvature(blocks).between(*ports, 3, 7), expected[3:7], rtol=0, atol=1e-14)
    scalar = ScalarCurvature(0.3).between(*ports, torch.eye(M, dtype=torch.float64))
    assert torch.allclose(scalar, 0.3 * left @ right.T)


def test_cross_entropy_keeps_its_digits_when_the_softmax_saturates():
    """Two words, logits +-z: S = p (1 - p) (u_1 - u_2)^2 and p = 1 / (1 + exp(2 z)), known to all digits."""
    z, U = 40.0, torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    F = torch.full((1, 1, 1), z, dtype=torch.float64)
    p = 1 / (1 + torch.tensor(2 * z, dtype=torch.float64).exp())
    found = losses.CrossEntropy(torch.zeros(1, 1, dtype=torch.int64), U).at(F)
    assert abs(float(found.gradient) / float(-2 * p) - 1) < 1e-12
    assert abs(float(found.curvature.between(None, None, 0, 1)) / float(4 * p * (1 - p)) - 1) < 1e-12
    assert abs(float(found.curvature.apply(torch.ones(1, 1, 1).double())) / float(4 * p * (1 - p)) - 1) < 1e-12


r = normal(4)
W, X, Y, U, b = r(3, M), r(N, L, 3), r(N, L, M), r(M, 5), r(5)
WORDS = (torch.arange(N * L).view(N, L) % 5).masked_fill(torch.arange(N * L).view(N, L) == 3, -100)
VOCABULARY = {
    "MSE": (losses.MSE(), Y),
    "CrossEntropy of logits": (losses.CrossEntropy(), WORDS.clamp(max=M - 1)),
    "CrossEntropy": (losses.CrossEntropy(unembedding=U, bias=b), WORDS),
    "CrossEntropy, shifted": (losses.CrossEntropy(unembedding=U, ignore_index=2, shift=True), WORDS.clamp_min(0)),
    "CrossEntropy of probabilities": (losses.CrossEntropy(unembedding=U), r(N, L, 5).softmax(-1)),
}


class TestOneVocabulary:
    """The same objects at a layer and at a model that is this layer: the same Hessian."""

    def model(self):
        found = nn.Linear(3, M, bias=False).double()
        found.weight.data = W.T.clone()
        return found

    def of_layer(self, loss):
        """In the order of the model's weight, which is the transpose."""
        H = cv.exact.LinearMLP([W]).hessian(X, loss).dense()
        return H.view(3, M, 3, M).permute(1, 0, 3, 2).reshape(3 * M, 3 * M)

    @pytest.mark.parametrize("name", VOCABULARY)
    def test_a_layer_and_a_model(self, name):
        loss, targets = VOCABULARY[name]
        expected = self.of_layer(loss.bound(targets))
        assert float(expected.abs().max()) > 1e-2
        bound = [(loss.bound(targets), [(X, own)]) for own in (targets, None)]  # the targets may be with the loss
        for given, batches in [(loss, [(X, targets)]), (loss, self.cut(targets)), *bound]:
            H = cv.hessian(self.model(), given, batches, method="autodiff")
            assert relative(H.dense(), expected) < 1e-12
            assert relative(H.outer.dense(), expected) < 1e-12  # the layer is linear

    def cut(self, targets):
        return [(X[:1], targets[:1]), (X[1:], targets[1:])]

    @pytest.mark.parametrize("name", VOCABULARY)
    def test_other_targets_than_its_own(self, name):
        loss, targets = VOCABULARY[name]
        with pytest.raises(LossError, match="loss_fn: has its own targets"):
            cv.hessian(self.model(), loss.bound(targets), [(X, targets.flip(0))])
        with pytest.raises(LossError, match="loss_fn: has its own targets"):
            cv.hessian(self.model(), loss.bound(targets), [(X, targets)], micro_batch=1)

    @pytest.mark.parametrize(
        "loss",
        [
            losses.MSE(),
            losses.CrossEntropy(),
            losses.MeanLoss(functional.mse_loss),
            losses.Contrastive(functional.mse_loss),
            losses.Regularised(functional.mse_loss, lambda parameters: 0.0),
            functional.mse_loss,
            nn.CrossEntropyLoss(),
            "mse",
        ],
        ids=lambda loss: getattr(loss, "__name__", type(loss).__name__),
    )
    def test_a_loss_of_two_arguments_at_a_layer(self, loss):
        with pytest.raises(LossError, match=r"^loss: .*targets\)"):
            self.of_layer(loss)

    @pytest.mark.parametrize("loss", [lambda F: F.square().mean(), "mse"], ids=["of the output", "no function"])
    def test_a_loss_of_one_argument_at_a_model(self, loss):
        with pytest.raises(LossError, match=r"^loss_fn: .*outputs, targets"):
            cv.hessian(self.model(), loss, [(X, Y)])

    @pytest.mark.parametrize("loss", [losses.MSE, losses.CrossEntropy, nn.MSELoss])
    def test_a_class_in_place_of_a_loss(self, loss):
        said = rf"^loss_fn: is the class {loss.__name__}; pass an instance, {loss.__name__}\(\)$"
        with pytest.raises(LossError, match=said):
            cv.hessian(self.model(), loss, [(X, Y)])
        with pytest.raises(LossError, match=said):
            losses.Regularised(loss, lambda parameters: 0.0)

    @pytest.mark.parametrize(
        ("loss", "seen"), [(lambda F: F.sum(), r"<lambda>\(F\)"), ("mse", "str"), (nn.ReLU(), r"ReLU\(input\)")]
    )
    def test_an_error_shows_what_was_given(self, loss, seen):
        with pytest.raises(LossError, match=rf"^loss_fn: must accept \(outputs, targets\), got {seen}; pass lambda"):
            cv.hessian(self.model(), loss, [(X, Y)])

    def test_any_loss_of_a_model_becomes_one_of_a_layer(self):
        loss = losses.MeanLoss(functional.mse_loss)
        found = self.of_layer(lambda F: loss(F, Y))
        assert relative(found, self.of_layer(losses.MSE(Y))) < 1e-12

    def test_the_old_name(self):
        assert cv.curvature.MeanSquaredError is losses.MSE and cv.curvature.CrossEntropy is losses.CrossEntropy

    def test_a_root(self):
        loss = losses.CrossEntropy(WORDS, U)
        S = loss.curvature(Y).between(None, None, 0, N * L)
        root = loss.curvature(Y).root().flatten(0, 1)
        assert relative(root @ root.mT, S) < 1e-12


@pytest.mark.parametrize("alter", ["a hook", "a forward of its own"])
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss])
def test_a_torch_loss_that_is_altered_is_the_function_that_it_computes(kind, alter):
    """Three times the loss, written out: its Hessian is three times that of the loss of torch."""
    draw, loss, own = normal(0), kind(), kind()
    if alter == "a hook":
        loss.register_forward_hook(lambda module, inputs, value: 3 * value)
    else:
        loss.forward = lambda F, Y: 3 * own(F, Y)
    model, inputs = nn.Linear(3, 2, bias=False).double(), draw(5, 3)
    targets = torch.tensor([0, 1, 1, 0, 1]) if kind is nn.CrossEntropyLoss else draw(5, 2)
    p = (inputs @ model.weight.detach().T).softmax(-1)
    S = (
        torch.diag_embed(p) - p[:, :, None] * p[:, None]
        if kind is nn.CrossEntropyLoss
        else torch.eye(2).expand(5, 2, 2)
    )
    expected = 3 / 5 * torch.einsum("nij,na,nb->iajb", S.double(), inputs, inputs).reshape(6, 6)
    batches = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    assert relative(cv.hessian(model, loss, batches).dense(), expected) < 1e-12


def test_a_loss_may_overwrite_the_output():
    F = normal(1)(N, L, M)
    found, before = losses.at(lambda F: F.mul_(2).pow(3).sum(), F, False), F.clone()
    expected = losses.at(lambda F: (2 * F).pow(3).sum(), F, False)
    assert torch.equal(F, before) and found.value == expected.value
    assert torch.equal(found.gradient, expected.gradient)
    assert torch.equal(found.curvature.apply(F), expected.curvature.apply(F))


@pytest.mark.parametrize(
    "loss, derivative",
    [(lambda F: (F - F.detach()).square().sum().sqrt(), "first"), (lambda F: (F - F.detach()).norm(), "second")],
)
def test_a_loss_without_derivatives_at_the_output(loss, derivative):
    with pytest.raises(NonFiniteError, match=f"^loss: has a {derivative} derivative that is not finite"):
        losses.at(loss, normal(1)(N, L, M), False)


def test_a_complex_loss():
    with pytest.raises(LossError, match=r"^loss: must return a real number; got torch\.complex128"):
        losses.at(lambda F: F.sum() * 1j, normal(1)(N, L, M), False)
