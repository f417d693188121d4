"""The Gauss-Newton optimizer: its curvature, its steps, its damping and its state."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.errors import ModelError, NonFiniteError
from curvoscope.losses import objective_of
from curvoscope.training import GaussNewton
from curvoscope.training.factors import ParameterCurvature, sampled_gradients
from reference import normal


def case(seed=0):
    r = normal(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(r(*parameter.shape) / 2)
    X = r(30, 4) * torch.tensor([1.0, 0.3, 0.1, 0.03])
    return model, X, (X @ r(4, 3)).argmax(1)


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- curvature


def drawn(model, outputs, targets, ask, count=150):
    """Mean and standard error over the samples of what `ask` takes from one."""
    objective, named = objective_of(nn.CrossEntropyLoss()), dict(model.named_parameters())
    found = torch.stack([ask(sampled_gradients(objective, outputs, targets, named, (7, i))) for i in range(count)])
    return found.mean(0), found.std(0) / count**0.5


@pytest.mark.parametrize("name", ["0.weight", "2.weight"])
def test_factors_are_those_of_kfac(name):
    model, X, y = case()
    H = cv.hessian(model, nn.CrossEntropyLoss(), [(X, y)])
    exact = cv.approximations.kfac(H, name).dense()
    mean, stderr = drawn(model, model(X), y, lambda s: torch.kron(s[name].factor(0), s[name].factor(1)))
    shape = dict(model.named_parameters())[name].shape
    order = H._blocks[name].gather({name: torch.arange(len(exact)).view(shape)}).long()
    assert (mean[order][:, order] - exact).norm() < 4 * stderr.norm() + 1e-12


def test_a_parameter_that_is_no_matrix_has_its_diagonal():
    model, X, y = case()
    exact = cv.hessian(model, nn.CrossEntropyLoss(), [(X, y)]).outer["2.bias"].dense().diagonal()
    mean, stderr = drawn(model, model(X), y, lambda s: s["2.bias"].square())
    assert (mean - exact).norm() < 4 * stderr.norm()


def test_bases_become_eigenvectors():
    """Orthogonal iteration on a fixed matrix: the values are its eigenvalues in the end, and their sum its trace."""
    r = normal(2)
    Q, P = torch.linalg.qr(r(4, 4))[0], torch.linalg.qr(r(3, 3))[0]
    left, right = Q @ torch.diag(torch.tensor([1.0, 3, 9, 27]).double()) @ Q.T, P @ torch.diag(r(3).exp()) @ P.T
    known = ParameterCurvature(r(4, 3), (left, right), (torch.linalg.qr(r(4, 4))[0], torch.linalg.qr(r(3, 3))[0]))
    for _ in range(200):
        known = known.turned()
    exact = torch.outer(torch.linalg.eigvalsh(left), torch.linalg.eigvalsh(right)).flatten().sort().values
    assert torch.allclose(known.values.flatten().sort().values, exact)
    assert torch.allclose(ParameterCurvature(r(4, 3), (left, right)).turned().values.flatten().sort().values, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bases_stay_eigenvectors_where_factors_are_singular(dtype):
    """The product of a factor with a null vector is noise, from which no other column may be turned away."""
    r = normal(3)
    left, right = (factor @ factor.T for factor in (r(9, 4).to(dtype), r(6, 3).to(dtype)))
    known = ParameterCurvature(r(9, 6).to(dtype), (left, right)).turned()
    for _ in range(3):
        known = known.turned()
        for U, factor in zip(known.bases, (left, right), strict=True):
            rest = U.T @ factor @ U
            rest -= rest.diagonal().diag()
            assert float(rest.norm()) <= 100 * torch.finfo(dtype).eps * float(factor.norm())


def test_an_embedding_is_a_matrix_of_unit_rows():
    """Its factors are those of the product with one-hot vectors, without the padding."""
    tokens, y = torch.tensor([[0, 2, 2], [3, 1, 2]]), torch.tensor([[1, 0, 1], [0, 0, 1]])
    embedding, head = nn.Embedding(5, 3, padding_idx=1).double(), nn.Linear(3, 2).double()
    table = nn.Parameter(embedding.weight.detach().clone())
    one_hot = nn.functional.one_hot(tokens, 5).double()
    found = []
    for outputs, name, weight in (
        (head(embedding(tokens)), "looked up", embedding.weight),
        (head(one_hot @ table), "multiplied", table),
    ):
        loss = objective_of(cv.losses.CrossEntropy())
        found.append(sampled_gradients(loss, outputs, y, {name: weight}, (0, 0))[name])
    looked_up, multiplied = found
    assert looked_up.rows.shape == (5,) and multiplied.rows.shape == (6, 5)
    counts = torch.tensor([1.0, 0, 3, 1, 0]).double()
    assert torch.allclose(looked_up.factor(0), counts / 5)
    assert torch.allclose(multiplied.factor(0).diagonal(), torch.tensor([1.0, 1, 3, 1, 0]).double() / 6)
    kept = [0, 1, 2, 3, 5]  # all but the padding
    assert torch.allclose(looked_up.columns, multiplied.columns[kept])


def test_long_sides_have_diagonal_factors(monkeypatch):
    monkeypatch.setattr("curvoscope.training.factors._LARGEST", 4)
    model, X, y = case()
    sample = sampled_gradients(objective_of(nn.CrossEntropyLoss()), model(X), y, dict(model.named_parameters()), (0, 0))
    factor = sample["0.weight"].factor(0)  # of 5 rows
    assert torch.allclose(factor, (sample["0.weight"].rows.T @ sample["0.weight"].rows / 30).diagonal())
    known = ParameterCurvature.of(sample["0.weight"])
    assert known.bases[0] is None and known.bases[1].shape == (4, 4)
    G = normal(1)(5, 4)
    assert torch.allclose(known.back(known.into(G)), G)


# ---- steps


def dense_root(known, gradient):
    """The first step, by dense matrices: B diag(((B^T g)^2 + c D) / 2)^-1/2 B^T g, B the basis."""
    D = known["values"].flatten()
    left, right = (
        torch.eye(size).double() if basis is None else basis
        for basis, size in zip(known["bases"], gradient.shape if gradient.ndim == 2 else (1, len(D)), strict=True)
    )
    B, g = torch.kron(left, right), gradient.flatten()
    turned = B.T @ g
    v = (turned.square() + D * turned.square().sum() / D.sum()) / 2
    return (B @ torch.diag(v.rsqrt()) @ B.T @ g).view(gradient.shape)


def test_first_step():
    model, X, y = case()
    before = weights_of(model)
    loss = nn.functional.cross_entropy(model(X), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    optimizer = GaussNewton(model, nn.CrossEntropyLoss(), lr=0.01, weight_decay=0.5)
    assert optimizer.step((X, y)) == pytest.approx(float(loss.detach()))
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        known = optimizer.state[parameter]["curvature"]
        expected = old - 0.01 * 0.5 * old - 0.01 * dense_root(known, gradient)
        assert torch.allclose(parameter.detach(), expected, rtol=1e-6, atol=1e-9)
        if known["factors"] is not None:
            U, factor = known["bases"][0], known["factors"][0]
            assert torch.allclose(U.T @ factor @ U, (U.T @ factor @ U).diagonal().diag(), atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_turned_inputs_change_nothing(seed):
    """The same network in another basis of its inputs and of its hidden units takes the same steps; Adam does not."""
    r = normal(seed)
    X, Y, W, V = r(30, 4) * torch.tensor([1.0, 2.0, 4.0, 8.0]).double(), r(30, 3), r(4, 3), r(3, 3)
    Q, P = torch.linalg.qr(r(4, 4))[0], torch.linalg.qr(r(3, 3))[0]

    def losses(inputs, first, second, optimizer_of):
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
        with torch.no_grad():
            model[0].weight.copy_(first.T)
            model[1].weight.copy_(second.T)
        step = optimizer_of(model, inputs)
        return torch.tensor([step() for _ in range(25)], dtype=torch.float64)

    def gauss_newton(model, inputs):
        optimizer = GaussNewton(model, nn.MSELoss(), lr=0.05, seed=seed)
        return lambda: optimizer.step((inputs, Y))

    def adam(model, inputs):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

        def step():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), Y)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step

    for kind, alike in ((gauss_newton, True), (adam, False)):
        plain, turned = losses(X, W, V, kind), losses(X @ Q, Q.T @ W @ P, P.T @ V, kind)
        apart = float((plain / turned - 1).abs().max())
        assert apart < 1e-4 if alike else apart > 1e-2


@pytest.mark.parametrize(("lr", "factor"), [(1e-4, 1.0), (1e3, 0.95**2)])
def test_the_scale_follows_the_ratio_of_decreases(lr, factor):
    """A short step is predicted well, a far too long one is not; what fell comes back, and no further than 1."""
    model, X, y = case()
    optimizer = GaussNewton(model, nn.CrossEntropyLoss(), lr=lr, adapt=2)
    optimizer.step((X, y))
    assert optimizer.scale == pytest.approx(factor)
    optimizer.step((X, y))
    assert optimizer.scale == pytest.approx(factor)  # nothing was measured
    optimizer.param_groups[0]["lr"] = 1e-9
    model.load_state_dict(case()[0].state_dict())
    for _ in range(2):
        optimizer.state.clear()
        optimizer._steps = 0
        optimizer.step((X, y))
    assert optimizer.scale == pytest.approx(1.0)


@pytest.mark.parametrize("drawn_by", ["torch", "numpy"])
def test_the_ratio_is_measured_with_the_same_dropout_and_leaves_no_trace(drawn_by):
    """Short steps are predicted well behind dropout too; measured or not, the run is the same to the bit."""

    class Dropped(nn.Module):
        def forward(self, x):
            kept = torch.rand(x.shape) if drawn_by == "torch" else torch.from_numpy(np.random.random(x.shape))
            return x * (kept > 0.5)

    runs = []
    for adapt in (0, 1):
        plain, X, y = case()
        model = nn.Sequential(plain[0], nn.BatchNorm1d(5).double(), Dropped(), plain[2])
        torch.manual_seed(0)
        np.random.seed(0)
        optimizer = GaussNewton(model, nn.CrossEntropyLoss(), lr=1e-3, adapt=adapt)
        for _ in range(12):
            optimizer.step((X, y))
            assert optimizer.scale == 1
        runs.append([*weights_of(model), *(buffer.clone() for buffer in model.buffers())])
    assert same(*runs)


class Exponential(nn.Module):
    def forward(self, x):
        return x.exp()


def test_a_step_to_where_the_loss_is_not_finite_is_undone():
    model, X = nn.Sequential(nn.Linear(2, 1), Exponential()).double(), normal(0)(5, 2)
    before = weights_of(model)
    optimizer = GaussNewton(model, nn.MSELoss(), lr=1e6)
    optimizer.step((X, torch.full((5, 1), 30.0).double()))
    assert same(before, weights_of(model)) and optimizer.scale < 1


def test_groups_weight_decay_and_frozen_parameters():
    """The second group does not move, nor does a frozen parameter; a parameter that is unfrozen later does."""
    model, X, y = case()
    model[0].bias.requires_grad_(False)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 1e-300}]
    optimizer = GaussNewton(model, nn.CrossEntropyLoss(), groups, weight_decay=1e-3)
    before = weights_of(model)
    for _ in range(3):
        optimizer.step((X, y))
    moved = [not torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True)]
    assert moved == [True, False, False, False]
    model[0].bias.requires_grad_()
    optimizer.step((X, y))
    assert torch.equal(model[0].bias, before[1])  # its curvature is not known before the next sample
    for _ in range(7):
        optimizer.step((X, y))
    assert not torch.equal(model[0].bias, before[1])
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="frozen"):
        optimizer.step((X, y))


def test_a_closure_is_the_batch():
    runs = []
    for closed in (False, True):
        model, X, y = case()
        optimizer = GaussNewton(model, nn.CrossEntropyLoss())
        for _ in range(3):
            optimizer.step((lambda model=model, X=X, y=y: (model(X), y)) if closed else (X, y))
        runs.append(weights_of(model))
    assert same(*runs)


def test_scheduler_sets_the_rate():
    model, X, y = case()
    optimizer = GaussNewton(model, nn.CrossEntropyLoss())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    optimizer.step((X, y))
    scheduler.step()
    before = weights_of(model)
    optimizer.step((X, y))
    assert same(before, weights_of(model))


# ---- state


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_run_that_is_stored_and_continued_is_the_same_to_the_bit(cut, tmp_path):
    options = {"every": 3, "bases": 6, "adapt": 2, "seed": 1, "weight_decay": 1e-3, "lr": 10.0}
    runs = []
    for stops in (False, True):
        model, X, y = case()
        optimizer = GaussNewton(model, nn.CrossEntropyLoss(), **options)
        for step in range(10):
            if stops and step == cut:
                torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
                weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
                model = case(seed=5)[0]
                model.load_state_dict(weights)
                optimizer = GaussNewton(model, nn.CrossEntropyLoss(), **options)
                optimizer.load_state_dict(state)
            optimizer.step((X, y))
        runs.append(weights_of(model))
        assert optimizer.scale < 1
    assert same(*runs)


def test_a_state_has_the_seed():
    """Whatever the seed of the process that continues."""
    runs = []
    for seed in (4, 5):
        model, X, y = case()
        first = GaussNewton(model, nn.CrossEntropyLoss(), every=2, seed=4)
        first.step((X, y))
        optimizer = GaussNewton(model, nn.CrossEntropyLoss(), every=2, seed=seed)
        optimizer.load_state_dict(first.state_dict())
        for _ in range(4):
            optimizer.step((X, y))
        runs.append(weights_of(model))
    assert same(*runs)


def test_an_error_changes_nothing():
    model, X, y = case()
    optimizer = GaussNewton(model, nn.CrossEntropyLoss())
    optimizer.step((X, y))
    before, state = weights_of(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(NonFiniteError, match="lower lr"):
        optimizer.step((X * float("nan"), y))
    assert same(before, weights_of(model))
    assert str(state) == str(optimizer.state_dict())


def test_a_gradient_that_is_not_finite_is_an_error():
    """The square root of zero: a finite loss, an infinite gradient."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    loss = cv.losses.MeanLoss(lambda F, Y: F.abs().sqrt().mean(), lambda F, Y: len(F))
    optimizer = GaussNewton(model, loss, every=1)
    optimizer._steps = 3  # no sample is due: the loss has no curvature there
    with pytest.raises(NonFiniteError, match="gradient"):
        optimizer.step((torch.ones(2, 1).double(), torch.ones(2, 1).double()))
    assert float(model.weight.detach()) == 0


# ---- models


class Shared(nn.Module):
    """One matrix three times, and a vector."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.scale * self.layer(self.layer(self.layer(x).tanh()).tanh())


class NoMatrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters, self.scale = nn.Conv1d(1, 3, 3), nn.Parameter(torch.ones(3, 1))

    def forward(self, x):
        return (self.scale * self.filters(x[:, None])).tanh().mean(-1)


@pytest.mark.parametrize("kind", [Shared, NoMatrices])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_models_train(kind, dtype):
    torch.manual_seed(0)
    model = kind().to(dtype)
    X = normal(1)(40, 3 if kind is Shared else 8).to(dtype)
    Y = 0.5 * torch.stack([X[:, 0], X[:, 1] - X[:, 2], X[:, 2]], 1).tanh()
    optimizer = GaussNewton(model, nn.MSELoss(), lr=0.05)
    losses = [optimizer.step((X, Y)) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


def test_uses_of_a_shared_matrix_are_added():
    torch.manual_seed(0)
    model, X = Shared().double(), normal(1)(6, 3)
    loss, named = objective_of(nn.MSELoss()), dict(model.named_parameters())
    outputs = model(X)
    sample = sampled_gradients(loss, outputs, torch.zeros_like(X), named, (0, 0))["layer.weight"]
    alone = sampled_gradients(loss, outputs, torch.zeros_like(X), {"scale": model.scale}, (0, 0))
    assert sample.rows.shape == (18, 3) and set(alone) == {"scale"}
    # the cotangent is sqrt(2/18) times signs: its gradient by autograd, from the signs that the factors imply
    total = torch.autograd.grad(outputs, model.scale, _cotangent(loss, outputs, X), retain_graph=True)[0]
    assert torch.allclose(total, alone["scale"])
    whole = torch.autograd.grad(outputs, model.layer.weight, _cotangent(loss, outputs, X))[0]
    assert torch.allclose(sample.rows.T @ sample.columns, whole)


def _cotangent(loss, outputs, X):
    from curvoscope.autodiff.cotangents import cotangents

    return cotangents(loss, outputs, torch.zeros_like(X))[1].draw((0, 0))[0]


@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_model_trains(tied):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=11, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(0))
    optimizer = GaussNewton(model, cv.losses.CrossEntropy(shift=True), lr=0.05)
    losses = [optimizer.step({"input_ids": tokens, "labels": tokens}) for _ in range(20)]
    with torch.no_grad():
        own = float(model(input_ids=tokens, labels=tokens).loss)
    assert own < 0.8 * losses[0]
    known = optimizer.state[model.transformer.wte.weight]["curvature"]
    assert (known["factors"] is None) == tied
