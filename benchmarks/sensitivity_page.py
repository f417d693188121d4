"""`python -m benchmarks.sensitivity_page`: print docs/sensitivity.md, from benchmarks/sensitivity.json."""

import json
import math
from collections.abc import Iterator, Sequence

from benchmarks.sensitivity import RESULTS
from benchmarks.weight_studies import BUDGET, UNIFORM, Found

_NAMES = {"smol": "SmolLM2-135M", "minilm": "MiniLM-L6"}
_SCORES = {
    "second order": "g·d + ½ d·Hd",
    "curvature": "½ d·Hd",
    "first order": "g·d",
    "gradient": "abs(g·d)",
    "magnitude": "magnitude",
    "fisher": "diagonal Fisher",
    "inputs": "X^T X",
}
_CHANGES = (
    "int3, groups of 64",
    "int4, groups of 64",
    "half of the weights pruned",
    "2:4 pruned",
    "one head removed",
    "one layer removed",
)
_ACCEPTED = 0.1  # of the second order, for the remainder
_INTRODUCTION = """# What a change of weights costs, on trained models

[The how-to page](howto/sensitivity.md) explains how to compute these numbers. `make sensitivity` runs
`benchmarks/sensitivity.py` and writes this page from its results, `benchmarks/sensitivity.json`.

SmolLM2-135M-Instruct predicts the next token of the package's own text, in sequences of 32 tokens. The changes are to
Q, V, O, up and down of layers 1, 14 and 28, to the heads of layers 14 and 28, or to one of six layers from 2 to 27. Its
file stores weights with 4 bits, so rounding starts from rounded weights. all-MiniLM-L6-v2 finds the passage of 48
tokens to which half a passage belongs, with the cross-entropy of the cosines times 20 and the embeddings of the
passages held fixed. The changes are to the weights and heads of layers 0, 2 and 5, or to one of its six layers.

The Hessian is that of a probe: {smol[probe]} sequences of SmolLM2, or {minilm[probe]} of MiniLM, which run and count
in batches of {smol[together]} and {minilm[together]}. Other, held-out sequences come from the same text. ± is a
standard error over these batches, or over held-out sequences; differences are paired. From so few, standard errors
are themselves uncertain: by {smol_doubt:.0%} for the {smol_units} batches of SmolLM2, by {minilm_doubt:.0%} for the
{minilm_units} of MiniLM. Differences between scores of less than two standard errors are not significant.
"""
_RANKS = """
## Which score ranks the tensors?

Each tensor, head or layer is changed alone. The tables have Spearman's rank correlation of each score with the measured
change of the loss. Scores are computed on the probe; magnitude is |d|², diagonal Fisher and X^T X are as in
`cv.analysis.scores`. The last four are never negative, so they cannot tell changes that lower the loss from those that
raise it. On the probe itself:
"""
_ELSEWHERE = """
With the change measured on {smol[few]} (SmolLM2) or {minilm[few]} (MiniLM) held-out sequences, and the jackknife's
standard error over these; the scores are treated as fixed:
"""
_REACH = f"""
## How far does second order reach?

All blocks are changed together, measured on the probe. The remainder is the measured change minus first and second
order, in percent of the measured change; ¼ δ and ½ δ are shorter steps along the same line. *order* is the power
of the step with which the remainder grows from ¼ δ to ½ δ: 3 if it is of third order there. *fails beyond* is the size
of change |δ|/|w| at which a remainder of third order, as it is measured at ¼ δ, reaches {_ACCEPTED:.0%} of ½ δ·Hδ, with
an interval from two standard errors of the remainder. If it is less than the size of δ in the third column, the second
order does not describe the whole change.
"""
_PAIRS = """
Second order is the sum over single blocks and over pairs of blocks:
"""
_ALLOCATION = f"""
## Formats for a size

int3 or int4 in groups of 64 for each tensor, at most {BUDGET:g} bits per weight with the scales, a quarter of the way
from int3 to int4. The last row treats all tensors alike at the same size: int3 with a scale for {UNIFORM[1]} weights.
Costs are computed on the probe, and the change of the loss is measured on {{smol[held_out]}} (SmolLM2) or
{{minilm[held_out]}} (MiniLM) held-out sequences. The last column is the difference to the first row, paired by
sequence: positive if the first row is better.
"""
_REPAIRS = """
## Repairing with different curvatures

V and O of three layers (0, 2 and 5 of MiniLM, 1, 14 and 28 of SmolLM2) are rounded in groups of 64, or half of their
entries are pruned by magnitude. The other weights of the same tensor compensate, according to the curvature of 16
calibration sequences. All these tensors are changed together, and measured on held-out sequences. X^T X is GPTQ for
rounding, and `surgeon` with `cv.approximations.input` for pruning. TKFAC weighs the tokens of X^T X by their gradients.
KFAC repairs rounding as X^T X does, because all outputs of an input are rounded at once and the other Kronecker factor
cancels; it is listed for pruning alone. "samples" is the Gauss-Newton matrix of 48 sampled gradients, which updates the
weights six times while they are rounded, not after each input. "exact" is the Gauss-Newton matrix of the calibration
text, by products with the model: 8 steps of conjugate gradients.
"""
_COST = """
## Cost

A GPT-2 with 4 layers of width 128, 4 sequences of 64 tokens, {blocks} blocks that change, batches run whole. The unit
is one product with the Hessian: run the model, make the graph of its gradient, multiply. Processor time, medians of
three turns in one process.
"""


def page(results: Found) -> str:
    """The text of docs/sensitivity.md."""
    text = {model: results[model]["text"] for model in _NAMES}
    parts = [_INTRODUCTION.format(**text, **_doubts(text)), _missing(results)]
    columns: tuple[str, ...] = ("model", "change", "n", *_SCORES.values())
    parts += [_RANKS, _table(columns, _ranks(results, "same text")), _ahead(results)]
    parts += [
        _ELSEWHERE.format(**text),
        _table(columns, _ranks(results, "other text")),
        _means(results),
        _gains(results),
    ]
    steps = ("remainder at ¼ δ", "at ½ δ", "at δ", "order", "fails beyond")
    columns = ("model", "change", "size of δ", "measured", "predicted", *steps)
    parts += [_REACH, _table(columns, _reach(results)), _reach_in_words(results)]
    parts += [_PAIRS, _table(("model", "change", "single blocks", "interactions"), _pairs(results))]
    parts += [_ALLOCATION.format(**text)]
    columns = ("chosen by", "bits", "predicted", "measured", "more than the first")
    for model, name in _NAMES.items():
        if "allocation" in results[model]:
            parts += [f"{name}:", _table(columns, _allocations(results[model]["allocation"]))]
    parts += [_verdict(results), _REPAIRS]
    for model, name in _NAMES.items():
        columns = ("change", "curvature", "measured", "more than X^T X")
        if "repairs" in results[model]:
            parts += [f"{name}:", _table(columns, _repairs(results[model]["repairs"]))]
    costs = results["cost"]["cost"]
    labels = {
        "without_pairs": "first and second order of all blocks",
        "with_pairs": f"the same with all pairs of {costs['blocks']} blocks",
        "gradient": "gradient, with its graph",
        "next_product": "a further product with the same graph",
        "measuring_the_whole": "measuring the whole change, by forward passes",
        "measuring_each_block": "measuring each block alone, by forward passes",
        "hessian_and_product": "`cv.hessian(...) @ v`, with all that it checks first",
        "whole_ledger": "`cv.analysis.sensitivity(..., pairs=False)`, with all that it checks and measures",
    }
    rows = [(label, _number(costs[name])) for name, label in labels.items()]
    parts += [_COST.format(blocks=costs["blocks"]), _table(("", "products"), rows)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _doubts(text: dict[str, dict[str, int]]) -> dict[str, float]:
    """The units of each probe, and the relative standard error of a standard error over so many."""
    units = {model: found["probe"] // found["together"] for model, found in text.items()}
    doubts = {f"{model}_doubt": (2 * (count - 1)) ** -0.5 for model, count in units.items()}
    return doubts | {f"{model}_units": count for model, count in units.items()}


def _missing(results: Found) -> str:
    """What the results do not have."""
    parts = (*_CHANGES, "allocation", "repairs")
    missing = {name: [part for part in parts if part not in results[model]] for model, name in _NAMES.items()}
    said = [f"{name}: {', '.join(some)}" for name, some in missing.items() if some]
    return f"Not measured yet: {'; '.join(said)}." if said else ""


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
        for part in _CHANGES:
            if part in results[model]:
                yield model, part, results[model][part]


def _ranks(results: Found, text: str) -> list[list[str]]:
    table = []
    for model, part, found in changes(results):
        numbers = [found[text][score] for score in _SCORES]
        shown = [f"{value:.2f} ± {stderr:.2f}" for value, stderr in numbers]
        table.append([_NAMES[model], part, str(found["blocks"]), *shown])
    return table


def ahead(found: Found) -> list[str]:
    """Scores that rank the changes on the probe itself better than second order does."""
    known = found["same text"]
    return [_SCORES[score] for score in _SCORES if known[score][0] > known["second order"][0]]


def _ahead(results: Found) -> str:
    others = [f"{_NAMES[model]}, {part} ({', '.join(ahead(found))})" for model, part, found in changes(results)
              if ahead(found)]  # fmt: skip
    exceptions = f" but {'; '.join(others)}" if others else ""
    return f"{_SCORES['second order']} ranks best in all rows{exceptions}."


def _means(results: Found) -> str:
    tables = {text: [found[text] for _, _, found in changes(results)] for text in ("same text", "other text")}
    said = [
        f"{label} {' and '.join(_average([found[score][0] for found in rows]) for rows in tables.values())}"
        for score, label in _SCORES.items()
    ]
    return (
        f"Means over all rows of the first and of the second table: {'; '.join(said)}. The difference "
        "is what a probe of this size does not know about other text, most of all its gradient."
    )


def _gains(results: Found) -> str:
    """In how many rows second order ranks held-out changes better than another score, or worse."""
    rows = [found["second order ahead"] for _, _, found in changes(results)]
    said = []
    for score, label in _SCORES.items():
        clear = [found[score][0] for found in rows if score in found and _is_clear(found[score])]
        if score in rows[0]:
            said.append(f"{label}: {sum(gain > 0 for gain in clear)} and {sum(gain < 0 for gain in clear)}")
    return (
        f"Rows of the second table, of {len(rows)}, in which {_SCORES['second order']} ranks better, and worse, than "
        f"another score by more than two standard errors of the paired difference: {'; '.join(said)}."
    )


def _average(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f}"


def reach(found: Found) -> tuple[float, float, float]:
    """|δ|/|w| at which a remainder that grows as the third power is a tenth of ½ δ·Hδ, and its interval; NaN if
    rounding hides the remainder of the shortest step."""
    scale, _, (remainder, stderr) = found["scaled"][0]
    if abs(remainder) < 2 * found["rounding"]:
        return math.nan, math.nan, math.nan
    sizes = abs(remainder), abs(remainder) + 2 * stderr, abs(remainder) - 2 * stderr
    accepted = _ACCEPTED * abs(found["second"][0]) * scale**3 * found["size"]
    value, low, high = (accepted / size if size > 0 else math.inf for size in sizes)
    return value, low, high


def order(found: Found) -> float:
    """The power of the step with which the remainder grows between the two shortest steps; NaN if its sign changes."""
    (short, _, (less, _)), (long, _, (more, _)) = found["scaled"][:2]
    return math.log(more / less) / math.log(long / short) if less * more > 0 else math.nan


def _reach(results: Found) -> list[list[str]]:
    table = []
    for model, part, found in changes(results):
        shares = [f"{remainder[0] / measured[0]:+.0%}" for _, measured, remainder in found["scaled"]]
        power = order(found)
        shares += ["" if math.isnan(power) else f"{power:.1f}", _interval(*reach(found))]
        numbers = [_pm(found["measured"]), _pm(found["predicted"]), *shares]
        table.append([_NAMES[model], _together(part), f"{found['size']:.2f}", *numbers])
    return table


def _interval(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return ""
    end = "more" if math.isinf(high) else _number(high)
    return f"{_number(value)} ({_number(low)} to {end})"


def _reach_in_words(results: Found) -> str:
    """The changes at which second order surely fails, and how far it goes; and those at which that is not told."""
    fails, untold = [], []
    for model, part, found in changes(results):
        remainder, stderr = found["scaled"][-1][2]
        accepted, said = _ACCEPTED * abs(found["second"][0]), f"{_NAMES[model]}, {_together(part)}"
        if abs(remainder) - 2 * stderr > accepted:
            fails.append(f"{said}: beyond {_interval(*reach(found))}; the change is {found['size']:.2f}")
        else:
            untold.append(said)
    lines = [
        f"The measured remainder of the whole change is above {_ACCEPTED:.0%} of ½ δ·Hδ by more than two standard "
        "errors for these; second order fails beyond the size of change that is given:",
        "",
        *(f"- {one}." for one in fails),
    ]
    if untold:
        lines += ["", f"It cannot be distinguished from {_ACCEPTED:.0%} for {'; '.join(untold)}."]
    return "\n".join(lines)


def _pairs(results: Found) -> list[list[str]]:
    return [
        [_NAMES[model], _together(part), f"{found['single']:+.3f}", f"{found['interactions']:+.3f}"]
        for model, part, found in changes(results)
    ]


def _together(part: str) -> str:
    return part.replace("one head", "all these heads").replace("one layer", "all these layers")


def _allocations(found: Sequence[Found]) -> list[list[str]]:
    rows = [
        [one["by"], f"{one['bits']:.2f}", f"{one['predicted']:+.3f}", _pm(one["measured"]), _pm(one["more than ours"])]
        for one in found
    ]
    rows[0][-1] = ""
    return rows


def _verdict(results: Found) -> str:
    """Which choices differ from the first row by more than two standard errors."""
    lines = []
    for model, name in _NAMES.items():
        if "allocation" not in results[model]:
            continue
        found = results[model]["allocation"]
        clear = [(one["by"], *one["more than ours"]) for one in found[1:] if _is_clear(one["more than ours"])]
        worse, better = ([by for by, value, _ in clear if (value > 0) == sign] for sign in (True, False))
        names = (
            (word, " and ".join(f"*{one}*" for one in some)) for word, some in (("worse", worse), ("better", better))
        )
        said = [f"{word}: {some}" for word, some in names if some]
        lines.append(f"- {name}: {'; '.join(said) or 'no choice differs'}.")
    head = "These choices differ from the first row by more than two standard errors of the paired difference:"
    tail = "With so many rows, one or two per table may differ by chance: random choices are among them."
    return "\n".join([head, "", *lines, "", tail])


def _is_clear(estimate: Sequence[float]) -> bool:
    return abs(estimate[0]) > 2 * estimate[1]


def _repairs(found: Sequence[Found]) -> list[list[str]]:
    return [
        [
            one["change"],
            one["curvature"],
            _pm(one["measured"]),
            "" if one["curvature"] == "X^T X" else _pm(one["more than X^T X"]),
        ]
        for one in found
    ]


if __name__ == "__main__":
    print(page(json.loads(RESULTS.read_text())), end="")
