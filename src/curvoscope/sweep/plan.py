"""How long a sweep will take, as far as its first backward pass tells."""

import math
from typing import NamedTuple

CHUNK = 64  # samples at a time, of which all pairs count
MOST = 1024  # samples for a tolerance
_GRADIENTS = 0.5  # time of a sample, in gradients: a third for its backward pass, the rest for the Gram matrices


class SweepPlan(NamedTuple):
    """What a sweep will take, predicted from the time of one gradient.

    Args:
        fewest: samples that will be drawn, at least.
        most: samples that will be drawn, at most: a block with one dominant direction has the relative error sqrt(2/m)
            after m samples, and a block with more of them a smaller one.
        gradient: seconds of one gradient of the loss on a micro-batch.
        batches: the number of micro-batches.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.ones(4, 3).double()
        >>> plans = []
        >>> _ = cv.sweep(model, torch.nn.MSELoss(), [(X, X[:, :2])], samples=16, plan=plans.append)
        >>> plans[0].fewest, plans[0].most, plans[0].batches
        (16, 16, 1)
        >>> plans[0]._replace(gradient=2.0).seconds
        (16.0, 16.0)
    """

    fewest: int
    most: int
    gradient: float
    batches: int

    @property
    def seconds(self) -> tuple[float, float]:
        """Of the fewest and of the most samples."""
        return self.fewest * _GRADIENTS * self.gradient, self.most * _GRADIENTS * self.gradient


def planned(tolerance: float, samples: int | None, known: int, gradient: float, batches: int) -> SweepPlan:
    """The plan of a sweep for a tolerance or a number of samples, of which `known` are there already."""
    least, most = (samples, samples) if samples is not None else (CHUNK, min(MOST, _in_chunks(2 / tolerance**2)))
    return SweepPlan(max(0, least - known), max(0, most - known), gradient, batches)


def _in_chunks(samples: float) -> int:
    return CHUNK * math.ceil(samples / CHUNK)
