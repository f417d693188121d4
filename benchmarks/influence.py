"""Influence functions against retraining on the addition task, beside the EKFAC of other packages if installed.

A Transformer block of `nn.Linear` layers (d = 16, float64) learns to add numbers of one digit from 64 rows, with a
weight decay that is the damping. It is retrained on 32 random halves of the rows, from the same start. The linear
datamodeling score is Spearman's correlation between the measured losses of a test row on these halves and the predicted
ones, averaged over 24 test rows.

kronfluence is in the benchmark environment; bergson is not: see `bergson_scores`.
"""

import contextlib
import json
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import curvoscope as cv
from benchmarks.bergson_scores import bergson_scores
from benchmarks.measure import in_own_process
from curvoscope.papers import tasks

WIDTH, DIGITS, TRAIN, TEST, SUBSETS, STEPS, DECAY = 16, 1, 64, 24, 32, 300, 1e-3
METHODS = ("exact", "ekfac", "kfac", "identity")
LINEAR = ("*.weight", "*.bias")


class Adder(nn.Module):
    """Embeddings, one block of causal attention and a feed-forward layer, and the unembedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Parameter(torch.randn(n, WIDTH) / 4) for n in (tasks.VOCABULARY, 3 * DIGITS + 2))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, tasks.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, L) -> logits (N, L, 12)."""
        return self.embedded(self.tokens[tokens] + self.places)

    def embedded(self, x: Tensor) -> Tensor:
        """Embeddings (N, L, d) -> logits (N, L, 12)."""
        scores = self.query(x) @ self.key(x).mT / WIDTH**0.5
        hidden = torch.ones_like(scores).triu(1).bool()
        x = x + self.out(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.value(x))
        logits: Tensor = self.head(x + self.down(self.up(x).tanh()))
        return logits


def row_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of the answer's digits of each row, (N,)."""
    losses = nn.functional.cross_entropy(logits.mT, targets, ignore_index=tasks.IGNORED, reduction="none")
    return losses.sum(1) / (DIGITS + 1)


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    tokens = tasks.addition(count, DIGITS, seed)
    return tokens[:, :-1], tasks.answer_targets(tokens)


def trained(subsets: Tensor, seed: int) -> dict[str, Tensor]:
    """Weights (k, ...) that minimise sum_{i in subset} l_i / n + decay/2 |w|², all from one start."""
    torch.manual_seed(seed)
    model = Adder().double()
    stacked, _ = stack_module_state([model] * len(subsets))
    weights = {name: value.detach().clone().requires_grad_() for name, value in stacked.items()}
    inputs, targets = rows(TRAIN, 1)
    share = subsets.double() / TRAIN

    def loss(one: dict[str, Tensor], kept: Tensor) -> Tensor:
        penalty = sum(w.square().sum() for w in one.values())
        return kept @ row_losses(functional_call(model, one, (inputs,)), targets) + DECAY / 2 * penalty

    optimizer = torch.optim.Adam(weights.values(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        vmap(loss)(weights, share).sum().backward()
        optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in weights.items()}


def by_kronfluence(model: nn.Module, train: Any, test: Any) -> Tensor | None:
    """Scores (test, train) of kronfluence's EKFAC with the same damping; None if it is not installed."""
    try:
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.arguments import FactorArguments, ScoreArguments
        from kronfluence.task import Task
    except ImportError:
        return None
    from torch.utils.data import TensorDataset

    class Addition(Task):  # type: ignore[misc,unused-ignore]
        """Sums over digits and rows, so that sampled labels have the Gauss-Newton matrix of the sum as covariance."""

        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits, targets = model(batch[0]), batch[1]
            if sample:
                drawn = torch.distributions.Categorical(logits=logits.detach()).sample()
                targets = torch.where(targets == tasks.IGNORED, targets, drawn)
            return nn.functional.cross_entropy(logits.mT, targets, ignore_index=tasks.IGNORED, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task = Addition()
    prepared = prepare_model(model, task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("addition", prepared, task, cpu=True, output_dir=folder, disable_tqdm=True)
        kinds = {
            "activation_covariance_dtype",
            "gradient_covariance_dtype",
            "per_sample_gradient_dtype",
            "lambda_dtype",
        }
        factors = FactorArguments(strategy="ekfac", **dict.fromkeys(kinds, torch.float64))
        scores = ScoreArguments(damping_factor=DECAY * (DIGITS + 1), score_dtype=torch.float64)
        scores.precondition_dtype = scores.per_sample_gradient_dtype = torch.float64
        analyzer.fit_all_factors("ekfac", TensorDataset(*train), per_device_batch_size=32, factor_args=factors)
        analyzer.compute_pairwise_scores(
            "scores",
            "ekfac",
            query_dataset=TensorDataset(*test),
            train_dataset=TensorDataset(*train),
            per_device_query_batch_size=TEST,
            per_device_train_batch_size=32,
            score_args=scores,
        )
        found: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
    return found.double() / TRAIN


def measured(seed: int = 0) -> dict[str, object]:
    """Correlations with retraining, and between the methods."""
    torch.set_num_threads(1)
    train, test = rows(TRAIN, 1), rows(TEST, 2)
    halves = torch.rand(SUBSETS, TRAIN, generator=torch.Generator().manual_seed(seed)).argsort(1) < TRAIN // 2
    start = time.perf_counter()
    weights = trained(torch.cat([torch.ones(1, TRAIN, dtype=torch.bool), halves]), seed)
    seconds = time.perf_counter() - start
    model = Adder().double().eval()
    with torch.no_grad():
        losses = vmap(lambda one: row_losses(functional_call(model, one, (test[0],)), test[1]))(weights)
    model.load_state_dict({name: value[0] for name, value in weights.items()})

    def influence(method: str, *patterns: str) -> Any:
        blocks = cv.blocks_of(model).select(*patterns) if patterns else None
        return cv.analysis.influence(model, cv.losses.CrossEntropy(), [train], [test], DECAY, method, blocks)

    found: dict[str, Any] = {
        "retraining_seconds": seconds,
        "training_loss": float(row_losses(model(train[0]), train[1]).mean().detach()),
        "methods": {},
    }
    scores = {method: influence(method) for method in METHODS}
    scores |= {"ekfac, linear layers": influence("ekfac", *LINEAR)}
    with contextlib.redirect_stdout(sys.stderr):  # their messages
        peers = {  # kronfluence is the last: it wraps the layers of the model
            "bergson": bergson_scores(model, train, test, tasks.VOCABULARY, DECAY * (DIGITS + 1)),
            "kronfluence": by_kronfluence(model, train, test),
        }
    ours = scores["ekfac, linear layers"]
    for peer, theirs in peers.items():
        if theirs is not None:
            scores[f"{peer}, linear layers"] = cv.analysis.Influence(theirs, torch.zeros_like(theirs), peer, DECAY)
            found[peer] = {"version": version(peer), "correlation_with_our_ekfac": ours.correlation(theirs)}
    for name, one in scores.items():
        score = one.datamodeling_score(halves, losses[1:])
        found["methods"][name] = {
            "datamodeling_score": float(score),
            "stderr": score.stderr,
            "correlation_with_exact": scores["exact"].correlation(one),
            "converged": one.converged,
        }
    return found


def run() -> dict[str, object]:
    """All measurements."""
    return in_own_process("benchmarks.influence")


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:])), indent=1))
