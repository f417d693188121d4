"""What changes of a trained model's weights do: scores against measured changes, formats for a size, repairs."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import curvoscope as cv
from benchmarks.trained_models import Trained
from curvoscope.analysis import Menu, allocate, gptq, recipes, round_and_repair, surgeon
from curvoscope.analysis.changes import Change, changed_state, displacement
from curvoscope.analysis.expansion import Expansion, Move, engine_of
from curvoscope.analysis.ledger import spearman
from curvoscope.analysis.scores import scores_of_moves
from curvoscope.approximations import GradientSource
from curvoscope.approximations.enumeration import labelled
from curvoscope.approximations.roots import RootForm
from curvoscope.blocks import Blocks

GROUP = 64
BITS = {"int3": 3, "int4": 4}
SCALE_BITS = 16 / GROUP
BUDGET = 3.5
UNIFORM = ("int3", 32)  # the format and its group that have this size for all tensors alike
SCALES = (0.25, 0.5, 1.0)
SAMPLES = 48  # gradients for the curvature of repairs, each of a random sequence of the calibration text
UPDATES = 6  # while a weight is rounded with a curvature that is no Kronecker product
ITERATIONS = {"samples": 15, "exact": 8}
DAMPING = 0.01  # of the mean diagonal entry
Found = dict[str, Any]


def rounded(name: str, blocks: Blocks, group: int = GROUP) -> Change:
    """The recipe of a format for some blocks alone."""
    return partial(getattr(recipes, name), group=group, names=list(blocks))


class Study:
    """Moves of blocks by several changes: to second order on the probe, and measured there and on held-out text."""

    def __init__(self, subject: Trained, changes: Mapping[str, Change], blocks: Blocks) -> None:
        self.subject, self.changes, self.blocks = subject, changes, blocks
        moves = {(name, move.block.name): move for name, change in changes.items() for move in self._moves(change)}
        self.keys = list(moves)
        self.moves = list(moves.values())
        probe = self._expansion(self.moves)
        self.first, self.pairs = probe.forms(probe.first, probe.pairs)
        self.loss = probe.engine.survey.loss

    def _moves(self, change: Change) -> list[Move]:
        """A change, block by block."""
        delta = displacement(self.subject.model, changed_state(self.subject.model, change))
        return [Move(block, block.gather(delta)) for block in self.blocks.values()]

    def _expansion(self, moves: Sequence[Move]) -> Expansion:
        """The loss of the probe to second order in some moves."""
        engine, _ = engine_of(self.subject.model, self.subject.loss, self._data(), self.blocks, "batch", None)
        return Expansion(engine, moves)

    def measured(self, coefficients: Tensor, rows: Sequence[int]) -> Tensor:
        """L(w + Σ c d) - L(w) of some sequences for k rows of coefficients c (k, m), (N, k)."""
        return measured(self.subject, self.moves, coefficients, rows)

    def _on_probe(self, coefficients: Tensor) -> Tensor:
        """The same for the units of the probe."""
        return self.measured(coefficients, self.subject.probe).unflatten(0, (-1, self.subject.together)).mean(1)

    def _data(self) -> list[dict[str, Tensor]]:
        rows, step = self.subject.probe, self.subject.together
        return [self.subject.batch(rows[start : start + step]) for start in range(0, len(rows), step)]

    @cached_property
    def _sources(self) -> Mapping[str, GradientSource]:
        """The gradients of each sequence of the probe."""
        engine, _ = engine_of(self.subject.model, self.subject.loss, self._data(), self.blocks, "sequence", None)
        return labelled(engine, list(self.blocks.values()))

    def scores(self, change: str) -> dict[str, dict[str, float]]:
        """The scores that need no second derivative, on the probe, as `cv.analysis.scores` has them."""
        moves = [move for (name, _), move in zip(self.keys, self.moves, strict=True) if name == change]
        return dict(zip(("magnitude", "fisher", "inputs"), scores_of_moves(moves, self._sources), strict=True))

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
            predictions[name] = torch.tensor([sum(values[one] for one in names) for names in members.values()])
        moved = self._on_probe(torch.stack([whole * scale for scale in SCALES]))
        slope, curve = self.first @ whole, torch.einsum("m,iml,l->i", whole, self.pairs, whole)
        expected = torch.stack([scale * slope + scale**2 * curve for scale in SCALES], 1)
        own = float(second.sum(1).mean())
        here, elsewhere = self._on_probe(C), self.measured(C, self.subject.few)
        same = {name: _ranks(values, here) for name, values in predictions.items()}
        other = {
            name: _ranks(values if values.ndim == 1 else values.mean(0), elsewhere)
            for name, values in predictions.items()
        }
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
            "same text": {name: _jackknifed(values) for name, values in same.items()},
            "other text": {name: _jackknifed(values) for name, values in other.items()},
            "second order ahead": {  # on other text, by how much
                name: _jackknifed(other["second order"] - values)
                for name, values in other.items()
                if name != "second order"
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
        names, formats = list(self.blocks), list(BITS)
        places = [self.keys.index((one, name)) for one in formats for name in names]
        shape = len(formats), len(names)
        first = self.first.mean(0)[places].view(shape).T
        second = self.pairs.mean(0)[places][:, places].view(*shape, *shape).permute(1, 0, 3, 2)
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
        C = torch.zeros(len(choices), len(self.keys), dtype=torch.float64)
        for row, choice in enumerate(choices.values()):
            C[row, [self.keys.index((formats[one], name)) for name, one in zip(names, choice, strict=True)]] = 1
        changes = self.measured(C, self.subject.held_out)
        sized = {kind: (menu.average_bits(choice), menu.cost(choice)) for kind, choice in choices.items()}
        name, group = UNIFORM
        alike = self._moves(rounded(name, self.blocks, group))
        sized[f"all alike: {name}, groups of {group}"] = BITS[name] + 16 / group, self._predicted(alike)
        together = measured(self.subject, alike, torch.ones(1, len(alike)), self.subject.held_out)
        return [
            {
                "by": kind,
                "bits": size,
                "predicted": predicted,
                "measured": _mean(values),
                "more than ours": _mean(values - changes[:, 0]),
            }
            for (kind, (size, predicted)), values in zip(
                sized.items(), torch.cat([changes, together], 1).T, strict=True
            )
        ]

    def _predicted(self, moves: Sequence[Move]) -> float:
        """g·δ + ½ δ·Hδ of the probe for the sum of some moves, one per block."""
        probe = self._expansion(moves)
        first, parts = probe.forms(probe.first, probe.parts)
        return float(probe.weights @ (first.sum(1) + parts.sum((1, 2))))


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


def _ranks(predicted: Tensor, found: Tensor) -> Tensor:
    """Spearman's correlation of predictions with the mean of measured changes (N, k) over N sequences, and over all
    but one of them: (N + 1,). Predictions (N, k) are those of the same sequences, (k,) are fixed."""
    count = len(found)
    everything = torch.ones(count, dtype=torch.bool)

    def correlation(kept: Tensor) -> float:
        return spearman(predicted if predicted.ndim == 1 else predicted[kept].mean(0), found[kept].mean(0))

    others = [everything & (torch.arange(count) != i) for i in range(count)]
    return torch.tensor([correlation(kept) for kept in (everything, *others)], dtype=torch.float64)


def _jackknifed(values: Tensor) -> list[float]:
    """The first of (N + 1,) values, and the standard error from the N without one sequence each."""
    others, count = values[1:], len(values) - 1
    return [float(values[0]), math.sqrt((count - 1) / count * float((others - others.mean()).square().sum()))]
