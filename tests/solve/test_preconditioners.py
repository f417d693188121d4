"""Preconditioners: the choice among them, and those of random gradients, against dense matrices."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.approximations import kfac, stand_ins
from curvoscope.approximations.enumeration import sampled
from curvoscope.approximations.gradients import GradientFactors, GradientSource
from curvoscope.errors import ModelError, RangeError
from curvoscope.solve import Solver
from curvoscope.solve.choice import PreconditionerChoice
from curvoscope.solve.preconditioning import Candidate, Diagonal
from reference import normal
from solve_cases import conditioned, positive


def scaled(seed=7, n=80):
    """A system whose entries differ in size, which its diagonal cures, and a right-hand side."""
    r = normal(seed)
    scales = torch.logspace(0, 4, n, dtype=torch.float64)
    matrix = torch.eye(n).double() + 0.1 * r(n, n) / n**0.5
    return scales[:, None].sqrt() * (matrix @ matrix.T) * scales.sqrt(), r(n)


def network(rows=24):
    """A classifier with two micro-batches of different weight."""
    r = normal(2)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(r(*parameter.shape) / 2)
    X, y = r(rows, 5) * torch.tensor([4.0, 2.0, 1.0, 0.5, 0.25]).double(), torch.arange(rows) % 3
    return cv.hessian(model, nn.CrossEntropyLoss(), [(X[:8], y[:8]), (X[8:], y[8:])])


class TestChoice:
    def test_prediction(self):
        """Residuals that fall by a constant factor predict the steps exactly."""
        choice = PreconditionerChoice((Candidate("diagonal", lambda: Diagonal(torch.ones(2))),), race=True)
        names = choice.entrants()
        assert next(names) == "none"
        choice.observe("none", 8, 1e6, 1e6 * 0.9**8)
        assert next(names) == "diagonal"
        choice.observe("diagonal", 8, 1e6, 1e6 * 0.5**8)
        assert choice.decide() == "diagonal"
        assert choice.reason == "predicted products: none 131; diagonal 20" and choice.patience == 19
        choice.plain_was_enough(9)
        assert choice.used == "none" and choice.reason.endswith("diagonal 20; 9 plain steps were enough")

    @pytest.mark.parametrize("needed", [12, 40])
    def test_a_plain_run_that_becomes_fast_is_kept(self, needed):
        """A matrix with as many eigenvalues as plain steps are needed, and a stand-in that flatters itself at first:
        it is exact on most of b, and magnifies the rest."""
        values = torch.logspace(0, 4, needed, dtype=torch.float64)
        b = torch.ones(needed, dtype=torch.float64)
        b[:3] = 1e-4
        stand_in = torch.cat([values[:3] * 1e6, values[3:]])
        candidates = [Candidate("flattering", lambda: Diagonal(stand_in))]
        found = Solver(positive(values.diag()), 1e-3, 1e-8, "cg", candidates, race=True)(b)
        plain = Solver(positive(values.diag()), 1e-3, 1e-8, "cg")(b)
        assert found.converged and found.matvecs <= max(1.5 * plain.matvecs, plain.matvecs + 24)

    def test_steps_that_gain_nothing_predict_no_end(self):
        choice = PreconditionerChoice((Candidate("slow", lambda: Diagonal(torch.ones(2)), 1e9),), race=True)
        names = choice.entrants()
        next(names)
        choice.observe("none", 8, 1e3, 2e3)
        assert next(names) == "slow" and choice.used == "none"

    def test_the_cost_of_making_counts(self):
        made = []
        candidates = tuple(Candidate(name, lambda name=name: made.append(name), cost) for name, cost in (("dear", 60),))
        choice = PreconditionerChoice(candidates, race=True)
        for name in choice.entrants():
            choice.observe(name, 8, 1e6, 1e6 * 0.9**8)
        assert choice.decide() == "none" and not made
        assert choice.reason == "predicted products: none 131; dear not tried: it costs 60 to make"

    def test_auto_takes_the_diagonal_of_a_badly_scaled_system(self):
        matrix, b = scaled()
        plain = positive(matrix).solve(b, 0.1, 1e-9, method="cg", preconditioner=None)
        found = positive(matrix).solve(b, 0.1, 1e-9, method="cg")  # more than the first eight steps give
        truth = torch.linalg.solve(matrix + 0.1 * torch.eye(80).double(), b)
        assert found.preconditioner == "diagonal" and "diagonal" in found.reason and "by diagonal" in str(found)
        assert found.converged and (found.value - truth).norm() <= found.error_bound
        assert found.matvecs < plain.matvecs and (plain.preconditioner, plain.reason) == ("none", "")

    def test_auto_leaves_an_easy_system_alone(self):
        matrix, b = conditioned(1, 3.0, n=40)
        found = positive(matrix).solve(b, 1.0, 1e-3, method="cg")
        assert found.converged and found.preconditioner == "none" and found.reason == "its first 8 steps were enough"

    def test_one_that_cannot_be_made(self):
        matrix, b = scaled()

        def fail():
            raise ModelError("block", "has no inputs")

        candidates = Candidate("kfac", fail), Candidate("diagonal", lambda: Diagonal(matrix.diagonal()))
        found = Solver(positive(matrix), 0.1, 1e-8, "cg", candidates, race=True)(b)
        assert found.converged and found.preconditioner == "diagonal"
        assert "kfac not made: block: has no inputs" in found.reason

    def test_a_given_one_has_its_name(self):
        matrix, b = scaled()
        found = positive(matrix).solve(b, 0.1, method="cg", preconditioner=Diagonal(matrix.diagonal()))
        assert (found.preconditioner, found.reason) == ("given", "asked for")

    def test_any_operator_preconditions(self):
        matrix, b = conditioned(3, 1e3, n=40)
        found = positive(matrix).solve(b, 0.1, method="cg", preconditioner=positive(matrix))
        assert found.converged and found.iterations <= 3


class TestInterrupt:
    def test_while_preconditioners_are_compared(self):
        """The steps before are returned."""
        matrix, b = scaled()

        def interrupt():
            raise KeyboardInterrupt

        found = Solver(positive(matrix), 0.1, 1e-8, "cg", [Candidate("kfac", interrupt)], race=True)(b)
        system = matrix + 0.1 * torch.eye(80).double()
        error = found.value - torch.linalg.solve(system, b)
        assert found.interrupted and not found.converged and found.iterations == 8
        assert found.residual == pytest.approx(float((b - system @ found.value).norm()))
        assert error @ system @ error < b @ torch.linalg.solve(system, b)

    def test_in_the_certificate(self):
        matrix, b = conditioned(6, 20.0, signs=True, n=30)
        operator, done = positive(matrix), []

        def times(v):
            if done:
                raise KeyboardInterrupt
            return matrix @ v

        def unknown():
            done.append(True)
            return -float("inf")

        operator._products, operator.lower_bound = (times, times), unknown
        solver = Solver(operator, 0.0, 1e-8, "minres")
        solver._floor = -float("inf")
        found = solver(b)
        assert found.interrupted and found.converged and found.certificate == "none"
        assert (matrix @ found.value - b).norm() <= 1e-8 * b.norm()


class TestRandomGradients:
    def test_their_squares_are_the_block_on_average(self):
        """Each entry of H = E[gamma gamma^T] within six standard errors."""
        H = network()
        source = sampled(H._engine, H._blocks["0.weight"], 3000, seed=1)
        gradients = torch.cat([some.flatten(1) for some in source.gradients()])
        squares = gradients[:, :, None] * gradients[:, None]
        error = (squares.mean(0) - H.outer["0.weight"].dense()).abs()
        assert len(source) == 3000 and not source.exact
        assert (error <= 6 * squares.std(0) / 3000**0.5 + 1e-12).all()

    def test_a_hessian_gives_them(self):
        H = network()
        source = H.gradient_source("0.weight", samples=5, seed=1)
        other = sampled(H._engine, H._blocks["0.weight"], 5, seed=1)
        assert not source.exact and len(source) == 5
        assert torch.equal(torch.cat(list(source.gradients())), torch.cat(list(other.gradients())))
        assert H.gradient_source("0.weight").exact

    def test_they_replace_exact_ones_that_cost_too_much(self, monkeypatch):
        exact = network().outer["0.weight"].solve(normal(3)(30), 1e-3, 1e-8, method="cg", preconditioner="kfac")
        monkeypatch.setattr(stand_ins, "_MOST", 10)
        H = network()
        block, b = H.outer["0.weight"], normal(3)(30)
        truth = torch.linalg.solve(block.dense() + 1e-3 * torch.eye(30).double(), b)
        for kind in ("diagonal", "kfac", "ekfac"):
            found = block.solve(b, 1e-3, 1e-8, method="cg", preconditioner=kind)
            assert found.converged and (found.value - truth).norm() <= found.error_bound
            assert (found.preconditioner, found.reason) == (kind, "asked for (8 random gradients)")
        assert exact.reason == "asked for (all gradients)"
        scores = cv.analysis.influence(
            H._engine.model, nn.CrossEntropyLoss(), *[[(normal(4)(4, 5), torch.arange(4) % 3)]] * 2, 0.1, "ekfac"
        )
        assert scores.made_of == "8 random gradients"

    @pytest.mark.parametrize("kind", ["kfac", "kronecker:1", "diagonal"])
    def test_blocks_in_closed_form_have_them_too(self, kind):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).double()
        H = cv.hessian(model, nn.CrossEntropyLoss(), [(normal(8)(7, 3, 4), torch.arange(7) % 3)])
        name = next(name for name in H.names if name.endswith("attn.V"))
        block, b = H.outer[name], normal(9)(16)
        assert H.method_of(name, "outer") == "exact"
        truth = torch.linalg.solve(block.dense() + 0.01 * torch.eye(16).double(), b)
        found = block.solve(b, 0.01, 1e-9, method="cg", preconditioner=kind)
        assert found.converged and (found.value - truth).norm() <= found.error_bound
        assert found.preconditioner == kind
        assert torch.allclose(block.inverse(0.01, 1e-9, method="cg", preconditioner=kind) @ b, truth, rtol=1e-6)
        with pytest.raises(RangeError, match="got 'magic', expected a name such as diagonal"):
            block.solve(b, 0.01, method="cg", preconditioner="magic")

    def test_several_products_where_a_vector_has_one(self):
        """A bias is a single Kronecker product, whatever the number of terms of the weights."""
        outer = network().outer
        b, unit = normal(6)(outer.shape[0]), torch.eye(outer.shape[0]).double()
        found = outer.solve(b, 0.5, 1e-8, method="cg", preconditioner="kronecker:2")
        truth = torch.linalg.solve(outer.dense() + 0.5 * unit, b)
        assert found.converged and (found.value - truth).norm() <= found.error_bound
        assert found.preconditioner == "kronecker:2"


@pytest.mark.parametrize("flipped", [False, True])
def test_few_tokens(flipped):
    """Bases of the span of the tokens: the same matrix, all its eigenvalues, the same solutions."""
    r = normal(5)
    source = GradientSource("W", (GradientFactors(r(1, 2, 9), r(1, 2, 2, 12), flipped),), exact=False)
    for name in ("kfac", "ekfac"):
        found = cv.approximations.approximation(source, name)
        dense = found.dense()
        if name == "kfac":
            left, right, tokens = source.token_moments
            assert torch.allclose(dense, torch.kron(*source.ordered(left, right / tokens)), atol=1e-12)
            assert found.diagonalised.values.numel() == 8
        else:
            assert found.values.numel() == 8 and dense.trace() == pytest.approx(float(source.dense().trace()))
        values = torch.linalg.eigvalsh(dense)
        assert torch.allclose(found.eigenvalues().value, values, atol=1e-10 * float(values.max()))
        b = r(108, 2)
        solution = found.solve(b, 0.3)
        truth = torch.linalg.solve(dense + 0.3 * torch.eye(108).double(), b)
        assert solution.method == "direct" and torch.allclose(solution.value, truth, atol=1e-12)
        assert ((solution.value - truth).norm(dim=0) <= solution.error_bounds).all()
        assert solution.margin == pytest.approx(0.3)
    assert kfac(source).damped_solve(b, 0.3).shape == b.shape
