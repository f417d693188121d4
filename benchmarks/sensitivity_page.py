"""`python -m benchmarks.sensitivity_page`: print docs/sensitivity.md, from benchmarks/sensitivity.json."""

import json
from collections.abc import Iterator, Sequence

import torch

from benchmarks.sensitivity import BUDGET, RESULTS, Found
from curvoscope.analysis.ledger import spearman

_NAMES = {"smol": "SmolLM2-135M", "minilm": "MiniLM-L6"}
_SCORES = {
    "second order": "second order",
    "first order": "first order",
    "magnitude": "magnitude",
    "fisher": "diagonal Fisher",
    "inputs": "X^T X",
}
_INTRODUCTION = """# What a change of weights costs, on trained models

[The how-to page](howto/sensitivity.md) says how to compute these numbers. `benchmarks/sensitivity.py` measured them,
and this page is made of its results, `benchmarks/sensitivity.json`.

SmolLM2-135M-Instruct predicts the next token of the package's own text, in three sequences of 32 tokens; the ledger has
all weights of layers 1, 10, 19 and 28, or the heads of these layers. Its file stores weights with 4 bits, so rounding
starts from rounded weights. all-MiniLM-L6-v2 tells which halves of 24 tokens belong to one passage, in four batches of
four passages, with the contrastive loss that it was trained with; the ledger has all weights of its six layers. These
probes are small. ± is the standard error over sequences, or over batches for the contrastive loss; from so few of them
it is itself uncertain.

## Which score ranks the tensors?

Each tensor, or head, is changed alone. The table has Spearman's rank correlation of each score with the measured change
of the loss, and behind the bar with its absolute value, for which signs do not matter. Second order is g·d + ½ d·Hd,
first order g·d, magnitude |d|², diagonal Fisher and X^T X as in `cv.analysis.scores`; the last three are never
negative.
"""
_REACH = """
## How far does second order reach?

All blocks are changed together. |δ|/|w| is the size of the change. The remainder is the share of the measured change
that is not of first or second order; ¼ δ and ½ δ are shorter steps along the same line.
"""
_PAIRS = """
Second order is the sum over single blocks and over pairs of blocks:
"""
_ALLOCATION = f"""
## Formats for a size

all-MiniLM-L6-v2, int3, int4 or int8 for each tensor, {BUDGET:g} bits per weight in all, the scales of groups of 64
included. Costs are computed on four batches; the change of the loss is measured on eight others. The last column is the
difference to the first row, paired by batch.
"""
_REPAIR = """
## Repair

SmolLM2-135M-Instruct, half of the weights of one tensor pruned by magnitude, the other half updated by `surgeon` with
three curvatures, from three sequences of 32 tokens, with 15 steps of conjugate gradients and the damping of GPTQ. The
change of the loss:
"""
_COST = """
## Cost

A GPT-2 with 4 layers of width 128, 4 sequences of 64 tokens, {blocks} blocks that change, batches run whole. Times are
in products with the whole Hessian, medians of three turns in one process:
"""


def page(results: Found) -> str:
    """The text of docs/sensitivity.md."""
    columns = ("model", "change", "blocks", *_SCORES.values())
    parts = [_INTRODUCTION, _table(columns, _ranks(results))]
    columns = ("model", "change", "size of δ", "measured", "predicted", "remainder at ¼ δ", "at ½ δ", "at δ")
    parts += [_REACH, _table(columns, _reach(results))]
    parts += [_PAIRS, _table(("model", "change", "single blocks", "interactions"), _pairs(results))]
    columns = ("chosen by", "bits", "predicted", "measured", "more than the first")
    parts += [_ALLOCATION, _table(columns, _allocations(results["minilm"]["allocation"]))]
    columns = ("tensor", "repaired by", "on the same text", "on 16 other sequences")
    parts += [_REPAIR, _table(columns, _repairs(results["smol"]["repair"]))]
    costs = results["cost"]["cost"]
    labels = {
        "without_pairs": "ledger without pairs",
        "with_pairs": f"ledger with all pairs of {costs['blocks']} blocks",
        "measuring_the_whole": "measuring the whole change, by forward passes",
        "measuring_each_block": "measuring each block alone, by forward passes",
    }
    rows = [(label, _number(costs[name])) for name, label in labels.items()]
    parts += [_COST.format(blocks=costs["blocks"]), _table(("", "products"), rows)]
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.0f}"


def _pm(estimate: Sequence[float]) -> str:
    value, stderr = estimate
    return f"{value:+.3f} ± {stderr:.3f}"


def changes(results: Found) -> Iterator[tuple[str, str, Found]]:
    """Model, change and its numbers."""
    for model in _NAMES:
        for part, found in results[model].items():
            if "rows" in found:
                yield model, part, found


def correlations(found: Found) -> dict[str, tuple[float, float]]:
    """The rank correlation of each score with the measured change, and with its absolute value."""
    rows = {score: torch.tensor(values, dtype=torch.float64) for score, values in found["rows"].items()}
    measured = rows.pop("measured")
    return {
        score: (spearman(values, measured), spearman(values.abs(), measured.abs())) for score, values in rows.items()
    }


def _ranks(results: Found) -> list[list[str]]:
    table = []
    for model, part, found in changes(results):
        ranks = {score: f"{one:.2f} \\| {size:.2f}" for score, (one, size) in correlations(found).items()}
        count = str(len(found["rows"]["measured"]))
        table.append([_NAMES[model], part, count, *(ranks[score] for score in _SCORES)])
    return table


def _reach(results: Found) -> list[list[str]]:
    table = []
    for model, part, found in changes(results):
        shares = [share for _, share in found["scaled"]] + [found["remainder"][0] / found["measured"][0]]
        numbers = [_pm(found["measured"]), _pm(found["predicted"]), *(f"{share:+.0%}" for share in shares)]
        table.append([_NAMES[model], _together(part), f"{found['size']:.2f} of w", *numbers])
    return table


def _pairs(results: Found) -> list[list[str]]:
    return [
        [_NAMES[model], _together(part), f"{found['single']:+.3f}", f"{found['interactions']:+.3f}"]
        for model, part, found in changes(results)
    ]


def _together(part: str) -> str:
    return part.replace("one head", "all these heads")


def _allocations(found: Sequence[Found]) -> list[list[str]]:
    rows = [
        [one["by"], f"{one['bits']:.2f}", f"{one['predicted']:+.3f}", _pm(one["measured"]), _pm(one["more than ours"])]
        for one in found
    ]
    rows[0][-1] = ""
    return rows


def _repairs(found: Sequence[Found]) -> list[list[str]]:
    changes_by_text: dict[tuple[str, str], dict[str, str]] = {}
    for one in found:
        changes_by_text.setdefault((one["block"], one["repaired by"]), {})[one["measured on"]] = _pm(one["change"])
    return [[*names, texts["same text"], texts["other text"]] for names, texts in changes_by_text.items()]


if __name__ == "__main__":
    print(page(json.loads(RESULTS.read_text())), end="")
