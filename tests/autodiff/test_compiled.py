"""Products that torch compiles, against eager ones and dense nested autodiff; and what is said if it cannot."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from autodiff_cases import MLP, points, truth
from curvoscope.curvature import MeanSquaredError, blocks_of, hessian
from curvoscope.errors import CompileWarning
from reference import relative


class _Undecided(torch.autograd.Function):
    """x², whose second derivative looks at the numbers of the vector: Python that no record can hold."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gy):
        (x,) = ctx.saved_tensors
        return _UndecidedBackward.apply(gy, x)


class _UndecidedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gy, x):
        ctx.save_for_backward(gy, x)
        return 2 * x * gy

    @staticmethod
    def backward(ctx, direction):
        gy, x = ctx.saved_tensors
        size = max(1.0, float(direction.norm()))
        return 2 * x * direction / size * size, 2 * gy * direction / size * size


class Undecided(nn.Module):
    def forward(self, x):
        return _Undecided.apply(x)


def _eager_and_not(model, loss, batches, **options):
    return [hessian(model, loss, batches, method="autodiff", compile=on, **options) for on in (False, True)]


def test_a_model_that_cannot_be_recorded_keeps_its_products():
    eager, H = _eager_and_not(MLP(Undecided), MeanSquaredError(), [points()])
    v = torch.linspace(-1, 1, H.shape[0], dtype=torch.float64)
    assert "compiled with the first product" in H.plan["up.weight", "total"].reason
    with pytest.warns(CompileWarning, match=r"compile: got True, but torch cannot compile a product \(.*\)"):
        found = H @ v
    assert torch.equal(found, eager @ v)
    assert torch.equal(H @ (2 * v), eager @ (2 * v))  # from here on without a word
    assert "not compiled: torch cannot" in H.plan["up.weight", "total"].reason
    assert H.method_of("up.weight") == "autodiff"


def test_graphs_that_are_not_kept_are_not_compiled():
    eager, H = _eager_and_not(MLP(), MeanSquaredError(), [points()], memory_limit=1)
    v = torch.ones(H.shape[0], dtype=torch.float64)
    with pytest.warns(CompileWarning, match="do not fit into memory_limit"):
        assert torch.equal(H @ v, eager @ v)


_SCRIPT = """
import warnings, torch
from curvoscope.curvature import MeanSquaredError, hessian
x, y = torch.ones(3, 2), torch.zeros(3, 1)
eager, H = (hessian(torch.nn.Linear(2, 1), MeanSquaredError(), [(x, y)], compile=on) for on in (False, True))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert torch.allclose(H @ torch.ones(3), eager @ torch.ones(3))
print([str(one.message) for one in said if one.category.__name__ == "CompileWarning"])
"""


@pytest.mark.slow
def test_without_a_compiler(tmp_path):
    """In a process of its own: torch remembers which compiler there was."""
    missing = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _SCRIPT]
    said = subprocess.run(command, env=os.environ | missing, check=True, capture_output=True, text=True).stdout
    assert "torch cannot compile a product" in said and "no-such-compiler" in said


def test_a_wrong_program_is_not_used(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda record, **_: lambda *given: [1.001 * one for one in record(*given)])
    eager, H = _eager_and_not(MLP(), MeanSquaredError(), [points()])
    v = torch.ones(H.shape[0], dtype=torch.float64)
    with pytest.warns(CompileWarning, match="differs from the eager one by 1.0e-03 of its length"):
        H @ v
    assert torch.equal(H @ v, eager @ v)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_products_are_those_of_autodiff():
    """Two batches of one shape share a program; a block, and several vectors, do without."""
    model, (inputs, targets) = MLP(), points()
    _, H = _eager_and_not(model, MeanSquaredError(), [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])])
    dense = truth(model, inputs, lambda F: (F - targets).square().mean(), blocks_of(model))
    generator = torch.Generator().manual_seed(0)
    for part in ("total", "outer"):
        matrix, expected = getattr(H, part), getattr(dense, part)
        for _ in range(3):  # the first is eager
            v = torch.randn(len(expected), dtype=torch.float64, generator=generator)
            assert relative(matrix @ v, expected @ v) < 1e-12
    assert "products compiled (total, outer, " in H.plan["up.weight", "total"].reason
    several = torch.randn(len(dense.total), 3, dtype=torch.float64, generator=generator)
    assert relative(H @ several, dense.total @ several) < 1e-12
    assert relative(H["up.weight"].dense(), dense.total[:12, :12]) < 1e-12
