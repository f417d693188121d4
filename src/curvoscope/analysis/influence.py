"""Influence functions: what leaving out a training row does to the loss of a test row."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.analysis.surface import Surface
from curvoscope.autodiff.batches import Batch
from curvoscope.blocks import Blocks
from curvoscope.errors import LossError, RangeError, ShapeError
from curvoscope.estimate import Estimate
from curvoscope.estimate.progress import Ticker
from curvoscope.losses import LossFunction
from curvoscope.solve import Solution
from curvoscope.solve.preconditioning import StandIns

_Solve = Callable[[Tensor], tuple[Tensor, Solution | None]]  # columns -> (H + damping)^-1 columns, its certificate

_PARTS = ("outer", "total")
_SAME = {"losses": "are all equal", "subsets": "all have the same sum of scores"}
_AGREE = 10  # times sqrt(epsilon), between the loss and the mean of those of the rows


@dataclass(frozen=True, eq=False)
class Influence:
    """Scores of training rows on test rows.

        scores[j, i] = w_i g_j^T (H + damping)^-1 g_i

    is the change of the loss of test row j, to first order, if training row i is left out: g are gradients of single
    rows, H is the curvature of the mean training loss, and w_i the share of row i in it, 1/n if all rows have equally
    many terms. This assumes that the weights minimise training loss + damping/2 |w|². A positive score: the row helps.
    A row without loss terms, whose labels are all ignored, has the score 0.

    Args:
        scores: (test rows, training rows), in float64.
        bounds: what a solve with a finite tolerance can have changed in each score, from its certificate; infinite if
            it has none, 0 for methods that do not solve with H itself.
        method: "exact", "identity", or the name of an approximation.
        damping: that of the inverse.
        solutions: the solves with their certificates, one for each chunk of test rows; none for other methods.
        made_of: what an approximation is computed from: "all gradients", or a number of random ones in a large model.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model, X, y = torch.nn.Linear(3, 2).double(), torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
        >>> found = cv.analysis.influence(model, torch.nn.CrossEntropyLoss(), [(X, y)], [(X[:2], y[:2])], damping=0.1)
        >>> found.scores.shape, bool((found.bounds < 1e-9).all()), found.helpful(0)[:1].shape
        (torch.Size([2, 8]), True, torch.Size([1]))
    """

    scores: Tensor
    bounds: Tensor
    method: str
    damping: float
    solutions: tuple[Solution, ...] = ()
    made_of: str = ""

    @property
    def converged(self) -> bool:
        """Whether all solves reached their tolerance."""
        return all(found.converged for found in self.solutions)

    def helpful(self, test: int) -> Tensor:
        """Training rows by their score on a test row, the most helpful first.

        Args:
            test: index of the test row.

        Returns:
            Indices of all training rows, (training rows,).
        """
        return self.scores[test].argsort(descending=True)

    def correlation(self, other: "Influence | Tensor") -> float:
        """Pearson's correlation of all scores with those of another method, or with measured changes of the loss.

        Args:
            other: an `Influence`, or a tensor (test rows, training rows).

        Returns:
            The correlation, over all pairs of a test row and a training row.
        """
        theirs = other.scores if isinstance(other, Influence) else checks.floating("other", other).double()
        if theirs.shape != self.scores.shape:
            raise ShapeError("other", f"got {tuple(theirs.shape)}, expected {tuple(self.scores.shape)}")
        return float(torch.corrcoef(torch.stack([self.scores.flatten(), theirs.cpu().flatten()]))[0, 1])

    def datamodeling_score(self, subsets: Tensor, losses: Tensor) -> Estimate:
        """The linear datamodeling score: do sums of scores rank subsets of the training data as retraining does?

        Spearman's correlation over the subsets between the measured losses and the predicted ones, the sum of the
        scores of the rows that are left out; for each test row, and averaged (Park et al. 2023, arXiv 2303.14186).

        Args:
            subsets: (k, training rows), True for the rows that a model was trained on.
            losses: (k, test rows), the losses of the models trained on these subsets.

        Returns:
            The mean over the test rows, with its standard error, which is unknown (infinite) for a single one.
        """
        rows = self.scores.shape
        if subsets.ndim != 2 or subsets.shape[1] != rows[1] or len(subsets) < 3:
            raise ShapeError("subsets", f"got {tuple(subsets.shape)}, expected (k, {rows[1]}) with k at least 3")
        if losses.shape != (len(subsets), rows[0]):
            raise ShapeError("losses", f"got {tuple(losses.shape)}, expected ({len(subsets)}, {rows[0]})")
        checks.floating("losses", losses)
        predicted = (~subsets.bool()).double() @ self.scores.T
        for name, values in (("losses", losses), ("subsets", predicted)):
            if bool((equal := (values == values[0]).all(0)).any()):
                which = int(equal.int().argmax())
                raise RangeError(name, f"{_SAME[name]} for test row {which}, which leaves nothing to rank")
        ranks = [
            float(scipy.stats.spearmanr(predicted[:, j].numpy(), losses[:, j].double().numpy()).statistic)
            for j in range(rows[0])
        ]
        found = checks.finite("datamodeling_score", torch.tensor(ranks, dtype=torch.float64))
        stderr = float(found.std() / len(found) ** 0.5) if len(found) > 1 else math.inf
        return Estimate(float(found.mean()), stderr, 0, "retraining", max(1.0, len(found) - 1.0))


def influence(
    model: nn.Module,
    loss_fn: LossFunction | None,
    train: Iterable[Any],
    test: Iterable[Any],
    damping: float,
    method: str = "exact",
    blocks: Blocks | None = None,
    part: str = "outer",
    tolerance: float = 1e-6,
) -> Influence:
    """Scores of all training rows on all test rows.

    One solve for each test row, as many together as fit in memory, then one gradient for each training row. The
    gradients of all test rows are kept, those of training rows are not.

    Args:
        model: in the mode in which its loss is deterministic, at the weights it was trained to.
        loss_fn: a mean over terms of single rows, as for `cv.hessian`, without a penalty: that is the damping.
        train: batches of training data, as for `cv.hessian`.
        test: batches of test data.
        damping: added to the curvature; see `cv.analysis.damping`.
        method: "exact": solves with the curvature of the whole model, with their certificates. The name of an
            approximation of each block, such as "ekfac" or "kfac". "identity": gradients alone, divided by the damping.
        blocks: the parameters that count; None: all that are not frozen.
        part: the curvature of "exact": "outer", the Gauss-Newton part, or "total".
        tolerance: the relative residual of the solves.

    Returns:
        The scores, with bounds on their errors.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model, X, y = torch.nn.Linear(3, 2).double(), torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
        >>> data = [(X, y)]
        >>> exact, ekfac = (
        ...     cv.analysis.influence(model, torch.nn.CrossEntropyLoss(), data, data, damping=0.1, method=method)
        ...     for method in ("exact", "ekfac")
        ... )
        >>> exact.correlation(ekfac) > 0.9
        True
    """
    checks.choice("part", part, _PARTS)
    damping = checks.damping(damping)
    if damping == 0:
        raise RangeError("damping", f"got {damping}, expected a positive number: curvature alone is often singular")
    there = Surface(model, loss_fn, train, blocks)
    here = Surface(model, loss_fn, test, blocks)
    for surface in (there, here):
        surface.objective_of_rows()
    solve, made_of = _solves(there, damping, method, part, tolerance)
    gradients, _ = _row_gradients(here)
    size = gradients[0].numel() * gradients[0].element_size()
    chunk = max(1, int(checks.memory_budget() // (8 * size)))
    scores: list[Tensor] = []
    bounds: list[Tensor] = []
    solutions: list[Solution] = []
    for start in range(0, len(gradients), chunk):
        columns = torch.stack(gradients[start : start + chunk], 1)
        inverse, found = solve(columns)
        products, lengths = _products(there, inverse)
        scores.append(products.T)
        errors = torch.zeros(columns.shape[1], dtype=torch.float64) if found is None else found.error_bounds
        bounds.append(errors[:, None] * lengths)
        solutions += [] if found is None else [found]
    return Influence(torch.cat(scores), torch.cat(bounds), method, damping, tuple(solutions), made_of)


def _solves(surface: Surface, damping: float, method: str, part: str, tolerance: float) -> tuple[_Solve, str]:
    """What solves for columns (P, c), and what its approximation is made of."""
    H = surface.hessian
    if method == "identity":
        return lambda columns: (columns.double().cpu() / damping, None), ""
    if method != "exact":
        stand_ins: StandIns = H.stand_ins
        chosen = stand_ins.candidate(method, H.names)
        made, like = chosen.make(), H.total.like
        return lambda columns: (made.damped_solve(columns.to(like), damping).double().cpu(), None), chosen.made_of

    def exact(columns: Tensor) -> tuple[Tensor, Solution | None]:
        found: Solution = getattr(H, part).solve(columns.to(H.total.like), damping, tolerance)
        return found.value.double().cpu(), found

    return exact, ""


def _row_gradients(surface: Surface) -> tuple[list[Tensor], list[float]]:
    """The gradient of each row, (P,), and its share in the loss."""
    gradients: list[Tensor] = []
    shares: list[float] = []

    def keep(gradient: Tensor, share: float) -> None:
        gradients.append(gradient.to(surface.engine.dtype))
        shares.append(share)

    _each_row(surface, keep)
    return gradients, shares


def _products(surface: Surface, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """w_i g_i^T x (rows, c) for columns x (P, c), and w_i |g_i| (rows,)."""
    products: list[Tensor] = []
    lengths: list[float] = []

    def multiply(gradient: Tensor, share: float) -> None:
        products.append(share * (gradient.cpu() @ inverse))
        lengths.append(share * float(gradient.norm()))

    _each_row(surface, multiply)
    return torch.stack(products), torch.tensor(lengths, dtype=torch.float64)


def _each_row(surface: Surface, visit: Callable[[Tensor, float], None]) -> None:
    """Call `visit` with the gradient (P,) in float64 and the share in the loss of every row, 0 without loss terms."""
    engine = surface.engine
    zero = torch.zeros(surface.hessian.shape[0], dtype=torch.float64, device=engine.device)
    objective, total, loss = engine.objective, engine.survey.total, 0.0
    ticker = Ticker("gradients", None)

    def rows(weight: float, batch: Batch) -> None:
        nonlocal loss
        for row in batch.split(1):
            with torch.no_grad():
                outputs = engine.snapshot(engine.snapshot.weights, row)
                terms = float(objective.terms(outputs, row.targets))
                loss += terms / total * float(objective(outputs, row.targets)) if terms else 0.0
            visit(surface.batch_gradient(row) if terms else zero, terms / total)
            ticker.advance(1)

    try:
        engine.walk(rows, every=True)
    finally:
        ticker.close()
    if abs(loss - surface.loss) > _AGREE * surface.epsilon**0.5 * abs(surface.loss):
        raise LossError(
            "loss_fn",
            f"is {surface.loss:.8g} on all data and {loss:.8g} as the mean over single rows by their terms; it must be "
            "a mean over terms, of rows that do not meet in the model: give MeanLoss(function, terms)",
        )
