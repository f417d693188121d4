"""What changes of a trained model's weights do: scores against measured changes, formats for a size, repairs."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import curvoscope as cv
from benchmarks.trained_models import Trained
from curvoscope.analysis import Menu, allocate, gptq, recipes, round_and_repair, scores, surgeon
from curvoscope.analysis.changes import Change, changed_state, displacement
from curvoscope.analysis.expansion import Expansion, Move, engine_of
from curvoscope.analysis.ledger import spearman
from curvoscope.approximations.roots import RootForm
from curvoscope.blocks import Blocks

GROUP = 64
BITS = {"int3": 3, "int4": 4}
SCALE_BITS = 16 / GROUP
BUDGET = 3.5
SCALES = (0.25, 0.5, 1.0)
SAMPLES = 48  # gradients for the curvature of repairs, each of a random sequence of the calibration text
UPDATES = 6  # while a weight is rounded with a curvature that is no Kronecker product
ITERATIONS = {"samples": 15, "exact": 8}
DAMPING = 0.01  # of the mean diagonal entry
Found = dict[str, Any]


def rounded(name: str, blocks: Blocks) -> Change:
    """The recipe of a format for some blocks alone."""
    return partial(getattr(recipes, name), group=GROUP, names=list(blocks))


class Study:
    """Moves of blocks by several changes: to second order on the probe, and measured there and on held-out text."""

    def __init__(self, subject: Trained, changes: Mapping[str, Change], blocks: Blocks) -> None:
        self.subject, self.changes, self.blocks = subject, changes, blocks
        moves: dict[tuple[str, str], Move] = {}
        for name, change in changes.items():
            delta = displacement(subject.model, changed_state(subject.model, change))
            moves |= {(name, block.name): Move(block, block.gather(delta)) for block in blocks.values()}
        self._scores: dict[str, Mapping[str, Mapping[str, float]]] = {}
        self.keys = list(moves)
        self.moves = list(moves.values())
        engine, _ = engine_of(subject.model, subject.loss, self._data(), blocks, "batch", None)
        probe = Expansion(engine, self.moves)
        self.first, self.pairs = probe.forms(probe.first, probe.pairs)
        self.loss = engine.survey.loss

    def measured(self, coefficients: Tensor, rows: Sequence[int]) -> Tensor:
        """L(w + Σ c d) - L(w) of some sequences for k rows of coefficients c (k, m), (N, k)."""
        return measured(self.subject, self.moves, coefficients, rows)

    def _on_probe(self, coefficients: Tensor) -> Tensor:
        """The same for the units of the probe."""
        return self.measured(coefficients, self.subject.probe).unflatten(0, (-1, self.subject.together)).mean(1)

    def _data(self) -> list[dict[str, Tensor]]:
        rows, step = self.subject.probe, self.subject.together
        return [self.subject.batch(rows[start : start + step]) for start in range(0, len(rows), step)]

    def scores(self, change: str) -> Mapping[str, Mapping[str, float]]:
        """The scores that need no second derivative, on the probe."""
        if change not in self._scores:
            subject, one = self.subject, self.changes[change]
            self._scores[change] = scores(subject.model, subject.loss, self._data(), one, blocks=self.blocks)
        return self._scores[change]

    def ranks(self, change: str, groups: Mapping[str, Sequence[str]] | None = None) -> Found:
        """A change: predicted and measured as a whole, and how well scores rank the changes of single blocks.

        `groups`: blocks that change together, by name; None: each block alone.
        """
        members = groups or {name: [name] for name in self.blocks}
        C = torch.zeros(len(members), len(self.keys), dtype=torch.float64)
        for row, names in enumerate(members.values()):
            C[row, [self.keys.index((change, name)) for name in names]] = 1
        whole = C.sum(0).clamp_max(1)
        slopes, second = self.first @ C.T, torch.einsum("km,iml,kl->ik", C, self.pairs, C)
        predictions = {"second order": slopes + second, "curvature": second, "first order": slopes}
        predictions["gradient"] = slopes.mean(0).abs()
        for name, values in self.scores(change).items():
            if name != "gradient":
                predictions[name] = torch.tensor([sum(values[one] for one in names) for names in members.values()])
        moved = self._on_probe(torch.stack([whole * scale for scale in SCALES]))
        slope, curve = self.first @ whole, torch.einsum("m,iml,l->i", whole, self.pairs, whole)
        expected = torch.stack([scale * slope + scale**2 * curve for scale in SCALES], 1)
        own = float(second.sum(1).mean())
        here, elsewhere = self._on_probe(C), self.measured(C, self.subject.few)
        return {
            "blocks": len(members),
            "size": self._size(whole),
            "rounding": 16 * torch.finfo(torch.float32).eps * abs(self.loss),
            "second": _mean(curve),
            "predicted": _mean(expected[:, -1]),
            "measured": _mean(moved[:, -1]),
            "scaled": [
                [scale, _mean(moved[:, i]), _mean(moved[:, i] - expected[:, i])] for i, scale in enumerate(SCALES)
            ],
            "single": own,
            "interactions": float(curve.mean()) - own,
            "same text": {name: _rank(values, here) for name, values in predictions.items()},
            "other text": {
                name: _rank(values if values.ndim == 1 else values.mean(0), elsewhere)
                for name, values in predictions.items()
            },
        }

    def _size(self, whole: Tensor) -> float:
        """|δ| / |w| over the blocks that change."""
        weights = {name: p.detach() for name, p in self.subject.model.named_parameters()}
        chosen = [move for move, one in zip(self.moves, whole.tolist(), strict=True) if one]
        squares = [(float(m.vector.square().sum()), float(m.block.gather(weights).square().sum())) for m in chosen]
        return math.sqrt(sum(d for d, _ in squares) / sum(w for _, w in squares))

    def allocations(self) -> list[Found]:
        """Formats for one size, chosen on the probe by several costs, measured on held-out text, paired with ours."""
        names, formats = list(self.blocks), list(self.changes)
        shape = len(formats), len(names)
        first = self.first.mean(0).view(shape).T
        second = self.pairs.mean(0).view(*shape, *shape).permute(1, 0, 3, 2)
        sizes = tuple(block.size for block in self.blocks.values())
        bits = tuple(BITS[name] + SCALE_BITS for name in formats)
        menu = Menu(tuple(names), sizes, tuple(formats), bits, first.clone(), second.clone())
        known = {name: self.scores(name) for name in formats}
        kinds = {
            "½ d·Hd with interactions": menu.without_gradient(),
            "½ d·Hd without interactions": menu.without_gradient().without_interactions(),
            "g·d + ½ d·Hd with interactions": menu,
        }
        for score in ("fisher", "inputs", "magnitude"):
            kinds[score] = menu.scored({name: found[score] for name, found in known.items()})
        choices = {kind: menu.choice(allocate(costs, BUDGET).formats) for kind, costs in kinds.items()}
        choices |= at_random(menu)
        places = torch.arange(len(names))
        C = torch.zeros(len(choices), *shape, dtype=torch.float64)
        for row, choice in enumerate(choices.values()):
            C[row, choice, places] = 1
        changes = self.measured(C.flatten(1), self.subject.held_out)
        return [
            {
                "by": kind,
                "bits": menu.average_bits(choice),
                "predicted": menu.cost(choice),
                "measured": _mean(changes[:, row]),
                "more than ours": _mean(changes[:, row] - changes[:, 0]),
            }
            for row, (kind, choice) in enumerate(choices.items())
        ]


def at_random(menu: Menu) -> dict[str, Tensor]:
    """The larger of two formats for random blocks, as many as the budget allows; three draws."""
    found = {}
    for seed in range(3):
        choice = torch.zeros(len(menu.names), dtype=torch.int64)
        for block in torch.randperm(len(choice), generator=torch.Generator().manual_seed(seed)).tolist():
            choice[block] = 1
            if menu.average_bits(choice) > BUDGET:
                choice[block] = 0
        found[f"at random, {seed + 1}"] = choice
    return found


# ---- repairs


def repairs(subject: Trained, exact: bool) -> list[Found]:
    """Weights rounded or pruned, and repaired with several curvatures of the calibration text: measured on held-out
    text with all these weights changed, and paired with what X^T X reaches."""
    blocks = subject.repaired
    model, loss, data = subject.model, subject.loss, [subject.batch(subject.calibration)]
    sweep = cv.sweep(model, loss, data, blocks, samples=SAMPLES, micro_batch=1, keep=list(blocks))
    moves: dict[tuple[str, str], list[Move]] = {}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, block in blocks.items():
        W = block.matrix(weights).clone()
        source = cv.approximations.source_of(sweep, name)
        curvatures: dict[str, Any] = {
            "X^T X": cv.approximations.input(source),
            "KFAC": cv.approximations.kfac(source),
            "TKFAC": cv.approximations.tkfac(source),
            "samples": RootForm.of("samples", source),
        }
        if exact:
            curvatures["exact"] = cv.hessian(model, loss, data, Blocks([block]), method="autodiff").outer[name]
        grams = {"X^T X": source.token_moments[0], "TKFAC": curvatures["TKFAC"].left}
        for change, made in _repaired(name, W, curvatures, grams).items():
            moves.setdefault(change, []).append(Move(block, (made - W).flatten()))
    C = torch.block_diag(*(torch.ones(1, len(some)) for some in moves.values()))
    found = measured(subject, [move for some in moves.values() for move in some], C, subject.held_out)
    changes = dict(zip(moves, found.T, strict=True))
    return [
        {
            "change": change,
            "curvature": curvature,
            "measured": _mean(values),
            "more than X^T X": _mean(values - changes[change, "X^T X"]),
        }
        for (change, curvature), values in changes.items()
    ]


def _repaired(
    name: str, W: Tensor, curvatures: Mapping[str, Any], grams: Mapping[str, Tensor]
) -> dict[tuple[str, str], Tensor]:
    """The weight (a, p) after each change and repair."""
    found: dict[tuple[str, str], Tensor] = {}
    damping = DAMPING * float(curvatures["samples"].trace()) / W.numel()
    for format_name in ("int4", "int3"):
        top = 2 ** (BITS[format_name] - 1) - 1
        scale = W.view(-1, GROUP, W.shape[1]).abs().amax(1) / top

        def nearest(i: int, w: Tensor, scale: Tensor = scale, top: int = top) -> Tensor:
            return (w / scale[i // GROUP]).round().clamp(-top, top) * scale[i // GROUP]

        found[format_name, "none"] = torch.stack([nearest(i, w) for i, w in enumerate(W)])
        for kind, gram in grams.items():
            found[format_name, kind] = gptq(W, gram, nearest)
        found[format_name, "samples"] = round_and_repair(
            {name: curvatures["samples"]}, name, W, nearest, -(-len(W) // UPDATES), **_options("samples", damping)
        )
    gone = torch.zeros(W.numel(), dtype=torch.bool)
    gone[W.abs().flatten().argsort(stable=True)[: W.numel() // 2]] = True
    delta = torch.where(gone, -W.flatten(), 0.0)
    found["pruned", "none"] = W + delta.view(W.shape)
    for kind, curvature in curvatures.items():
        repair = surgeon({name: curvature}, name, delta, gone, **_options(kind, damping))
        found["pruned", kind] = W + repair.delta.view(W.shape)
    return found


def _options(kind: str, damping: float) -> dict[str, Any]:
    return {"damping": damping, "tolerance": 1e-2, "iterations": ITERATIONS.get(kind, 60)}


# ---- numbers


def measured(subject: Trained, moves: Sequence[Move], coefficients: Tensor, rows: Sequence[int]) -> Tensor:
    """L(w + Σ c d) - L(w) of some sequences for k rows of coefficients c (k, m), (N, k)."""
    weights = {name: p.detach() for name, p in subject.model.named_parameters()}
    before, found = subject.losses(weights, rows), []
    for row in coefficients.tolist():
        taken = [(move, c) for move, c in zip(moves, row, strict=True) if c]
        changed = {
            piece.parameter: weights[piece.parameter].clone() for move, _ in taken for piece in move.block.pieces
        }
        for move, c in taken:
            move.block.scatter(move.block.gather(changed) + c * move.vector, changed)
        found.append(subject.losses(weights | changed, rows) - before)
    return torch.stack(found, 1)


def _mean(values: Tensor) -> list[float]:
    """The mean over sequences of equal length, and its standard error."""
    return [float(values.mean()), float(values.std() / len(values) ** 0.5)]


def _rank(predicted: Tensor, found: Tensor) -> list[float]:
    """Spearman's correlation of predictions with the mean of measured changes (N, k) over N sequences, and the
    jackknife's standard error. Predictions (N, k) are those of the same sequences, (k,) are fixed."""
    count = len(found)

    def correlation(kept: Tensor) -> float:
        return spearman(predicted if predicted.ndim == 1 else predicted[kept].mean(0), found[kept].mean(0))

    everything = torch.ones(count, dtype=torch.bool)
    others = torch.tensor([correlation(everything & (torch.arange(count) != i)) for i in range(count)])
    variance = (count - 1) / count * float((others - others.mean()).square().sum())
    return [correlation(everything), math.sqrt(variance)]
