"""The page of one model, from its stored results."""

import json
from pathlib import Path
from statistics import median

from curvoscope.report.audit_figures import role_of
from gallery.claims import (
    WORDS,
    Claim,
    by_verdict,
    claims,
    heads_of,
    leading_heads,
    middle,
    outer_over_functional,
    spreads,
    trio_of,
    value_over_query,
)
from gallery.measure import APPROXIMATIONS, Facts
from gallery.models import MODELS, RANDOM, GalleryModel
from gallery.wording import counts, interval, percent, plus_minus, short, signed, table

PAGES = Path(__file__).parents[1] / "docs" / "gallery"
FIGURES = {
    "ratios": "Norm of the {value} block over that of the {query} block, by layer, with intervals, one line per set of "
    "weights. Below the line at 1 the claim fails.",
    "parts": "Norms of the Gauss-Newton and of the functional part of the {query} and the {key} block, by layer, "
    "trained weights.",
    "depth": "Norm and effective rank of the Gauss-Newton part of each role by layer, trained weights.",
    "pairs": "Norms of the Gauss-Newton part for all pairs of blocks, trained weights; grey: zero within the error.",
    "heads": "Norm of the Gauss-Newton part of each head, trained weights.",
    "spectra": "Spectral densities of chosen blocks of the whole Hessian, trained weights.",
    "audit": "Error of each approximation of chosen blocks, by layer, one line per role, with standard errors.",
    "sensitivity": "What rounding each tensor to int4 contributes to the loss: first order, outer and functional part.",
}
_LARGEST = 8
_COSTLY = 5  # tensors
_STUDIED = ("smollm2", "minilm")  # on docs/audit.md and docs/sensitivity.md


def results_of(name: str) -> Facts:
    """The stored results of a model."""
    found: Facts = json.loads((PAGES / f"{name}.json").read_text())
    return found


def trained_of(results: Facts) -> Facts:
    """The numbers of the trained weights."""
    found: Facts = list(results["stages"].values())[-1]
    return found


def page(name: str, results: Facts) -> str:
    """The page of one model."""
    trained = trained_of(results)
    found = claims_of(results)
    parts = [
        [f"# {MODELS[name].title}"],
        verdicts(found),
        ["## What was measured", "", _about(MODELS[name], results)],
        ["## Claims", "", *_claim_table(found, results)],
        [_functional_words(trained)],
        [f"## {_capital(_word(trained, 2))} over {_word(trained, 0)} by depth", "", _figure(name, "ratios", trained)],
        _depths(results),
        ["## Outer against functional part", "", _parts_words(trained), "", _figure(name, "parts", trained)],
        ["## Does normalisation equalise?", "", *_equalised(results)],
        ["## Norms and effective ranks by depth", "", _figure(name, "depth", trained), "", *_largest(trained)],
        ["## All pairs of blocks", "", _figure(name, "pairs", trained)],
        ["## Heads", "", *_heads(name, trained)],
    ]
    details = {
        "spectra": ("Spectra of chosen blocks", _spectra),
        "audit": ("Approximations, audited", _audit),
        "sensitivity": ("Sensitivity by tensor", _sensitivity),
    }
    for key, (title, lines) in details.items():
        if key in results:
            parts.append([f"## {title}", "", *lines(name, results), "", _figure(name, key, trained)])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def claims_of(results: Facts) -> dict[str, dict[str, Claim]]:
    """By statement and stage; those that fail at the trained weights, or wherever they were measured, come first."""
    found: dict[str, dict[str, Claim]] = {}
    for label, facts in results["stages"].items():
        for claim in claims(facts, results.get("bare", {}).get(label)):
            found.setdefault(claim.statement, {})[label] = claim
    order = by_verdict(list(stages.values())[-1] for stages in found.values())
    return {claim.statement: found[claim.statement] for claim in order}


def verdicts(found: dict[str, dict[str, Claim]]) -> list[str]:
    """What fails comes first."""
    lines = []
    for statement, stages in found.items():
        label, claim = list(stages.items())[-1]
        said, count = [f"- *{statement}*"], len(claim.ratios)
        found = f"holds in {len(claim.holds)} of {count} layers"
        if claim.fails:
            found = f"**fails in {len(claim.fails)} of {count} layers**, holds in {len(claim.holds)}"
        said.append(f"{'At random weights, it' if label == RANDOM else 'It'} {found}.")
        least, most = (pick(claim.ratios, key=lambda ratio: ratio.value) for pick in (min, max))
        ends = f"from {short(least.value)} in {least.layer} to {short(most.value)} in {most.layer}"
        lines.append(" ".join([*said, f"Quotient: median {interval(middle(claim.ratios))}, {ends}."]))
    return lines


def _capital(word: str) -> str:
    return word[:1].upper() + word[1:]


def _word(facts: Facts, place: int) -> str:
    return WORDS[trio_of(facts)[place]]


def caption(key: str, facts: Facts) -> str:
    """Of a figure."""
    return FIGURES[key].format(query=_word(facts, 0), key=_word(facts, 1), value=_word(facts, 2))


def _figure(name: str, key: str, facts: Facts) -> str:
    return f"![{caption(key, facts)}]({name}-{key}.png)"


def _about(model: GalleryModel, results: Facts) -> str:
    losses = [f"{label}: loss {one['loss']:.4g}, {one['samples']} samples" for label, one in results["stages"].items()]
    trained = trained_of(results)
    place = "the output of their attention layer" if trained["split"] == "layer" else "the model's output as well"
    return (
        f"{model.about} {results['parameters']:,} parameters, {len(trained['blocks'])} blocks (weights, embeddings and "
        f"norms, no biases). {_capital('; '.join(losses))}. Gauss-Newton parts are sampled (`cv.sweep`) and split at "
        f"the model's output, functional parts at {place}. Norms are Frobenius norms."
    )


def _claim_table(found: dict[str, dict[str, Claim]], results: Facts) -> list[str]:
    rows = [
        [statement, next(iter(stages.values())).source, *(counts(stages.get(label)) for label in results["stages"])]
        for statement, stages in found.items()
    ]
    said = (
        "A claim holds or fails in a layer if the whole interval of the quotient, from the ends of both 95 % "
        "intervals, is on one side of 1. The intervals of medians are the medians of their ends; a "
        "quotient without an interval is exact."
    )
    return [said, "", *table(["claim", "source", *results["stages"]], rows)]


def _functional_words(facts: Facts) -> str:
    if facts["split"] == "model":
        return (
            "There is no closed form for a state space here: functional parts are estimated by products with the "
            "Hessian, and their standard errors are in the intervals."
        )
    values = [numbers["value"] for name, numbers in facts["functional"].items() if role_of(name) == "attn.V"]
    return (
        "Functional parts are exact. That of a value block is zero at this split: an attention layer is linear in its "
        f"value weight; the closed form gives {max(values):.2g} at most, in all {len(values)} layers."
    )


def _depths(results: Facts) -> list[str]:
    columns = {label: {one.layer: one for one in value_over_query(facts)} for label, facts in results["stages"].items()}
    layers = list(columns.values())[-1]
    rows = [[layer, *(interval(column[layer]) for column in columns.values())] for layer in layers]
    return table(["layer", *columns], rows)


def _parts_words(facts: Facts) -> str:
    medians = ((WORDS[role], middle(outer_over_functional(facts, role))) for role in trio_of(facts)[:2])
    said = ", ".join(f"{word} {interval(one)}" for word, one in medians)
    return f"Gauss-Newton over functional part, medians over the layers: {said}."


def _equalised(results: Facts) -> list[str]:
    """Value over query with norms and without, and how far apart the linear weights of a layer are."""
    value, query = (_word(trained_of(results), place) for place in (2, 0))
    rows = []
    for label, facts in results["stages"].items():
        bare = results.get("bare", {}).get(label)
        without = ("", "not measured") if bare is None else _without(bare)
        quotient, spread = (interval(middle(found)) for found in (value_over_query(facts), spreads(facts)))
        rows.append([label, f"{facts['loss']:.3g}", quotient, *without, spread])
    columns = ["weights", "loss", f"{value} over {query}", "loss without norms", "the same without norms"]
    columns.append("largest over smallest block of a layer")
    lines = [
        "Medians over the layers. Without norms: the same architecture with the identity instead of its norms, "
        "with the same random weights, or trained in the same way. The last column has the largest norm over the "
        "smallest one among the linear weights of a layer: how unequal they still are with norms.",
        "",
        *table(columns, rows),
    ]
    if len(results.get("bare", {})) < len(results["stages"]):
        lines += ["", "Trained weights are not measured without their norms: they were trained with them."]
    return lines


def _without(bare: Facts) -> tuple[str, str]:
    """Loss, and value over query, of a model without norms."""
    return f"{bare['loss']:.3g}", interval(middle(value_over_query(bare)))


def _largest(facts: Facts) -> list[str]:
    blocks = facts["blocks"]
    order = sorted(blocks, key=lambda name: -blocks[name]["norm"]["value"])[:_LARGEST]
    rows = [
        [
            name,
            " x ".join(map(str, blocks[name]["shape"])),
            *(plus_minus(blocks[name][key]) for key in ("norm", "trace", "effective_rank")),
        ]
        for name in order
    ]
    columns = ("block", "shape", "norm", "trace", "effective rank")
    return [f"The {len(order)} largest of {len(blocks)} blocks:", "", *table(columns, rows)]


def _heads(name: str, facts: Facts) -> list[str]:
    lines = []
    for role in trio_of(facts):
        heads = heads_of(facts, role)
        leading, share = leading_heads(facts, role)
        norms = [f"{head} ({plus_minus(facts['heads'][head], 2)})" for head in leading]
        if leading:
            lines.append(
                f"- {len(leading)} of {len(heads)} {WORDS[role]} heads hold {percent(share)} of the sum of squared "
                f"norms: {', '.join(norms)}."
            )
    if not lines:
        return ["A state space of this kind has no heads."]
    return [*lines, "", _figure(name, "heads", facts)]


def _spectra(name: str, results: Facts) -> list[str]:
    rows = [
        [
            block,
            str(one["size"]),
            plus_minus(one["largest"]),
            plus_minus(one["smallest"]),
            f"{one['negative']['value']:.1%}",
            f"{one['near_zero']['value']:.1%}",
        ]
        for block, one in results["spectra"].items()
    ]
    products = max(one["products"] for one in results["spectra"].values())
    columns = ("block", "size", "largest eigenvalue", "smallest", "negative", "near zero")
    said = (
        f"Blocks of the whole Hessian, Gauss-Newton and functional part together, from {products} products each. "
        "*Near zero*: the share of eigenvalues too small for their sign to be known."
    )
    return [said, "", *table(columns, rows)]


def _audit(name: str, results: Facts) -> list[str]:
    rows = [
        [block, *(plus_minus(errors[one], 2) if one in errors else "" for one in APPROXIMATIONS)]
        for block, errors in results["audit"].items()
    ]
    return [
        "|H - sA| / |H| in the Frobenius norm at the best number s, with H the Gauss-Newton part of a block and A an "
        f"approximation made of one half of {MODELS[name].samples:,} samples and measured on the other half."
        + (" [More blocks and approximations](../audit.md)." if name in _STUDIED else ""),
        "",
        *table(("block", *APPROXIMATIONS), rows),
    ]


def _sensitivity(name: str, results: Facts) -> list[str]:
    found = results["sensitivity"]
    tensors = found["tensors"]
    second = sum(one["second"]["value"] for one in tensors.values())
    functional = sum(one["functional"]["value"] for one in tensors.values())
    order = sorted(tensors, key=lambda name: -abs(tensors[name]["first"]["value"] + tensors[name]["second"]["value"]))
    rows = [
        [
            name,
            short(tensors[name]["relative"]),
            *(signed(tensors[name][key]) for key in ("first", "outer", "functional")),
        ]
        for name in order[:_COSTLY]
    ]
    sizes = median(one["relative"] for one in tensors.values())
    return [
        f"int4 in groups of {found['group']} in all {len(tensors)} linear weights of the layers, a median "
        f"change of {short(sizes)} of a weight's norm: predicted {signed(found['predicted'])} to second order, "
        f"measured {signed(found['measured'])}, remainder {signed(found['remainder'])}. Of the second order, "
        f"{second:+.2g}, the functional part is {functional:+.2g}."
        + (" [Other changes, and text that was held out](../sensitivity.md)." if name in _STUDIED else ""),
        "",
        f"The {len(rows)} tensors with the largest contributions, interactions with the others included:",
        "",
        *table(("tensor", "size of change", "first order", "second, outer", "second, functional"), rows),
    ]
