"""The setting of the paper's experiments: its networks, their losses at the six answer digits, short trainings.

A network reads 18 tokens `XXXXX+YYYYY=ZZZZZZ`; only the logits at positions 11 to 16 enter a loss. There

    "ce"    the mean over sequences and positions of -log softmax(logits)[next token]
    "mse"   the plain sum of squares between the logits and the one-hot tokens at those very positions

The parts of a block are cut at the logits, as in the Gauss-Newton matrix: H_o = J^T S J with J the Jacobian of the
logits, H_f the Hessian of <G, logits> at fixed G.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from curvoscope import losses
from curvoscope.exact import SelfAttention
from curvoscope.exact.attention.hessian import AttentionHessian
from curvoscope.papers import tasks
from curvoscope.papers.experiments.figure import Configuration
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import IGNORED, VOCABULARY

ANSWERS = slice(11, 17)
"""The positions whose logits enter a loss."""

_EMBEDDING_SEEDS = 2**31  # away from the seeds of the weights
_DATA_SEEDS = 10_000  # of training batches: away from those of the batch that is measured


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

        One draw per seed, times sigma: along a sweep the inputs of a network scale and nothing else changes, so that no
        slope is blurred by draws.
        """
        model = self.network(seed, depth)
        generator = torch.Generator().manual_seed(_EMBEDDING_SEEDS + seed)
        for weight in (model.W_E, model.W_pos):
            weight.copy_(sigma * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
        return model


class PaperLayer(Additions):
    """One block without a norm at initialisation, cross-entropy on additions; parts are cut at the layer's output."""

    d: int = 16

    def network(self, seed: int, attention: str = "softmax") -> GPT2:
        """The network at initialisation, its parameters frozen."""
        return GPT2(self.d, activation=attention, seed=seed).requires_grad_(False)

    def hessian(self, seed: int, **options: Any) -> AttentionHessian:
        """The layer's exact Hessian; `options` as for `parts`."""
        layer, X, loss = self.parts(seed, **options)
        return layer.hessian(X, loss)

    def parts(self, seed: int, attention: str = "softmax", logit_scale: float = 1.0, **options: Any) -> Any:
        """The layer, its input X (N, L, d), and the loss as a function of its output.

        W_Q is multiplied with `logit_scale`; `options` are those of `SelfAttention` (heads, temperature).
        """
        model = self.network(seed, attention)
        block = model.blocks[0]
        weights: list[Tensor] = [getattr(block, f"W_{name}").detach() for name in "QKVO"]
        weights[0] = logit_scale * weights[0]
        inputs, targets = self.probe()
        layer = SelfAttention(*weights, activation=attention, causal=True, **options)
        with torch.no_grad():
            return layer, model.attention_input(inputs), model.tail(inputs, targets)


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
