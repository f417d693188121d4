"""Losses that compare the rows of a batch with each other."""

from typing import Any

from torch import Tensor

from curvoscope.losses.objectives import LossFunction, MeanLoss
from curvoscope.losses.outputs import tensors


class Contrastive(MeanLoss):
    """A loss(outputs, targets) in which rows of a batch meet, as in InfoNCE: a mean over rows, each against the others.

    A batch is a unit: its rows meet each other, and never those of another batch. Several batches are weighted by their
    rows. With `micro_batch` the model runs on a few rows at a time, and the result is that of the whole batch: outputs
    of all rows first, then the loss and its derivatives at them, then products through the model, part by part.

    Args:
        function: takes the outputs and targets of a whole batch and returns a scalar.

    Example:
        >>> import torch, curvoscope as cv
        >>> def info_nce(embeddings, targets):
        ...     return torch.nn.functional.cross_entropy(embeddings @ embeddings.T, targets)
        >>> model, batches = torch.nn.Linear(2, 3).double(), [(torch.ones(4, 2).double(), torch.arange(4))]
        >>> cv.hessian(model, cv.losses.Contrastive(info_nce), batches, micro_batch=3).terms
        4.0
    """

    couples_rows = True

    def __init__(self, function: LossFunction) -> None:
        super().__init__(function, _rows)


def _rows(outputs: Any, targets: Any) -> int:
    first: Tensor | None = next(iter([*tensors(targets), *tensors(outputs)]), None)
    return 1 if first is None else first.shape[0]
