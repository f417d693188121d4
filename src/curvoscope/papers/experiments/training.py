"""Short trainings for the figures that look at networks beyond initialisation."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvoscope.papers import tasks
from curvoscope.papers.tasks import IGNORED

_DATA_SEEDS = 10_000  # away from those of the batch that is measured


def checkpoints(model: nn.Module, steps: Sequence[int], sequences: int, rate: float, seed: int) -> Iterator[int]:
    """Train with Adam on a fresh batch of additions a step; yields each of the ascending `steps` when it is reached."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    done = 0
    for step in steps:
        while done < step:
            tokens = tasks.addition(sequences, seed=_DATA_SEEDS * (seed + 1) + done)
            optimizer.zero_grad()
            loss_of(model, tokens)().backward()
            optimizer.step()
            done += 1
        yield step


def loss_of(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    """Cross-entropy at the answers, as a function of the model's present weights."""
    inputs, targets = tokens[:, :-1], tasks.answer_targets(tokens)
    return lambda: cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
