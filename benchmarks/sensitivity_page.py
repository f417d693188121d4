"""`python -m benchmarks.sensitivity_page`: print docs/sensitivity.md, from benchmarks/sensitivity.json."""

import json
from collections.abc import Iterator, Sequence

from benchmarks.sensitivity import BUDGET, RESULTS, Found

_NAMES = {"smol": "SmolLM2-135M", "minilm": "MiniLM-L6"}
_SCORES = {
    "first order": "g·d",
    "gradient": "abs(g·d)",
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
four passages, with a contrastive loss; the ledger has all weights of its six layers. These probes are small. ± is the
standard error over sequences, or over batches for the contrastive loss; from so few of them it is itself uncertain.

## Which score ranks the tensors?

Each tensor, or head, is changed alone. The table has Spearman's rank correlation of each score with the measured change
of the loss. Second order is g·d + ½ d·Hd, with the jackknife's standard error over sequences or batches; magnitude is
|d|², diagonal Fisher and X^T X are as in `cv.analysis.scores`. The last four scores are never negative, so they cannot
rank changes that lower the loss, of which there are many. g·d was not ranked for MiniLM.
"""
_REACH = """
## How far does second order reach?

All blocks are changed together. |δ|/|w| is the size of the change. The remainder is the share of the measured change
that is not of first or second order; ¼ δ and ½ δ are shorter steps along the same line. Second order ends where the
remainder does: read each row up to the step at which it exceeds the error that you accept.
"""
_PAIRS = """
Second order is the sum over single blocks and over pairs of blocks:
"""
_ALLOCATION = f"""
## Formats for a size

all-MiniLM-L6-v2, int3, int4 or int8 for each tensor, {BUDGET:g} bits per weight in all, the scales of groups of 64
included. Costs are computed on four batches, and there the prediction is made; the change of the loss is measured on
eight others. The last column is the difference to the first row, paired by batch.
"""
_FORMATS = """
On these eight batches no choice differs from the first by more than two standard errors: this probe is too small to
tell them apart. The gain that the first row predicts on its four batches does not carry over to the others. Choose
formats on more data, or leave out the gradient with `menu.without_gradient()`, which was not measured here.
"""
_COST = """
## Cost

A GPT-2 with 4 layers of width 128, 4 sequences of 64 tokens, {blocks} blocks that change, batches run whole. Times are
in products with the whole Hessian, medians of three turns in one process:
"""


def page(results: Found) -> str:
    """The text of docs/sensitivity.md."""
    columns = ("model", "change", "blocks", "second order", *_SCORES.values())
    parts = [_INTRODUCTION, _table(columns, _ranks(results))]
    columns = ("model", "change", "size of δ", "measured", "predicted", "remainder at ¼ δ", "at ½ δ", "at δ")
    parts += [_REACH, _table(columns, _reach(results))]
    parts += [_PAIRS, _table(("model", "change", "single blocks", "interactions"), _pairs(results))]
    columns = ("chosen by", "bits", "predicted", "measured", "more than the first")
    parts += [_ALLOCATION, _table(columns, _allocations(results["minilm"]["allocation"])), _FORMATS]
    costs = results["cost"]["cost"]
    labels = {
        "without_pairs": "ledger without pairs",
        "with_pairs": f"ledger with all pairs of {costs['blocks']} blocks",
        "measuring_the_whole": "measuring the whole change, by forward passes",
        "measuring_each_block": "measuring each block alone, by forward passes",
    }
    rows = [(label, _number(costs[name])) for name, label in labels.items()]
    parts += [_COST.format(blocks=costs["blocks"]), _table(("", "products"), rows)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


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
            if "ranks" in found:
                yield model, part, found


def _ranks(results: Found) -> list[list[str]]:
    table = []
    for model, part, found in changes(results):
        value, stderr = found["rank correlation"]
        others = [f"{found['ranks'][score]:.2f}" if score in found["ranks"] else "" for score in _SCORES]
        table.append([_NAMES[model], part, str(found["blocks"]), f"{value:.3f} ± {stderr:.3f}", *others])
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


if __name__ == "__main__":
    print(page(json.loads(RESULTS.read_text())), end="")
