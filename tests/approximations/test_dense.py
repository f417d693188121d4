"""Each approximation against its definition, written out with numpy in float64, and against curvlinops."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.approximations import GradientFactors, GradientSource, source_of
from curvoscope.approximations import kronecker as by_function
from curvoscope.approximations.names import approximation
from curvoscope.errors import RangeError
from reference import normal

A, P, CLASSES, ROWS, TOKENS = 3, 4, 3, 4, 3


class Mixing(nn.Module):
    """x W, mixed over the tokens of a row: the tokens of a sequence interact downstream."""

    def __init__(self):
        super().__init__()
        r = normal(3)
        self.first, self.second = nn.Parameter(r(A, P)), nn.Parameter(r(P, CLASSES))

    def forward(self, x):
        return torch.tanh(x @ self.first).cumsum(1).sin() @ self.second


r = normal(0)
X, LABELS = r(ROWS, TOKENS, A), torch.tensor([[0, 2, 1], [1, 1, -100], [2, 0, 0], [0, 1, 2]])
MODEL = Mixing()
LOSS = cv.losses.CrossEntropy()
H = cv.hessian(MODEL, LOSS, [(X, LABELS)], cv.blocks_of(MODEL).select("first"))


def after(y):
    """Logits of one row from y = x W."""
    return torch.tanh(y).cumsum(0).sin() @ MODEL.second.detach()


def written_out():
    """x (rows, tokens, a), and delta (rows, directions, tokens, p) whose squares are the Gauss-Newton matrix of y."""
    deltas, gradients = [], []
    counted = int((LABELS >= 0).sum())
    for x, labels in zip(X, LABELS, strict=True):
        y = (x @ MODEL.first).detach()
        jacobian = torch.func.jacrev(after)(y).numpy()  # (tokens, classes, tokens, p)
        p = torch.softmax(after(y), -1).numpy()
        S = np.zeros((TOKENS, CLASSES, TOKENS, CLASSES))
        wrong = p.copy()
        for t, label in enumerate(labels.tolist()):
            if label >= 0:
                S[t, :, t] = (np.diag(p[t]) - np.outer(p[t], p[t])) / counted
                wrong[t, label] -= 1
            else:
                wrong[t] = 0
        values, vectors = np.linalg.eigh(S.reshape(TOKENS * CLASSES, -1))
        root = (vectors * np.sqrt(np.clip(values, 0, None))).T.reshape(-1, TOKENS, CLASSES)
        deltas.append(np.einsum("ktc,tcup->kup", root, jacobian))
        gradients.append(np.einsum("tc,tcup->up", wrong, jacobian) / np.sqrt(counted))
    return X.numpy(), np.array(deltas), np.array(gradients)


INPUTS, DELTAS, WRONG = written_out()
GAMMA = np.einsum("nta,nktp->nkap", INPUTS, DELTAS).reshape(-1, A, P)
FLAT = GAMMA.reshape(len(GAMMA), -1)
TRUTH = FLAT.T @ FLAT
U = np.einsum("nta,ntb->ab", INPUTS, INPUTS)
V = np.einsum("nktp,nktq->pq", DELTAS, DELTAS)


def masked(keep):
    """The entries of H for which keep(row, column, row', column')."""
    grid = np.indices((A, P)).reshape(2, -1)
    return np.where([[keep(*x, *y) for y in grid.T] for x in grid.T], TRUTH, 0.0)


def ekfac():
    basis = np.kron(np.linalg.eigh(U)[1], np.linalg.eigh(V)[1])
    return basis @ np.diag(np.diag(basis.T @ TRUTH @ basis)) @ basis.T


def tkfac():
    left = np.einsum("nktp,nta,ntb->ab", DELTAS**2, INPUTS, INPUTS)
    right = np.einsum("nta,nktp,nktq->pq", INPUTS**2, DELTAS, DELTAS)
    return np.kron(left, right) / np.einsum("nta,nktp->", INPUTS**2, DELTAS**2)


def reduced():
    left = np.einsum("na,nb->ab", INPUTS.mean(1), INPUTS.mean(1))
    right = np.einsum("nkp,nkq->pq", DELTAS.sum(2), DELTAS.sum(2))
    return np.kron(left, right) / ROWS


def root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T


def nearest(rank):
    left, values, right = np.linalg.svd(rearranged())
    short = (left[:, :rank] * values[:rank]) @ right[:rank]
    return short.reshape(A, A, P, P).transpose(0, 2, 1, 3).reshape(A * P, A * P)


def rearranged():
    return TRUTH.reshape(A, P, A, P).transpose(0, 2, 1, 3).reshape(A * A, P * P)


def shampoo(power):
    left, right = np.einsum("nap,nbp->ab", GAMMA, GAMMA), np.einsum("nap,naq->pq", GAMMA, GAMMA)
    return np.kron(left, right) / np.trace(left) if power == 0.5 else np.kron(root(left), root(right))


def of_labels():
    gradients = np.einsum("nta,ntp->nap", INPUTS, WRONG).reshape(ROWS, -1)
    return gradients.T @ gradients


DEFINITIONS = {
    "diagonal": lambda: np.diag(np.diag(TRUTH)),
    "neurons": lambda: masked(lambda i, j, k, m: j == m),
    "kfac": lambda: np.kron(U, V) / (ROWS * TOKENS),
    "kfac:reduce": reduced,
    "ekfac": ekfac,
    "tkfac": tkfac,
    "shampoo": lambda: shampoo(0.5),
    "shampoo:1/4": lambda: shampoo(0.25),
    "input": lambda: np.kron(U, np.eye(P)) * np.trace(V) / (P * ROWS * TOKENS),
    "empirical": of_labels,
    "kronecker:1": lambda: nearest(1),
    "kronecker:3": lambda: nearest(3),
    "kronecker:9": lambda: TRUTH,
}


@pytest.fixture(scope="module")
def source():
    return source_of(H, "first")


def test_the_gradients_add_up_to_the_block(source):
    assert np.allclose(source.dense(), TRUTH, rtol=0, atol=1e-12)
    assert np.allclose(H.outer["first"].dense(), TRUTH, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definition_and_operator(name, source):
    found, expected = approximation(source, name), DEFINITIONS[name]()
    size = np.linalg.norm(expected)
    dense = found.dense()
    assert np.abs(dense.numpy() - expected).max() < 1e-9 * size
    assert found.name == name and torch.equal(dense, dense.T)
    v = normal(1)(A * P, 2)
    assert torch.allclose(found @ v, dense @ v, atol=1e-12)
    assert float(found.trace()) == pytest.approx(np.trace(expected), rel=1e-9)
    assert float(found.frobenius_norm()) == pytest.approx(size, rel=1e-9)
    assert np.allclose(found.diagonal(), np.diag(expected), atol=1e-9 * size)
    assert np.allclose(found.eigenvalues(), np.linalg.eigvalsh(expected), atol=1e-9 * size)
    solution = found.solve(v, damping=0.1)
    x = solution.value
    assert solution.method == "direct" and solution.converged and torch.equal(x, found.damped_solve(v, 0.1))
    assert np.allclose(x, np.linalg.solve(expected + 0.1 * np.eye(A * P), v.numpy()), atol=1e-8)
    assert torch.allclose(found.solve(v[:, 0], 0.1).value, x[:, 0])
    inner = sum(float(found.quadratic(part).sum()) for part in source.parts)
    assert inner == pytest.approx((expected * TRUTH).sum(), rel=1e-9)


def test_kl_shampoo_is_stationary(source):
    """The factors fulfil both equations of the minimum of the divergence, and are its minimum in every direction."""
    kappa = 0.01
    found = cv.approximations.kl_shampoo(source, damping=kappa)
    left, right = found.left.numpy(), found.right.numpy()
    kappa *= np.trace(TRUTH) / (A * P)
    inverse, other = np.linalg.inv(right), np.linalg.inv(left)
    first = (np.einsum("nap,pq,nbq->ab", GAMMA, inverse, GAMMA) + kappa * np.trace(inverse) * np.eye(A)) / P
    second = (np.einsum("nap,ab,nbq->pq", GAMMA, other, GAMMA) + kappa * np.trace(other) * np.eye(P)) / A
    assert np.allclose(first, left, rtol=1e-9) and np.allclose(second, right, rtol=1e-9)


def test_a_solve_that_rounding_makes_longer():
    """Conjugate gradients take some five times as many steps as the matrix has rows."""
    root = torch.linalg.qr(r(25, 25)).Q * torch.logspace(0, -3, 25)
    source = GradientSource("W", (GradientFactors(None, root.T.view(1, 25, 5, 5)),), exact=True)
    b, damped = r(25), source.dense() + 1e-6 * torch.eye(25)
    found = approximation(source, "kronecker:25").solve(b, damping=1e-6).value
    assert (damped @ found - b).norm() < 1e-8 * b.norm()


def test_nearest_by_lanczos_is_that_of_the_singular_value_decomposition(source, monkeypatch):
    monkeypatch.setattr(sys.modules["curvoscope.approximations.kronecker"], "_DENSE", 0)
    for rank in (1, 3):
        found = by_function(source, rank=rank).dense().numpy()
        assert np.abs(found - nearest(rank)).max() < 1e-9 * np.linalg.norm(TRUTH)


def test_heads_and_layers():
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    inputs, targets = r(2, 3, 4), r(2, 3, 4)
    found = cv.hessian(model, nn.MSELoss(), [(inputs, targets)], cv.blocks_of(model).select("*.attn.[QKO]"))
    for name, same in (("Q", lambda i, j: j // 2), ("O", lambda i, j: i // 2)):
        truth = found.outer[f"h.0.attn.{name}"].dense().numpy()
        grid = np.indices((4, 4)).reshape(2, -1).T
        keep = np.array([[same(*x) == same(*y) for y in grid] for x in grid])
        for text, expected in (("heads", truth * keep), ("kronecker:4/heads", truth * keep)):
            assert np.allclose(approximation(found, text, f"h.0.attn.{name}").dense(), expected, atol=1e-12)
    both = [f"h.0.attn.{name}" for name in "QK"]
    kept = cv.approximations.layers(found, both)
    norms = [float(found.outer[name].frobenius_norm()) for name in both]
    assert float(kept.frobenius_norm()) == pytest.approx(np.hypot(*norms), rel=1e-12)
    whole = cv.approximations.joined([source_of(found, name) for name in both])
    joint = found.outer.select(both).frobenius_norm(matvecs=32)  # all columns: exact
    assert float(whole.dense().norm()) == pytest.approx(float(joint), rel=1e-9)
    b = r(32)
    x = kept.solve(b, 0.3).value
    assert torch.allclose(kept @ x + 0.3 * x, b)


def test_kfac_and_ekfac_are_those_of_curvlinops():
    """Without shared weights; a block as it is stored, (p, a)."""
    curvlinops = pytest.importorskip("curvlinops")
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    inputs, labels = r(7, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    found = cv.hessian(model, nn.CrossEntropyLoss(), [(inputs, labels)])
    for peer, make in (
        (curvlinops.KFACLinearOperator, cv.approximations.kfac),
        (curvlinops.EKFACLinearOperator, cv.approximations.ekfac),
    ):
        parameters = list(model.parameters())
        operator = peer(
            model,
            nn.CrossEntropyLoss(),
            parameters,
            [(inputs, labels)],
            fisher_type="type-2",
            check_deterministic=False,
        )
        dense = operator @ torch.eye(24, dtype=torch.float64)
        for name, place in (("0.weight", slice(0, 12)), ("2.weight", slice(12, 24))):
            assert torch.allclose(make(found, name).dense(), dense[place, place], rtol=0, atol=1e-9)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kfac_is_exact_for_deep_linear_networks(sharing):
    """With squared error; expand for one token per row, reduce for the mean over the tokens of a row."""
    linear = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = linear

        def forward(self, x):
            return self.inside(x).mean(1)

    model, inputs = (linear, r(6, 3)) if sharing == "expand" else (Averaged(), r(6, 4, 3))
    found = cv.hessian(model, nn.MSELoss(), [(inputs, r(6, 2))])
    for row in cv.analysis.audit(found, approximations=["kfac" if sharing == "expand" else "kfac:reduce"]):
        assert row.error < 1e-9 and row.step_error < 1e-9 and row.decrease == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", ["Q", "K"])
def test_rounding_below_zero_is_no_negative_eigenvalue(name):
    """A closed form of several heads is taken by its entries: 24 of them, from gradients in fewer directions."""
    layer = cv.exact.SelfAttention(r(6, 4), r(6, 4), r(6, 4), r(4, 6), heads=2, causal=True)
    closed = layer.hessian(r(2, 6), cv.losses.MSE(r(2, 6)))
    assert source_of(closed, name, signed=True).negative == ()
    assert approximation(closed, "shampoo", name).trace() == pytest.approx(closed.outer[name].trace(), rel=1e-9)


def test_closed_forms_have_approximations():
    layer = cv.exact.SelfAttention(r(3, 4), r(3, 4), r(3, 4))
    closed = layer.hessian(r(5, 3), cv.losses.MSE(r(5, 4)))
    for name in closed.names:
        truth = closed.outer[name].dense()
        assert torch.allclose(source_of(closed, name).dense(), truth, atol=1e-9 * truth.norm())
        full = cv.approximations.kronecker(closed, name, rank=min(closed.shapes[name]) ** 2)
        assert (full.dense() - truth).norm() < 1e-9 * truth.norm()
    mlp = cv.exact.LinearMLP([r(3, 4), r(4, 2)]).hessian(r(5, 3), cv.losses.MSE(r(5, 2)))
    for row in cv.analysis.audit(mlp, approximations=["kfac"]):
        assert row.error < 1e-9


def test_the_empirical_fisher_of_several_weights():
    """The gradient of a sequence over both weights, which read the same inputs or not."""
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    inputs, labels = r(2, 3, 4), torch.tensor([[0, 1, -100], [3, 2, 2]])
    loss = cv.losses.CrossEntropy()
    blocks = cv.blocks_of(model).select("*.attn.[QKO]")
    found = cv.hessian(model, loss, [(inputs, labels)], blocks)
    weights = {"Q": slice(0, 4), "K": slice(4, 8)}
    expected = {"QK": np.zeros((32, 32)), "QO": np.zeros((32, 32))}
    for x, label in zip(inputs, labels, strict=True):
        summed = nn.functional.cross_entropy(model(x[None])[0], label, ignore_index=-100, reduction="sum")
        fused, output = torch.autograd.grad(summed, [model.self_attn.in_proj_weight, model.self_attn.out_proj.weight])
        Q, K = (fused[place].T for place in weights.values())
        for name, gradient in (("QK", torch.cat([Q, K], 1)), ("QO", torch.cat([Q.flatten(), output.T.flatten()]))):
            flat = gradient.flatten().numpy()
            expected[name] += np.outer(flat, flat) / 5
    for pair, truth in expected.items():
        joint = cv.approximations.joined([source_of(found, f"h.0.attn.{role}") for role in pair])
        assert np.allclose(approximation(joint, "empirical").dense(), truth, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kronecker:1/heads", r"^block: 'first' has no heads"),
        ("kfac/heads", r"^block: 'first' has no heads"),
        ("kfac/layers", r"^block: 'first' is one weight"),
        ("kfac/heads/heads", r"^approximations: got 'kfac/heads/heads', expected a name"),
        ("/heads", r"^approximations: got '/heads', expected a name"),
        (
            "shampoo:1/0",
            r"^approximations: got 'shampoo:1/0', but shampoo has no option '1/0'; expected .* shampoo:1/4",
        ),
        ("kronecker:1.5", r"^approximations: got 'kronecker:1.5', but kronecker has no option '1.5'"),
        ("kronecker:10", r"^rank: got 10, expected 1 to 9"),
    ],
)
def test_names_that_a_block_cannot_have(text, message, source):
    with pytest.raises(cv.CurvoscopeError, match=message):
        approximation(source, text)


def test_a_rank_is_a_whole_number(source):
    with pytest.raises(RangeError, match=r"^rank: got 1.5, expected 1 to 9"):
        by_function(source, rank=1.5)


@pytest.fixture(scope="module")
def indefinite():
    """The total block, which has negative eigenvalues, by autodiff."""

    def loss(weight):
        logits = torch.tanh(X @ weight).cumsum(1).sin() @ MODEL.second.detach()
        return nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), ignore_index=-100)

    found = torch.func.hessian(loss)(MODEL.first.detach()).reshape(A * P, A * P).numpy()
    assert np.linalg.eigvalsh(found)[0] < -1e-3
    return found


@pytest.mark.parametrize("form", ["formed", "lanczos"])
@pytest.mark.parametrize("name", ["diagonal", "neurons", "kronecker:1", "kronecker:3", "kronecker:9"])
def test_approximations_of_the_total(name, form, indefinite, monkeypatch):
    if form == "lanczos":
        monkeypatch.setattr(sys.modules["curvoscope.approximations.kronecker"], "_DENSE", 0)
    kind, _, rank = name.partition(":")
    if kind == "diagonal":
        expected = np.diag(np.diag(indefinite))
    elif kind == "neurons":
        expected = indefinite * np.kron(np.ones((A, A)), np.eye(P))
    else:
        sorted_out = indefinite.reshape(A, P, A, P).transpose(0, 2, 1, 3).reshape(A * A, P * P)
        left, values, right = np.linalg.svd(sorted_out)
        best = (left[:, : int(rank)] * values[: int(rank)]) @ right[: int(rank)]
        expected = best.reshape(A, A, P, P).transpose(0, 2, 1, 3).reshape(A * P, A * P)
    make = {"diagonal": cv.approximations.diagonal, "neurons": cv.approximations.neurons, "kronecker": by_function}[
        kind
    ]
    found = make(H.total, "first", **({"rank": int(rank)} if rank else {}))
    assert torch.equal(found.dense(), approximation(H.total, name, "first").dense())
    size, v = np.linalg.norm(expected), normal(1)(A * P, 2)
    assert np.abs(found.dense().numpy() - expected).max() < 1e-9 * size
    assert np.allclose(found @ v, expected @ v.numpy(), atol=1e-9)
    assert float(found.trace()) == pytest.approx(np.trace(expected), abs=1e-9 * size)
    assert float(found.frobenius_norm()) == pytest.approx(size, rel=1e-9)
    assert np.allclose(found.diagonal(), np.diag(expected), atol=1e-9 * size)
    eigenvalues = np.linalg.eigvalsh(expected)
    assert np.allclose(found.eigenvalues(), eigenvalues, atol=1e-9 * size)
    damping = 0.1 - eigenvalues[0]
    solution = np.linalg.solve(expected + damping * np.eye(A * P), v.numpy())
    assert np.allclose(found.solve(v, damping).value, solution, atol=1e-8)
    half = -eigenvalues[0] / 2  # indefinite: not solved in its own structure, but otherwise
    with pytest.raises(RangeError, match=r"^damping: "):
        found.damped_solve(v, half)
    solved, solution = found.solve(v, half), np.linalg.solve(expected + half * np.eye(A * P), v.numpy())
    assert solved.converged
    assert np.allclose(solved.value, solution, atol=2 * float(torch.as_tensor(solved.error_bound).max()) + 1e-8)
    source = source_of(H, "first")
    inner = sum(float(found.quadratic(part).sum()) for part in source.parts)
    assert inner == pytest.approx((expected * TRUTH).sum(), rel=1e-9, abs=1e-12)
    (row,) = cv.analysis.audit(H, ["first"], [found], part="total")
    error = np.linalg.norm(indefinite - expected) / np.linalg.norm(indefinite)
    assert row.error == pytest.approx(error, abs=1e-9) and row.approximation == name


@pytest.mark.parametrize("name", ["kfac", "shampoo", "empirical", "heads"])
def test_other_approximations_have_no_meaning_for_the_total(name):
    with pytest.raises(cv.CurvoscopeError, match=r"^part: 'first' is not positive semidefinite; give H\.outer"):
        approximation(H.total, name, "first")
