"""All pages of the gallery, from the stored results: `python -m gallery.pages` writes them again."""

from collections.abc import Mapping, Sequence
from statistics import median

from gallery.claims import (
    NORMS,
    PARTS,
    SIZE,
    VERDICTS,
    Ratio,
    heads_of,
    leading_heads,
    middle,
    outer_over_functional,
    trio_of,
    value_over_query,
)
from gallery.measure import Facts
from gallery.models import MODELS, RANDOM
from gallery.page import PAGES, claims_of, page, results_of, trained_of
from gallery.wording import counts, interval, percent, signed, table

_COSTS = ("predicted", "measured")
_UNKNOWN = "not measured"
_SAID = dict(zip(VERDICTS, ("fails in", "fails in some layers of", "is not contradicted by", "holds in"), strict=True))
_INTRODUCTION = """# Gallery: what does it mean to be a trained Transformer?

Models with trained weights, compared with the same models before training: the Gauss-Newton part of every
block from sampled backward passes (`cv.sweep`), functional parts in closed form, spectra, approximations, what int4
costs, and which claims of the papers hold. `make gallery` installs the weights or trains them from seeds, measures
again and writes these pages; the numbers are in one JSON file per model. The Mamba has no attention: its C, B and
input weight stand for query, key and value.

## In short
"""
_MODELS = """
## All models

Medians over the layers, with the medians of both ends of the intervals. Without norms: the same architecture with the
identity instead of its norms.
"""
_DETAILS = """
Of the trained weights: the share of the five leading query heads (a quarter of the heads if they are fewer) in the sum
of squared norms, with an interval from the ends of all 95 % intervals; KFAC's error, the median over chosen blocks; and
what int4 costs, to second order and measured:
"""
_CLAIMS = """
## Claims

Claims that fail come first. The interval of a median quotient consists of the medians of both ends; a quotient without
an interval is exact.
"""


def index(everything: Mapping[str, Facts]) -> str:
    """The page that leads to the others."""
    columns = ("model", "weights", "value over query", "the same without norms", "Gauss-Newton over functional, query")
    rows = [row for name, results in everything.items() for row in _stages(name, results)]
    details = ("model", "parameters", "leading heads", "KFAC's error", "int4, predicted", "int4, measured")
    parts = [
        _INTRODUCTION,
        "\n".join(f"- {answer}" for answer in answers(everything)),
        _MODELS,
        "\n".join(table(columns, rows)),
        _DETAILS,
        "\n".join(table(details, [_details(name, results) for name, results in everything.items()])),
        _CLAIMS,
        "\n".join(table(("model", "claim", "before training", "trained"), _claims(everything))),
        "\n".join(["```{toctree}", ":hidden:", "", *everything, "```"]),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def answers(everything: Mapping[str, Facts]) -> list[str]:
    """The four questions, over all models."""
    stages = {name: list(results["stages"].values()) for name, results in everything.items()}
    quotients = {name: [middle(value_over_query(facts)) for facts in some] for name, some in stages.items()}
    parts = {name: [middle(_query_parts(facts)) for facts in some] for name, some in stages.items()}
    closer = sum(some[-1].high < some[0].low for some in quotients.values())
    functional = sum(some[-1].high < 1 for some in parts.values())
    lighter = sum(some[-1].low > some[0].high for some in parts.values())
    heads = {name: leading_heads(some[-1], trio_of(some[-1])[0]) for name, some in stages.items()}
    shares = [
        f"{percent(share)} in {len(some)} of {len(heads_of(stages[name][-1], trio_of(stages[name][-1])[0]))} heads of "
        f"{_named(name)}"
        for name, (some, share) in heads.items()
        if some
    ]
    count = len(everything)
    return [
        f"**{PARTS}** In the trained query blocks it is larger than the Gauss-Newton part in {functional} of {count} "
        f"models; training makes it relatively smaller in {lighter}.",
        f"**{SIZE}** The claim {_verdicts(everything, SIZE)} Training brings the two closer in {closer} of {count} "
        "models.",
        f"**{NORMS}** That norms bring query and value closer {_verdicts(everything, NORMS)}",
        "**Which heads carry the curvature?** A few. Shares of the leading query heads in the sum of squared norms: "
        f"{'; '.join(shares)}.",
    ]


def _verdicts(everything: Mapping[str, Facts], question: str) -> str:
    """Models by their verdict on the claim that answers a question, those that fail first."""
    found: dict[str, list[str]] = {}
    for name, results in everything.items():
        for stages in claims_of(results).values():
            label, claim = list(stages.items())[-1]
            if claim.question == question:
                where = f" ({RANDOM})" if label == RANDOM else ""
                found.setdefault(claim.verdict, []).append(_named(name) + where)
    return "; ".join(f"{_SAID[verdict]} {_listed(found[verdict])}" for verdict in VERDICTS if verdict in found) + "."


def _named(name: str) -> str:
    """The title of a model inside a sentence."""
    first, _, rest = MODELS[name].title.partition(" ")
    return f"{first.lower()} {rest}" if first in ("A", "The") else MODELS[name].title


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _link(name: str) -> str:
    return f"[{MODELS[name].title}]({name}.md)"


def _query_parts(facts: Facts) -> list[Ratio]:
    return outer_over_functional(facts, trio_of(facts)[0])


def _stages(name: str, results: Facts) -> list[list[str]]:
    found = []
    for label, facts in results["stages"].items():
        bare = results.get("bare", {}).get(label)
        without = _UNKNOWN if bare is None else interval(middle(value_over_query(bare)))
        quotients = (middle(value_over_query(facts)), middle(_query_parts(facts)))
        found.append([_link(name), label, interval(quotients[0]), without, interval(quotients[1])])
    return found


def _details(name: str, results: Facts) -> list[str]:
    trained = trained_of(results)
    query = trio_of(trained)[0]
    leading, share = leading_heads(trained, query)
    heads = f"{percent(share)} in {len(leading)} of {len(heads_of(trained, query))}" if leading else "no heads"
    errors = [found["kfac"]["value"] for found in results.get("audit", {}).values() if "kfac" in found]
    costs = [signed(results["sensitivity"][key]) for key in _COSTS] if "sensitivity" in results else [_UNKNOWN] * 2
    error = f"{median(errors):.2f}" if errors else _UNKNOWN
    return [_link(name), f"{results['parameters']:,}", heads, error, *costs]


def _claims(everything: Mapping[str, Facts]) -> list[list[str]]:
    rows = []
    for name, results in everything.items():
        first, *_, last = results["stages"]
        for statement, stages in claims_of(results).items():
            rows.append([_link(name), statement, counts(stages.get(first)), counts(stages.get(last))])
    return rows


def write() -> None:
    """All pages."""
    everything = {name: results_of(name) for name in MODELS}
    for name, results in everything.items():
        (PAGES / f"{name}.md").write_text(page(name, results))
    (PAGES / "index.md").write_text(index(everything))


if __name__ == "__main__":
    write()
