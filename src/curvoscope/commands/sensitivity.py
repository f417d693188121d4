"""`curvoscope sensitivity MODEL [CHANGED]`: what a change of the weights costs, by block and by pair of blocks."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvoscope import commands
from curvoscope.analysis import recipes
from curvoscope.analysis.allocation import Allocation, Menu, allocate, menu
from curvoscope.analysis.changes import Change, changed_state, displacement
from curvoscope.analysis.ledger import Ledger, spearman
from curvoscope.analysis.scores import scores
from curvoscope.analysis.sensitivity import measured_change, sensitivity
from curvoscope.blocks import Blocks
from curvoscope.commands.document import as_estimate, common_facts, pictures, show_files, show_subject, write_run
from curvoscope.commands.progress import work
from curvoscope.commands.subject import Request, Subject, select, subject_of
from curvoscope.errors import RangeError
from curvoscope.estimate import Estimate
from curvoscope.report import answers, model_tables
from curvoscope.report.sensitivity_figures import interaction_map, prediction_figure, ranking_figure

Recipes = dict[str, Callable[..., dict[str, Tensor]]]
ROUNDING: Recipes = {name: getattr(recipes, name) for name in ("int8", "int4", "int3", "nf4", "fp8")}
OTHERS: Recipes = {"prune_2_4": recipes.prune_2_4, "low_rank": recipes.low_rank}
_BITS = {"int3": 3, "int4": 4, "int8": 8}  # the formats for a budget
_SCALE_BITS = 16  # of each group's scale
_GROUP = 64
_SCALES = (0.25, 0.5, 1.0)
_SCORES = ("gradient", "magnitude", "fisher", "inputs")


@dataclasses.dataclass(frozen=True)
class SensitivityOptions:
    """What changes, and what is asked. The names are those of the options."""

    changed: str | None = None
    recipe: str | None = None
    group: int | None = None
    asymmetric: bool = False
    prune: float | None = None
    drop_heads: bool = False
    blocks: tuple[str, ...] = ()
    no_pairs: bool = False
    budget: float | None = None


def run(request: Request, options: SensitivityOptions, out: Path, as_json: bool) -> None:
    """Make the ledger, print it; write figures, reports and sensitivity.json into `out`."""
    change, words = _change(options)
    _check_budget(options)
    subject = subject_of(request)
    blocks = subject.blocks
    if options.drop_heads:
        blocks = blocks.select("*.attn.O").per_head()
    if options.blocks:
        blocks = select(blocks, options.blocks)
        words += f" of {', '.join(options.blocks)}"
    _check_groups(subject, options)
    commands.make_directory(out)
    data = [subject.batch]
    with work(5) as step:
        step("the ledger")
        ledger = sensitivity(
            subject.model, subject.loss, data, change, not options.no_pairs, blocks=blocks, scales=_SCALES
        )
        step("scores")
        ranks = {} if options.no_pairs else _ranks(subject, change, blocks, ledger)
        step("formats")
        formats = _Formats(subject, options) if options.budget is not None else None
        step("the figures")
        figures = _draw(ledger, words)
    facts = common_facts("sensitivity", subject, request, options, ledger.loss.value) | {
        "title": f"What a change of weights costs {request.name}",
        **answers.of_ledger(request.name, words, ledger),
        "change": words,
        "unit": ledger.units.name,
        "rounding": ledger.rounding,
        **{key: as_estimate(getattr(ledger, key)) for key in ("predicted", "measured", "remainder")},
        "rows": _rows(ledger),
        "scaled": [
            {"scale": one.scale}
            | {key: as_estimate(getattr(one, key)) for key in ("predicted", "measured", "remainder")}
            for one in ledger.scaled
        ],
        "pairs": _pairs(ledger),
        "ranks": [{"score": score, "correlation": as_estimate(value)} for score, value in ranks.items()],
        **({} if formats is None else formats.facts()),
        "missing": ["Interactions, and blocks changed alone: left out by --no-pairs."] if options.no_pairs else [],
    }
    document = write_run(out, "sensitivity.json", facts, figures)
    if as_json:
        print(document, end="")
        return
    console = commands.console()
    show_subject(console, subject, ledger.loss.value)
    console.print(facts["answer"] + "\n")
    console.print(model_tables.ledger_table(ledger))
    if ranks:
        found = ", ".join(f"{score} {value:.2f}" for score, value in ranks.items())
        console.print(f"Rank correlation with the measured change of each block alone: {found}.\n")
    if formats is not None:
        console.print(model_tables.allocation_table(formats.rows()))
    show_files(out, figures, "sensitivity.json")


def _change(options: SensitivityOptions) -> tuple[Change, str]:
    """The change that the options ask for, and its name in a sentence."""
    asked = {
        "CHANGED": options.changed is not None,
        "--recipe": options.recipe is not None,
        "--prune": options.prune is not None,
        "--drop-heads": options.drop_heads,
    }
    if sum(asked.values()) != 1:
        given = ", ".join(name for name, is_given in asked.items() if is_given) or "none"
        raise RangeError("changed", f"got {given}; give one of {', '.join(asked)}")
    if (options.group is not None or options.asymmetric) and options.recipe not in ROUNDING:
        raise RangeError("group", f"--group and --asymmetric are for --recipe {', '.join(ROUNDING)}")
    if options.changed is not None:
        return options.changed, f"Taking the weights of {options.changed}"
    if options.prune is not None:
        return partial(recipes.prune, share=options.prune), f"Pruning {options.prune:.0%} of each weight"
    if options.drop_heads:
        return recipes.drop_heads, "Removing all heads"
    name = str(options.recipe)
    known = ROUNDING | OTHERS
    if name not in known:
        raise RangeError("recipe", f"got {name!r}, expected one of {', '.join(known)}")
    settings: dict[str, Any] = {} if options.group is None else {"group": options.group}
    if options.asymmetric:
        if not name.startswith("int"):
            raise RangeError("asymmetric", f"{name} has one kind of levels; leave --asymmetric out")
        settings["symmetric"] = False
    return partial(known[name], **settings), f"{name}{f' in groups of {options.group}' if options.group else ''}"


def _bits(options: SensitivityOptions) -> dict[str, float]:
    """Bits per weight of the formats for a budget, with the scales and the zero levels of their groups."""
    group = options.group or _GROUP
    return {name: bits + (_SCALE_BITS + bits * options.asymmetric) / group for name, bits in _BITS.items()}


def _check_budget(options: SensitivityOptions) -> None:
    """Raise if no format fits, before anything is measured."""
    least = min(_bits(options).values())
    if options.budget is not None and not options.budget >= least:
        raise RangeError("budget", f"got {options.budget:g} bits, the smallest format has {least:g}")


def _check_groups(subject: Subject, options: SensitivityOptions) -> None:
    """Raise if the groups of the formats for a budget do not fit the weights, before anything is measured."""
    if options.budget is not None:
        recipes.int8(subject.model, group=options.group or _GROUP)


def _ranks(subject: Subject, change: Change, blocks: Blocks, ledger: Ledger) -> dict[str, Estimate]:
    """The rank correlation of each score with the measured change of each block alone."""
    rows = ledger.changed
    if len(rows) < 3:
        return {}
    found = scores(subject.model, subject.loss, [subject.batch], change, blocks=blocks)
    measured = {row.block: float(row.measured) for row in rows if row.measured is not None}
    ranks = {"second order": ledger.rank_correlation}
    for score in _SCORES:
        known = [row.block for row in rows if row.block in found[score]]
        if len(known) == len(rows):
            x, y = (torch.tensor([values[name] for name in known]) for values in (found[score], measured))
            ranks[score] = Estimate(spearman(x, y), 0.0, 0, "rank correlation")
    return ranks


def _moved(subject: Subject, options: SensitivityOptions, change: Change) -> Blocks:
    """The chosen blocks that a format changes."""
    delta = displacement(subject.model, changed_state(subject.model, change))
    chosen = select(subject.blocks, options.blocks)
    return Blocks(block for block in chosen.values() if bool(block.gather(delta).any()))


class _Formats:
    """Formats for a budget, chosen by several kinds of costs, each measured."""

    def __init__(self, subject: Subject, options: SensitivityOptions) -> None:
        group = options.group or _GROUP
        self._budget = float(options.budget or 0)
        symmetric = not options.asymmetric
        changes = {name: partial(ROUNDING[name], group=group, symmetric=symmetric) for name in _BITS}
        bits = _bits(options)
        data = [subject.batch]
        blocks = None if options.drop_heads or not options.blocks else _moved(subject, options, changes["int3"])
        costs = menu(
            subject.model, subject.loss, data, {name: (changes[name], bits[name]) for name in _BITS}, blocks=blocks
        )
        others = {name: scores(subject.model, subject.loss, data, changes[name], blocks=blocks) for name in _BITS}
        kinds: dict[str, Menu] = {
            "½ d·Hd with interactions": costs.without_gradient(),
            "½ d·Hd without interactions": costs.without_gradient().without_interactions(),
            "g·d + ½ d·Hd with interactions": costs,
        }
        for score in ("fisher", "inputs"):
            known = {name: found[score] for name, found in others.items()}
            if all(len(found) == len(costs.names) for found in known.values()):
                kinds[score] = costs.scored(known)
        self._found = {kind: allocate(costs_of, self._budget) for kind, costs_of in kinds.items()}
        uniform = max((name for name in _BITS if bits[name] <= self._budget), key=lambda name: bits[name])
        same = dict.fromkeys(costs.names, uniform)
        self._found[f"uniform {uniform}"] = Allocation(same, bits[uniform], costs.cost(costs.choice(same)))
        self._costs = costs
        self._measured = {
            kind: measured_change(
                subject.model, subject.loss, data, partial(recipes.mix, changes=found.changes(changes))
            )
            for kind, found in self._found.items()
        }

    def rows(self) -> list[tuple[str, float, float, Estimate]]:
        """The kind of costs, bits per weight, the change predicted to second order with interactions, the measured."""
        return [
            (kind, found.bits, self._costs.cost(self._costs.choice(found.formats)), self._measured[kind])
            for kind, found in self._found.items()
        ]

    def facts(self) -> dict[str, Any]:
        """For the document."""
        best = next(iter(self._found.values()))
        return {
            "budget": self._budget,
            "allocations": [
                {"by": kind, "bits": bits, "predicted": predicted, "measured": as_estimate(measured)}
                for kind, bits, predicted, measured in self.rows()
            ],
            "formats": [{"block": block, "format": name} for block, name in best.formats.items()],
        }


def _draw(ledger: Ledger, words: str) -> Mapping[str, bytes]:
    rows = ledger.changed
    figures = pictures("ranking", ranking_figure(rows, f"{words}: what each block contributes"))
    if ledger.units.pairs is not None:
        figures |= pictures("interactions", interaction_map(ledger, f"{words}: interactions of the blocks"))
        title = f"{words}: each block alone, predicted against measured"
        figures |= pictures("prediction", prediction_figure(rows, ledger.rounding, title))
    return figures


def _rows(ledger: Ledger) -> list[dict[str, Any]]:
    numbers = ("first", "outer", "functional", "second", "alone", "measured")
    return [
        {"block": row.block, "size": row.size, "norm": row.norm}
        | {key: value if math.isfinite(value := getattr(row, key)) else None for key in ("relative", "share")}
        | {key: as_estimate(getattr(row, key)) for key in numbers}
        for row in ledger.changed
    ]


def _pairs(ledger: Ledger) -> list[dict[str, Any]]:
    if ledger.units.pairs is None:
        return []
    names = [row.block for row in ledger.changed]
    pairs = [(row, column) for i, row in enumerate(names) for column in names[i + 1 :]]
    return [{"row": one, "column": other, "second": as_estimate(ledger.pairs[one, other])} for one, other in pairs]
