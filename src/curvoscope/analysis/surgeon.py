"""Repairing a weight after some of its entries are changed: the update of Optimal Brain Surgeon, with any curvature."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError, ShapeError
from curvoscope.operators import LinearOperator
from curvoscope.solve import Solver

_DAMPING = 0.01  # of the mean diagonal entry, as GPTQ has it
_TRACE_PRODUCTS = 16
Nearest = Callable[[int, Tensor], Tensor]  # the number of an input and its weights (p,) -> the rounded weights


class CurvatureByBlock(Protocol):
    """Blocks of curvature by name: `H`, `H.outer`, or {name: operator}."""

    def __getitem__(self, name: str, /) -> LinearOperator: ...


@dataclass(frozen=True, eq=False)
class Repair:
    """A change of a block whose free entries make up for the fixed ones.

    Args:
        delta: the whole change, (R,): fixed entries as given, free ones updated.
        before: ½ δ·Hδ of the change as given.
        after: ½ δ·Hδ of the repaired one, by the same curvature.
        damping: λ that was added to the diagonal.
        iterations: of conjugate gradients.
        residual: relative, of the equations for the free entries.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.tensor([[1.0, 1.0], [1.0, 0.5]]).double()
        >>> H = cv.hessian(torch.nn.Linear(2, 1, bias=False).double(), torch.nn.MSELoss(), [(X, X[:, :1])])
        >>> repair = cv.analysis.surgeon(H, "weight", torch.tensor([1.0, 0.0]).double(), damping=0.0)
        >>> round(repair.before, 6), round(repair.after, 6), [round(x, 6) for x in repair.delta.tolist()]
        (1.0, 0.1, [1.0, -1.2])
    """

    delta: Tensor
    before: float
    after: float
    damping: float
    iterations: int
    residual: float


def surgeon(
    H: CurvatureByBlock,
    block: str,
    delta: Tensor,
    fixed: Tensor | None = None,
    *,
    damping: float | None = None,
    tolerance: float = 1e-6,
    iterations: int = 200,
) -> Repair:
    """Update the free entries of a weight so that a change of the others costs least: min ½ δ·(H + λ)δ over them.

    With S the fixed entries and R the free ones, δ_R = -(H_RR + λ)^-1 H_RS δ_S: the update of Optimal Brain Surgeon,
    for any number of entries at once. It needs products with the block alone, so the curvature may be exact or an
    approximation.

    Args:
        H: curvature by block: `H.outer` (exact), or {name: operator} for an approximation. It must be positive
            semi-definite, or damped until it is.
        block: the name of the block.
        delta: the change as given, (R,), row-major as all blocks are.
        fixed: which entries must change as given, (R,) bool; None: the entries that are not zero.
        damping: λ; None: one hundredth of the mean diagonal entry, as GPTQ has it.
        tolerance: relative residual at which to stop.
        iterations: of conjugate gradients, at most.

    Returns:
        The repaired change, with its cost before and after.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.eye(3).double() + 0.5
        >>> H = cv.hessian(torch.nn.Linear(3, 1, bias=False).double(), torch.nn.MSELoss(), [(X, X[:, :1])])
        >>> pruned = torch.tensor([0.25, 0.0, 0.0]).double()
        >>> repair = cv.analysis.surgeon(H.outer, "weight", pruned)
        >>> repair.delta[0].item(), repair.after < repair.before
        (0.25, True)
    """
    operator = H[block]
    checks.floating("delta", delta)
    if tuple(delta.shape) != (operator.shape[0],):
        raise ShapeError("delta", f"got {tuple(delta.shape)}, expected ({operator.shape[0]},) for block {block!r}")
    held = delta != 0 if fixed is None else fixed
    if held.shape != delta.shape or held.dtype != torch.bool:
        raise ShapeError("fixed", f"got {tuple(held.shape)} of {held.dtype}, expected ({len(delta)},) of torch.bool")
    if damping is None:
        trace = operator.trace(matvecs=_TRACE_PRODUCTS) if operator.shape[0] > _TRACE_PRODUCTS else operator.trace()
        damping = _DAMPING * abs(float(trace)) / len(delta)
    if not damping >= 0:
        raise RangeError("damping", f"got {damping}, expected a number that is not negative")
    checks.at_least(1, iterations=iterations)
    start = delta.to(operator.device, operator.dtype)
    free = _Free(operator, (~held).to(operator.device).nonzero()[:, 0])
    pushed = operator @ start
    target = -(pushed + damping * start)[free.places]
    update = torch.zeros_like(start)
    solver = Solver(free, damping, tolerance, "cg", matvecs=max(2, iterations))
    try:
        solution = solver(target) if len(target) else None
    except RangeError as error:
        if error.argument != "method":
            raise
        raise RangeError(
            "H", "has negative curvature among the free entries; give H.outer, or a larger damping"
        ) from error
    if solution is not None:
        update[free.places] = solution.value
    repaired = start + update
    return Repair(
        repaired,
        _half(start, pushed),
        _half(repaired, operator @ repaired),
        damping,
        solution.iterations if solution is not None else 0,
        solution.relative_residual if solution is not None else 0.0,
    )


class _Free:
    """The rows and columns of a symmetric operator at some places, (n, n)."""

    symmetric = True

    def __init__(self, operator: LinearOperator, places: Tensor) -> None:
        self._operator, self.places = operator, places
        self.shape, self.dtype, self.device = (len(places), len(places)), operator.dtype, operator.device

    def __matmul__(self, other: Tensor) -> Tensor:
        whole = other.new_zeros(self._operator.shape[0], *other.shape[1:])
        whole[self.places] = other
        return (self._operator @ whole)[self.places]

    def lower_bound(self) -> float:
        """Eigenvalues of a part lie between those of the whole."""
        return self._operator.lower_bound()


def _half(vector: Tensor, product: Tensor) -> float:
    return float(vector.double() @ product.double()) / 2


def round_and_repair(
    H: CurvatureByBlock,
    block: str,
    W: Tensor,
    nearest: Nearest,
    step: int = 1,
    *,
    damping: float | None = None,
    tolerance: float = 1e-6,
    iterations: int = 200,
) -> Tensor:
    """Round a weight input by input, and let the inputs that are not rounded yet make up for it.

    After every `step` inputs `surgeon` updates the rest. With the curvature X^T X (x) I and step 1 this is GPTQ.

    Args:
        H, block, damping, tolerance, iterations: as in `surgeon`.
        W: the weight, (a, p) as in X @ W, in the shape of the block. Blocks with the names of roles have it; one with
            the name of a parameter, such as "weight" of an `nn.Linear`, has outputs as rows.
        nearest: the rounded weights of one input, from its number and its weights (p,).
        step: inputs between two updates.

    Returns:
        The rounded weight, (a, p).

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.tensor([[1.0, 0.9], [0.8, 1.0]]).double()
        >>> W = torch.tensor([[0.4], [0.4]]).double()
        >>> H = cv.exact.LinearMLP([W]).hessian(X, cv.losses.MSE(X[:, :1]))
        >>> cv.analysis.round_and_repair(H.outer, "W1", W, lambda i, w: w.round()).flatten().tolist()
        [0.0, 1.0]
    """
    checks.at_least(1, step=step)
    shape = tuple(H[block].row_shape)
    if W.shape != shape:
        raise ShapeError("W", f"got {tuple(W.shape)}, expected {shape}, the shape of {block!r}")
    rounded, current = W.clone(), W
    for start in range(0, len(W), step):
        stop = min(start + step, len(W))
        for i in range(start, stop):
            rounded[i] = nearest(i, current[i])
        if stop < len(W):
            delta, fixed = torch.zeros_like(W), torch.zeros(W.shape, dtype=torch.bool, device=W.device)
            delta[:stop], fixed[:stop] = rounded[:stop] - W[:stop], True
            found = surgeon(
                H, block, delta.flatten(), fixed.flatten(), damping=damping, tolerance=tolerance, iterations=iterations
            )
            current = W + found.delta.view(W.shape).to(W)
    return rounded


def gptq(W: Tensor, gram: Tensor, nearest: Nearest, damping: float = _DAMPING) -> Tensor:
    """GPTQ: round a weight input by input with the curvature X^T X, all output channels at once.

    With U the upper Cholesky factor of (X^T X + λ)^-1, the rounding error e of input i moves the inputs behind it by
    -U[i, i+1:]^T e / U[i, i] (Frantar et al. 2023). λ is `damping` times the mean diagonal entry.

    Args:
        W: the weight, (a, p) as in X @ W.
        gram: X^T X, (a, a).
        nearest: the rounded weights of one input, from its number and its weights (p,).
        damping: relative.

    Returns:
        The rounded weight, (a, p).

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.tensor([[1.0, 0.9], [0.8, 1.0]]).double()
        >>> W = torch.tensor([[0.4], [0.4]]).double()
        >>> cv.analysis.gptq(W, X.T @ X, lambda i, w: w.round()).flatten().tolist()
        [0.0, 1.0]
    """
    checks.floating("W", W)
    checks.floating("gram", gram)
    if W.ndim != 2:
        raise ShapeError("W", f"got {tuple(W.shape)}, expected (a, p)")
    if not damping >= 0:
        raise RangeError("damping", f"got {damping}, expected a number that is not negative")
    if gram.shape != (len(W), len(W)):
        raise ShapeError("gram", f"got {tuple(gram.shape)} for W {tuple(W.shape)}, expected ({len(W)}, {len(W)})")
    added = damping * gram.diagonal().mean() * torch.eye(len(W), dtype=gram.dtype, device=gram.device)
    lower, singular = torch.linalg.cholesky_ex(gram + added)
    if singular:
        raise RangeError("gram", "is singular, or has negative eigenvalues; give a larger damping")
    U = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).to(W)
    current, rounded = W.clone(), torch.empty_like(W)
    for i in range(len(W)):
        rounded[i] = nearest(i, current[i])
        error = (current[i] - rounded[i]) / U[i, i]
        current[i + 1 :] -= U[i, i + 1 :, None] * error
    return rounded
