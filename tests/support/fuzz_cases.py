"""What the fuzz tests share: dtypes, and how far from float64 autodiff an answer in each of them may be."""

import torch
from hypothesis import strategies as st

from loss_cases import LOSSES

DTYPES = (torch.float64, torch.float64, torch.float32)  # twice as often in the precision in which faults show
KINDS = [*LOSSES, "ignoring"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}
LEAST = 1e-3  # a saturated softmax leaves autodiff an error of rounding in a Hessian near zero

dtypes = st.sampled_from(DTYPES)
kinds = st.sampled_from(KINDS)


def assert_agrees(found, truth, size, what=""):
    """`found`, a tensor of any dtype or a float, is `truth` to the precision of its dtype, relative to `size`."""
    found = torch.as_tensor(found, dtype=torch.float64 if isinstance(found, float) else None)
    truth = torch.as_tensor(truth, dtype=torch.float64)
    assert found.shape == truth.shape, f"{what}: {tuple(found.shape)}, expected {tuple(truth.shape)}"
    error = float((found.double() - truth).abs().max())
    limit = TOLERANCE[found.dtype] * max(LEAST, float(size))
    assert error <= limit, f"{what}: off by {error:.3g}, allowed are {limit:.3g}"


def assert_answers(operator, truth, size, dtype, what=""):
    """All that can be asked of an operator, against the dense matrix `truth` (R, C) in float64."""

    def agrees(question, found, expected, factor=1.0):
        tensor = torch.as_tensor(found, dtype=torch.float64).to(dtype) if isinstance(found, float) else found
        assert_agrees(tensor, expected, factor * size, f"{what} {question}")

    rows, columns = truth.shape
    longest = max(rows, columns)
    v = torch.linspace(-1, 1, columns, dtype=torch.float64)
    w = torch.linspace(-1, 1, rows, dtype=torch.float64).cos()
    assert operator.shape == (rows, columns) and operator.dtype == dtype
    agrees("dense", operator.dense(), truth)
    agrees("product", operator @ v.to(dtype), truth @ v, longest)
    agrees("columns", operator @ torch.stack([v, v.sin()], 1).to(dtype), truth @ torch.stack([v, v.sin()], 1), longest)
    agrees("transpose", operator.T @ w.to(dtype), truth.T @ w, longest)
    agrees("to_scipy", torch.as_tensor(operator.to_scipy().matvec(v.to(dtype).numpy())), truth @ v, longest)
    agrees("frobenius_norm", float(operator.frobenius_norm()), truth.norm(), longest)
    agrees("spectral_norm", float(operator.spectral_norm()), torch.linalg.matrix_norm(truth, 2), longest)
    if rows != columns:
        return
    agrees("trace", float(operator.trace()), truth.trace(), longest)
    agrees("diagonal", operator.diagonal(), truth.diagonal())
    if operator.symmetric:
        dense = operator.dense()
        assert torch.equal(dense, dense.T), f"{what}: symmetric but for rounding"
        agrees("eigenvalues", operator.eigenvalues(), torch.linalg.eigvalsh((truth + truth.T) / 2), longest)
