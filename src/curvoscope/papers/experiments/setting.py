"""The setting of the paper's experiments: its network, its embeddings, and its losses at the six answer digits.

A network reads 18 tokens `XXXXX+YYYYY=ZZZZZZ`; only the logits at positions 11 to 16 enter a loss. There

    "ce"    the mean over sequences and positions of -log softmax(logits)[next token]
    "mse"   the plain sum of squares between the logits and the one-hot tokens at those very positions

The parts of a block are cut at the logits, as in the Gauss-Newton matrix: H_o = J^T S J with J the Jacobian of the
logits, H_f the Hessian of <G, logits> at fixed G.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from curvoscope import losses
from curvoscope.papers import tasks
from curvoscope.papers.experiments.figure import Configuration
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import VOCABULARY

ANSWERS = slice(11, 17)
"""The positions whose logits enter a loss."""

_EMBEDDING_SEEDS = 2**31  # away from the seeds of the weights


class Additions(Configuration):
    """A batch of additions, the same for every seed."""

    sequences: int = 64
    data_seed: int = 0

    def additions(self) -> Tensor:
        """(sequences, 18)."""
        return tasks.addition(self.sequences, seed=self.data_seed)

    def probe(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets (sequences, 17) to measure on."""
        tokens = self.additions()
        return tokens[:, :-1], tasks.answer_targets(tokens)


class Setting(Additions):
    """What determines a network and its loss, apart from the seed, the depth and sigma."""

    d: int = 128
    norm: Literal["none", "pre"] = "none"
    attention: Literal["softmax", "linear"] = "softmax"
    residual: bool = True
    loss: Literal["ce", "mse"] = "ce"

    def network(self, seed: int, depth: int = 1) -> GPT2:
        """The network at initialisation, its parameters frozen."""
        return GPT2(
            self.d, depth, self.norm, self.attention, seed=seed, residual=self.residual, context=18
        ).requires_grad_(False)

    def swept(self, seed: int, depth: int, sigma: float) -> GPT2:
        """The network with W_E and W_pos redrawn from N(0, sigma²).

        One draw a seed, times sigma: along a sweep the inputs of a network scale and nothing else changes, so that no
        slope is blurred by draws.
        """
        model = self.network(seed, depth)
        generator = torch.Generator().manual_seed(_EMBEDDING_SEEDS + seed)
        for weight in (model.W_E, model.W_pos):
            weight.copy_(sigma * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
        return model


@dataclass(frozen=True)
class LogitLoss:
    """A loss at the answer logits (N, 6, v): its gradient G and a root R (N, 6, v, v) of its Hessian, S = R R^T."""

    gradient: Tensor
    root: Tensor


def logit_loss(kind: str, logits: Tensor, tokens: Tensor) -> LogitLoss:
    """G and R of "ce" or "mse" at the answer logits (N, 6, v)."""
    if kind == "mse":
        targets = one_hot(tokens[:, ANSWERS], VOCABULARY).to(logits.dtype)
        identity = torch.eye(logits.shape[-1], dtype=logits.dtype)
        return LogitLoss(2 * (logits - targets), (2**0.5 * identity).expand(*logits.shape, -1))
    loss = losses.CrossEntropy(tokens[:, ANSWERS.start + 1 : ANSWERS.stop + 1])
    return LogitLoss(loss.at(logits).gradient, loss.curvature(logits).root())
