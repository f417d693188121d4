"""Symmetric operators of every kind with their dense matrices, systems of a given condition, and exact solutions."""

import mpmath
import torch
from torch import nn

import curvoscope as cv
from curvoscope.operators import KroneckerSum, Single, Term
from curvoscope.operators.compositions import Product
from curvoscope.operators.cores import DenseCore
from operator_cases import term_truth
from reference import normal

ROWS, COLUMNS = 5, 3


def product(matrix):
    """An operator that is known by its products."""
    times = lambda v: matrix @ v  # noqa: E731
    return Product((times, times), (len(matrix), 1), (len(matrix), 1), matrix, symmetric=True)


class Positive(Product):
    """An operator that knows that it is positive semidefinite."""

    def lower_bound(self):
        return 0.0


def positive(matrix):
    times = lambda v: matrix @ v  # noqa: E731
    return Positive((times, times), (len(matrix), 1), (len(matrix), 1), matrix, symmetric=True)


def _tokens(tokens, axis, definite):
    r = normal(tokens + axis)
    shape = (ROWS, COLUMNS)
    left, cores = r(tokens, shape[axis]), r(tokens, shape[1 - axis], shape[1 - axis])
    cores = cores @ cores.mT if definite else cores + cores.mT
    term = Term(left, left, DenseCore(cores, symmetric=True), (axis, axis))
    return KroneckerSum(shape, shape, [term], left), term_truth(left, left, cores, (axis, axis))


def _kronecker(axis):
    r = normal(7)
    shape = (ROWS, COLUMNS)
    first, second = (m @ m.T for m in (r(shape[axis], shape[axis]), r(shape[1 - axis], shape[1 - axis])))
    truth = torch.kron(first, second) if axis == 0 else torch.kron(second, first)
    return KroneckerSum(shape, shape, [Single(first, second, (axis, axis), symmetric=True)], first), truth


def _attention(part):
    r = normal(3)
    layer = cv.exact.SelfAttention(*(r(3, 3) / 2 for _ in range(3)), heads=1)
    matrix = getattr(layer.hessian(r(2, 4, 3), cv.losses.MSE(r(2, 4, 3))), part)
    return matrix, matrix.dense()


def _model(part):
    r = normal(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(r(*parameter.shape))
    labels = torch.tensor([0, 1, 1, 0, 1])
    matrix = getattr(cv.hessian(model, nn.CrossEntropyLoss(), [(r(5, 3), labels)]), part)
    return matrix, matrix.dense()


def _combined():
    (first, one), (second, two) = _tokens(4, 0, True), _kronecker(0)
    return 2.0 * first + second, 2 * one + two


def _entry(make, name):
    matrix, _ = make
    return matrix[name], matrix[name].dense()


KINDS = {
    "few tokens": lambda: _tokens(2, 0, True),
    "few tokens on the second axis": lambda: _tokens(2, 1, False),
    "many tokens": lambda: _tokens(9, 0, True),
    "indefinite tokens": lambda: _tokens(9, 1, False),
    "Kronecker product": lambda: _kronecker(0),
    "Kronecker product on the second axis": lambda: _kronecker(1),
    "sum": _combined,
    "layer, total": lambda: _attention("total"),
    "layer, outer": lambda: _attention("outer"),
    "layer, block": lambda: _entry(_attention("functional"), "Q"),
    "model, total": lambda: _model("total"),
    "model, outer": lambda: _model("outer"),
    "model, block": lambda: _entry(_model("total"), "0.weight"),
}


def conditioned(seed, condition, signs=False, n=12):
    """A symmetric matrix of the given condition, indefinite with `signs`, and a right-hand side."""
    r = normal(seed)
    values = torch.logspace(0, -torch.tensor(float(condition)).log10().item(), n, dtype=torch.float64)
    if signs:
        values = values * (1 - 2 * (torch.arange(n) % 2))
    Q = torch.linalg.qr(r(n, n)).Q
    matrix = (Q * values) @ Q.T
    return (matrix + matrix.T) / 2, r(n)


def exact_solution(matrix, damping, b):
    """(B + damping)^-1 b with 60 digits."""
    with mpmath.workdps(60):
        system = mpmath.matrix(matrix.tolist()) + mpmath.mpf(damping) * mpmath.eye(len(matrix))
        return mpmath.lu_solve(system, mpmath.matrix(b.tolist()))


def distance(x, exact):
    """|x - exact|, with 60 digits."""
    with mpmath.workdps(60):
        return float(mpmath.norm(mpmath.matrix(x.tolist()) - exact))
