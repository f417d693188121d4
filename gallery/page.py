"""The pages of the gallery, from the stored results: `python -m gallery.page` writes them again."""

import json
from pathlib import Path
from typing import Any

from gallery.claims import Claim, Ratio, claims, leading_heads, value_over_query
from gallery.models import MODELS, GalleryModel

PAGES = Path(__file__).parents[1] / "docs" / "gallery"
FIGURES = {
    "ratios": "Norm of the value block over that of the query block, by layer, with intervals: trained and random "
    "weights. Below the line the claim fails.",
    "depth": "Norm and effective rank of the Gauss-Newton part of each role by layer, trained weights.",
    "pairs": "Norms of the Gauss-Newton part for all pairs of blocks, trained weights; grey: not told from zero.",
    "heads": "Norm of the Gauss-Newton part of each head, trained weights.",
}
_LARGEST = 8
Facts = dict[str, Any]


def results_of(name: str) -> Facts:
    """The stored results of a model."""
    found: Facts = json.loads((PAGES / f"{name}.json").read_text())
    return found


def page(name: str, results: Facts) -> str:
    """The page of one model."""
    model, trained, random = MODELS[name], results["trained"], results["random"]
    found, others = claims(trained), {claim.statement: claim for claim in claims(random)}
    lines = [f"# {model.title}", "", *_verdicts(found), "", "## What was measured", "", _about(model, results), ""]
    lines += [
        "## Claims",
        "",
        "A claim holds or fails in a layer if the whole interval of the quotient, from the ends of both 95 % "
        "intervals, is on one side of 1.",
        "",
        "| claim | source | trained | random weights |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {claim.statement} | {claim.source} | {_counts(claim)} | {_counts(others.get(claim.statement))} |"
        for claim in found
    ]
    lines += [
        "",
        _functional_words(trained),
        "",
        "## Value over query by depth",
        "",
        f"![{FIGURES['ratios']}]({name}-ratios.png)",
    ]
    lines += ["", "| layer | trained | random weights |", "| --- | --- | --- |"]
    twins = {ratio.layer: ratio for ratio in value_over_query(random)}
    lines += [
        f"| {one.layer} | {_interval(one)} | {_interval(twins[one.layer])} |" for one in value_over_query(trained)
    ]
    lines += ["", "## Norms and effective ranks by depth", "", f"![{FIGURES['depth']}]({name}-depth.png)"]
    lines += ["", *_largest(trained), "", "## All pairs of blocks", "", f"![{FIGURES['pairs']}]({name}-pairs.png)"]
    lines += ["", "## Heads", "", *_heads(trained), "", f"![{FIGURES['heads']}]({name}-heads.png)", ""]
    return "\n".join(lines)


def index(everything: dict[str, Facts]) -> str:
    """The page that leads to the others."""
    lines = [
        "# Gallery",
        "",
        "What does it mean to be a *trained* Transformer? Models with trained weights and, beside them, the same "
        "models with random weights: the Gauss-Newton part of every block from sampled backward passes (`cv.sweep`), "
        "functional parts in closed form, and which claims of the papers hold on them. `make gallery` installs the "
        "weights, measures again and writes these pages; the numbers are in one JSON file per model.",
        "",
        "| model | claim | trained | random weights |",
        "| --- | --- | --- | --- |",
    ]
    for name, results in everything.items():
        others = {claim.statement: claim for claim in claims(results["random"])}
        for claim in claims(results["trained"]):
            twin = others.get(claim.statement)
            lines.append(
                f"| [{MODELS[name].title}]({name}.md) | {claim.statement} | {_counts(claim)} | {_counts(twin)} |"
            )
    lines += ["", "```{toctree}", ":hidden:", "", *everything, "```", ""]
    return "\n".join(lines)


def _verdicts(found: list[Claim]) -> list[str]:
    """What fails comes first."""
    lines = []
    for claim in found:
        said, count = [f"- {claim.statement}"], len(claim.ratios)
        if claim.fails:
            some = ", ".join(f"{ratio.layer} ({_short(ratio.value)})" for ratio in claim.fails)
            said.append(f"**Fails in {len(claim.fails)} of {count} layers**: {some}.")
        said.append(f"Holds in {len(claim.holds)} of {count} layers.")
        lines.append(" ".join([*said, f"Quotient of the two norms: median {_short(claim.middle)}, {_ends(claim)}."]))
    return lines


def _ends(claim: Claim) -> str:
    least, most = (pick(claim.ratios, key=lambda ratio: ratio.value) for pick in (min, max))
    return f"from {_short(least.value)} in {least.layer} to {_short(most.value)} in {most.layer}"


def _short(value: float) -> str:
    """Two digits, and no power of ten for what is large."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 100 else f"{value:.2g}"


def _counts(claim: Claim | None) -> str:
    if claim is None:
        return "not measured"
    counts = f"holds in {len(claim.holds)} of {len(claim.ratios)} layers"
    if claim.fails:
        counts = f"**fails in {len(claim.fails)}**, {counts}"
    return f"{counts}; median quotient {_short(claim.middle)}"


def _about(model: GalleryModel, results: Facts) -> str:
    trained, random = results["trained"], results["random"]
    return (
        f"{model.about} {results['parameters']:,} parameters, {len(trained['blocks'])} blocks (weights, embeddings and"
        f" norms, no biases). Trained weights: loss {trained['loss']:.4g}, {trained['samples']} samples; random "
        f"weights: loss {random['loss']:.4g}, {random['samples']} samples. Gauss-Newton parts are split at the model's"
        " output, functional parts at the output of their attention layer. Norms are Frobenius norms."
    )


def _functional_words(facts: Facts) -> str:
    values = [numbers["value"] for name, numbers in facts["functional"].items() if name.endswith(".attn.V")]
    said = (
        "The functional part of a value block is zero at this split: an attention layer is linear in its value weight"
    )
    return (
        f"{said}; the closed form gives {max(values):.2g} at most, in all {len(values)} layers."
        if values
        else f"{said}."
    )


def _interval(ratio: Ratio) -> str:
    mark = "**" if ratio.high < 1 else ""
    return f"{mark}{_short(ratio.value)}{mark} ({_short(ratio.low)} to {_short(ratio.high)})"


def _largest(facts: Facts) -> list[str]:
    blocks = facts["blocks"]
    order = sorted(blocks, key=lambda name: -blocks[name]["norm"]["value"])[:_LARGEST]
    lines = [
        f"The {_LARGEST} largest of {len(blocks)} blocks:",
        "",
        "| block | shape | norm | trace | effective rank |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in order:
        numbers = blocks[name]
        shape = " x ".join(map(str, numbers["shape"]))
        cells = (
            f"{numbers[key]['value']:.3g} ± {numbers[key]['stderr']:.1g}" for key in ("norm", "trace", "effective_rank")
        )
        lines.append(f"| {name} | {shape} | {' | '.join(cells)} |")
    return lines


def _heads(facts: Facts) -> list[str]:
    lines = []
    for role, word in (("Q", "query"), ("K", "key"), ("V", "value")):
        leading, share = leading_heads(facts, role)
        if leading:
            count = sum(f".attn.{role}." in name for name in facts["heads"])
            lines.append(
                f"- {len(leading)} of {count} {word} heads hold {share:.0%} of the sum of squared norms: "
                f"{', '.join(leading)}."
            )
    return lines


def write() -> None:
    """All pages."""
    everything = {name: results_of(name) for name in MODELS}
    for name, results in everything.items():
        (PAGES / f"{name}.md").write_text(page(name, results))
    (PAGES / "index.md").write_text(index(everything))


if __name__ == "__main__":
    write()
