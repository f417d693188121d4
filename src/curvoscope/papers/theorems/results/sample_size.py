"""The block paper's Theorem 7: how much the mean loss changes with one more sample."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from curvoscope.papers.theorems.autodiff import hessian, mean_square
from curvoscope.papers.theorems.layer_norm import normalised
from curvoscope.papers.theorems.norm_bounds import norm, theorem_1_as_printed
from curvoscope.papers.theorems.post_norm_block import NAMES, PostNormBlock
from curvoscope.papers.theorems.registry import BLOCK_PAPER, OWN, Fails, excess, relative_error
from curvoscope.papers.theorems.results.instances import Draw, attention_output
from curvoscope.papers.theorems.results.post_norm_block import draw_block

STEP = 1e-5
"""Length of the step away from w* in the counterexample with M of Theorem 1."""


@BLOCK_PAPER.holds("Block paper, adding a sample", "L_{k+1} − L_k = (ℓ_{k+1} − L_k)/(k + 1) for any losses at any w")
def averaging(seed: int) -> Iterator[float]:
    """And with a batch of b: b/(k + b) (its mean − L_k). The 1/k rate is this arithmetic and nothing else."""
    losses = Draw(seed, 25, 1).normal(40).abs()
    for batch in (1, 4):
        for k in range(batch, 40 - batch, batch):
            change = losses[: k + batch].mean() - losses[:k].mean()
            predicted = batch / (k + batch) * (losses[k : k + batch].mean() - losses[:k].mean())
            yield relative_error(predicted, change, losses)


@BLOCK_PAPER.corrected("Block paper, k as sequence length", "the identity holds over tokens only under a causal mask")
def averaging_over_tokens(seed: int) -> Iterator[float]:
    """Without a mask, a new token changes the losses of the others."""
    draw = Draw(seed, 25, 2)
    X, Y = draw.normal(10, 4), draw.normal(10, 4)
    W_Q, W_K, W_V = (0.7 * draw.normal(4, n) for n in (3, 3, 4))

    def losses(n: int, causal: bool) -> Tensor:
        scores = X[:n] @ W_Q @ W_K.T @ X[:n].T / math.sqrt(3)
        if causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        return (torch.softmax(scores, -1) @ X[:n] @ W_V - Y[:n]).square().mean(1)

    def error(causal: bool) -> float:
        worst = []
        for n in range(1, 10):
            before, after = losses(n, causal), losses(n + 1, causal)
            worst.append(float((after.mean() - before.mean() - (after[-1] - before.mean()) / (n + 1)).abs()))
        return max(worst) / float(losses(10, causal).mean())

    yield error(True)
    yield Fails(error(False), "without a mask, as in the paper,")


@OWN.holds("Block paper, Assumption 1", "for two k in a row it forces ∇ℓ_{k+1}(w*) = (k + 1)∇L_{k+1} − k ∇L_k = 0")
def assumption_1(seed: int) -> Iterator[float]:
    """A point that is stationary for every L_k is stationary for every sample: interpolation."""
    gradients = Draw(seed, 25, 3).normal(12, 5)
    means = [gradients[:k].mean(0) for k in range(1, 13)]
    yield from (relative_error((k + 1) * means[k] - k * means[k - 1], gradients[k], gradients) for k in range(1, 12))


@BLOCK_PAPER.corrected(
    "Block paper, Theorem 7",
    "(2B + M‖w − w*‖²)/(k + 1) if every ℓ_i ≥ 0 is M-smooth everywhere; stationarity is not needed",
)
def theorem_7(seed: int) -> Iterator[float]:
    """Logistic and square losses at a w* that is not stationary, and the case of equality ℓ = ½(w − a)²."""
    draw = Draw(seed, 25, 4)
    for _ in range(20):
        radius = 10 ** float(draw.normal(1))
        X, y, start = 3 * draw.normal(20, 3), draw.normal(20).sign(), draw.normal(3)
        moved = start + radius * draw.normal(3)
        logistic = [torch.nn.functional.softplus(-y * (X @ w)) for w in (start, moved)]
        square = [0.5 * (w - X).square().sum(1) for w in (start, moved)]
        distance = float((moved - start).square().sum())
        yield _change_excess(logistic[0], logistic[1], float(X.square().sum(1).max()) / 4 * distance)
        yield _change_excess(square[0], square[1], distance)
    a = 1.7
    largest_loss, B = 0.5 * (2 * a) ** 2, 0.5 * a**2
    yield abs(largest_loss / (2 * B + a**2) - 1)
    yield Fails(_interpolation_excess(seed), "printed, M of Theorem 1 at w*,")


@BLOCK_PAPER.false(
    "Block paper, Theorem 7 as printed, zero Hessian",
    "M = ‖H(w*)‖ does not see beyond w*; counterexample: centred tokens, all weights and targets 0",
)
def theorem_7_zero_hessian(seed: int) -> Iterator[float]:
    """ℓ, ∇ℓ and ∇²ℓ vanish at w* = 0, so the right side is 0; the loss at w ≠ w* is not: (left − right)/left."""
    draw = Draw(seed, 25, 5)
    X = draw.normal(3, 4)
    X = X - X.mean(0)
    moved = draw.normal(8 + 8 + 16)

    def loss(w: Tensor) -> Tensor:
        pieces = w.split([8, 8, 16])
        weights = [piece.reshape(shape) for piece, shape in zip(pieces, ((4, 2), (4, 2), (4, 4)), strict=True)]
        return attention_output(X, *weights).square().mean()

    right = norm(hessian(loss, torch.zeros_like(moved))) * float(moved.square().sum())
    left = float(loss(moved))
    yield (left - right) / left


@BLOCK_PAPER.false(
    "Block paper, Theorem 7 as printed, M of Theorem 1",
    f"counterexample: interpolated sample, W_K = 0, W_Q of size 1e3, W_K moved by {STEP:g}, other samples zero",
)
def theorem_7_interpolation(seed: int) -> Iterator[float]:
    """Every hypothesis is met; how far (k + 1)|L_{k+1} − L_k| is above M‖w − w*‖²."""
    yield _interpolation_excess(seed)


@OWN.holds("Block paper, loss of a post-norm block", "ℓ(w) ≤ (1 + ‖target‖_F/√(L d))² for every w: no Hessian needed")
def bounded_loss(seed: int) -> Iterator[float]:
    """‖Z‖_F = √(L d) whatever the weights."""
    block, draw = draw_block(seed, 3, 4, 2, 5), Draw(seed, 25, 6)
    bound = (1 + float(block.target.norm()) / math.sqrt(block.X.numel())) ** 2
    for scale in (0.1, 1.0, 10.0, 100.0):
        weights = {name: scale * draw.normal(*block.weights[name].shape) for name in NAMES}
        moved = PostNormBlock(block.X, weights, block.target)
        yield excess(float(mean_square(block.target)(normalised(moved.S))), bound)


def _change_excess(start: Tensor, moved: Tensor, growth: float) -> float:
    """max over k of (k + 1)|L_{k+1} − L_k| at `moved` against 2B + growth, B the largest loss at the start."""
    bound = 2 * float(start.max()) + growth
    changes = [(k + 1) * (moved[: k + 1].mean() - moved[:k].mean()).abs() for k in range(1, len(moved))]
    return excess(float(torch.stack(changes).max()), bound)


def _interpolation_excess(seed: int) -> float:
    draw = Draw(seed, 25, 7)
    X, W_Q, W_V = draw.normal(4, 3), 700 * draw.normal(3, 2), 0.7 * draw.normal(3, 3)
    W_K = torch.zeros(3, 2, dtype=torch.float64)
    target = attention_output(X, W_Q, W_K, W_V)  # loss and gradient vanish at w*
    M = theorem_1_as_printed(X, W_Q, W_K, W_V, target)[0]
    step = draw.normal(3, 2)
    moved = W_K + STEP * step / step.norm()
    return excess(float(mean_square(target)(attention_output(X, W_Q, moved, W_V))), M * STEP**2)
