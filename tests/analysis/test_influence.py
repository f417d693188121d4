"""Influence against retraining, dense formulas and finite differences."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.errors import DtypeError, LossError, RangeError, ShapeError
from reference import normal

DECAY = 0.1


def trained(X, y, weights):
    """A convex head that minimises sum_i weights_i l_i + decay/2 |w|²: Newton's method, written out."""
    inputs, onehot = torch.cat([X, torch.ones(len(X), 1).double()], 1), nn.functional.one_hot(y, 3).double()
    W = torch.zeros(3, inputs.shape[1]).double()
    for _ in range(8):
        p = (inputs @ W.T).softmax(1)
        gradient = ((p - onehot) * weights[:, None]).T @ inputs + DECAY * W
        S = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        H = torch.einsum("n,nab,ni,nj->aibj", weights, S, inputs, inputs).reshape(W.numel(), -1)
        W = W - torch.linalg.solve(H + DECAY * torch.eye(W.numel()).double(), gradient.flatten()).view_as(W)
    head = nn.Linear(X.shape[1], 3).double()
    with torch.no_grad():
        head.weight.copy_(W[:, :-1])
        head.bias.copy_(W[:, -1])
    return head


@pytest.fixture(scope="module")
def case():
    r = normal(0)
    X, y = r(80, 4), torch.arange(80) % 3
    X[:, 0] += y
    test = r(6, 4), torch.arange(6) % 3
    return X, y, test, trained(X, y, torch.full((80,), 1 / 80).double())


def losses(head, test):
    with torch.no_grad():
        return nn.functional.cross_entropy(head(test[0]), test[1], reduction="none")


def test_leaving_one_out_of_a_convex_head(case):
    """The correlation with retraining is above 0.99."""
    X, y, test, head = case
    found = cv.analysis.influence(head, nn.CrossEntropyLoss(), [(X[:50], y[:50]), (X[50:], y[50:])], [test], DECAY)
    changes = []
    for i in range(80):
        weights = torch.full((80,), 1 / 80).double()
        weights[i] = 0
        changes.append(losses(trained(X, y, weights), test) - losses(head, test))
    measured = torch.stack(changes, 1)
    assert found.converged and found.correlation(measured) > 0.99


def test_against_the_dense_formula(case):
    X, y, test, head = case
    H = cv.hessian(head, nn.CrossEntropyLoss(), [(X, y)])

    def gradients(inputs, targets):
        rows = []
        for x, label in zip(inputs, targets, strict=True):
            value = nn.functional.cross_entropy(head(x[None]), label[None])
            found = dict(zip(("weight", "bias"), torch.autograd.grad(value, list(head.parameters())), strict=True))
            rows.append(H._blocks.gather(found))
        return torch.stack(rows)

    train, tested = gradients(X, y), gradients(*test)
    for part in ("outer", "total"):
        system = getattr(H, part).dense() + 0.3 * torch.eye(15).double()
        truth = tested @ torch.linalg.solve(system, train.T) / 80
        found = cv.analysis.influence(head, nn.CrossEntropyLoss(), [(X, y)], [test], 0.3, part=part, tolerance=1e-10)
        assert torch.allclose(found.scores, truth, rtol=1e-8, atol=1e-12)
        assert ((found.scores - truth).abs() <= found.bounds).all()
    plain = cv.analysis.influence(head, nn.CrossEntropyLoss(), [(X, y)], [test], 0.3, "identity")
    assert torch.allclose(plain.scores, tested @ train.T / 0.3 / 80)
    kfac = cv.analysis.influence(head, nn.CrossEntropyLoss(), [(X, y)], [test], 0.3, "kfac")
    assert 0.5 < kfac.correlation(found) < 1 and kfac.bounds.max() == 0


def test_rows_without_loss_terms_keep_their_place(case):
    """In a batch with others, and as a batch of their own, among the training rows and among the test rows."""
    X, y, (inputs, labels), head = case
    train, none = [(X[:30], y[:30]), (X[30:], y[30:])], torch.full((2,), -100)
    wide = [(X[:30], torch.cat([y[:10], none, y[12:30]])), (X[:2], none), train[1]]
    narrow = [(torch.cat([X[:10], X[12:30]]), torch.cat([y[:10], y[12:30]])), train[1]]
    test = [(inputs[:1], labels[:1]), (inputs[:1], none[:1]), (inputs[1:], labels[1:])]
    for method in ("exact", "identity"):
        found, others = (
            cv.analysis.influence(head, nn.CrossEntropyLoss(), rows, tests, DECAY, method=method)
            for rows, tests in ((wide, test), (narrow, [(inputs, labels)]))
        )
        assert found.scores.shape == found.bounds.shape == (7, 82) and not bool(found.scores[1].any())
        assert not bool(found.scores[:, [10, 11, 30, 31]].any())
        kept = [i for i in range(82) if i not in (10, 11, 30, 31)]
        assert torch.allclose(found.scores[[0, 2, 3, 4, 5, 6]][:, kept], others.scores, rtol=1e-9, atol=1e-12)


def test_subsets(case):
    """Predictions rank subsets of the training data as retraining does."""
    X, y, test, head = case
    found = cv.analysis.influence(head, nn.CrossEntropyLoss(), [(X, y)], [test], DECAY)
    subsets = torch.rand(12, 80, generator=torch.Generator().manual_seed(0)) < 0.8
    measured = torch.stack([losses(trained(X, y, subset.double() / 80), test) for subset in subsets])
    score = found.datamodeling_score(subsets, measured)
    assert score > 0.9 and 0 <= score.stderr < 0.1
    alone = cv.analysis.influence(head, nn.CrossEntropyLoss(), [(X, y)], [(test[0][:1], test[1][:1])], DECAY)
    one = alone.datamodeling_score(subsets, measured[:, :1])
    assert one > 0.9 and one.stderr == float("inf")  # a single test row has no spread
    with pytest.raises(ShapeError, match="subsets"):
        found.datamodeling_score(subsets[:, :3], measured)
    constant = measured.clone()
    constant[:, 2] = 1.0
    with pytest.raises(RangeError, match="losses: are all equal for test row 2"):
        found.datamodeling_score(subsets, constant)
    with pytest.raises(RangeError, match="subsets: all have the same sum of scores for test row 0"):
        found.datamodeling_score(subsets[:1].expand(12, -1), measured)


def test_bad_input(case):
    X, y, test, head = case
    with pytest.raises(RangeError, match="damping"):
        cv.analysis.influence(head, nn.CrossEntropyLoss(), [(X, y)], [test], 0.0)
    with pytest.raises(RangeError, match="approximations"):
        cv.analysis.influence(head, nn.CrossEntropyLoss(), [(X, y)], [test], 0.1, "magic")
    with pytest.raises(LossError, match="as the mean over single rows"):
        cv.analysis.influence(head, nn.CrossEntropyLoss(reduction="sum"), [(X, y)], [test], 0.1)
    with pytest.raises(LossError, match="loss_fn: is a sum; here it must be a mean"):
        cv.analysis.influence(
            head, nn.CrossEntropyLoss(reduction="sum"), [(X[:50], y[:50]), (X[50:], y[50:])], [test], 0.1
        )
    with pytest.raises(LossError, match="loss_fn: compares rows"):
        cv.analysis.influence(head, cv.losses.Contrastive(nn.functional.cross_entropy), [(X, y)], [test], 0.1)


class TestDamping:
    def test_bad_input(self, case):
        H = cv.hessian(case[3], nn.CrossEntropyLoss(), [case[2]])
        with pytest.raises(DtypeError, match=r"approximation: expected an operator, .*, got str"):
            cv.analysis.damping(H, approximation="kfac")
        with pytest.raises(DtypeError, match=r"H: expected an operator, .*, got Tensor"):
            cv.analysis.damping(torch.eye(3).double())

    def test_a_negative_end(self):
        values = torch.cat([torch.linspace(-0.2, 0.01, 30), torch.tensor([5.0])]).double()
        matrix = values.diag()
        operator = cv.operators.compositions.Product((lambda v: matrix @ v,) * 2, (31, 1), (31, 1), matrix, True)
        found = cv.analysis.damping(operator)
        assert found.reason == "negative end" and found.value == pytest.approx(0.22)
        assert (torch.linalg.eigvalsh(matrix) + found.value > 0).all() and "damping 0.22" in str(found)

    def test_an_approximation(self, case):
        X, y, _, head = case
        H = cv.hessian(head, nn.CrossEntropyLoss(), [(X, y)])
        block, A = H.outer["weight"], cv.approximations.kfac(H, "weight")
        found = cv.analysis.damping(block, A)
        truth = float(torch.linalg.eigvalsh(block.dense() - A.dense()).abs().max())
        assert found.numbers["approximation"] == pytest.approx(truth, rel=1e-6)
        assert found.value == max(found.numbers.values())
        values = torch.linalg.eigvalsh(block.dense())
        assert found.effective_dimension == pytest.approx(float((values / (values + found.value)).sum()))
