"""The measurements of a page, one part after the other: numbers and figures of each."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from curvoscope.report import answers
from curvoscope.report.audit_figures import depth_figure
from curvoscope.report.density_figures import density_figure, headline_of
from curvoscope.report.sensitivity_figures import ranking_figure
from curvoscope.report.sweep_figures import depth_profile, head_map, norm_map
from gallery import measure
from gallery.exhibit import Exhibit
from gallery.models import MODELS

Measured = tuple[Any, dict[str, Figure]]  # numbers for JSON, and figures


class Part(NamedTuple):
    """One part of the results: the keys under which they have it, and how it is measured."""

    keys: tuple[str, ...]
    measure: Callable[[], Measured]


@lru_cache(maxsize=1)
def _loaded(name: str, kind: str, label: str) -> Exhibit:
    """The last one stays for the next part: loading takes long."""
    exhibit: Exhibit = getattr(MODELS[name], kind)[label]()
    return exhibit


def parts_of_page(name: str) -> Iterator[Part]:
    """All parts of a model."""
    model = MODELS[name]
    for label in model.stages:
        yield Part(("stages", label), partial(_stage, name, label))
    details = {"parameters": _parameters, "sensitivity": _sensitivity, "audit": _audit, "spectra": _spectra}
    for key, make in details.items():
        yield Part((key,), partial(make, name, list(model.stages)[-1]))
    for label in model.bare:
        yield Part(("bare", label), partial(_bare, name, label))


def _bare(name: str, label: str) -> Measured:
    return measure.bare_facts(_loaded(name, "bare", label)), {}


def _stage(name: str, label: str) -> Measured:
    exhibit = _loaded(name, "stages", label)
    sweep = measure.swept(exhibit)
    facts = measure.facts_of(exhibit, sweep)
    if label != list(MODELS[name].stages)[-1]:
        return facts, {}
    sizes = [(block, float(sweep.frobenius_norm(block))) for block in sweep.names]
    figures = {"depth": depth_profile(sweep), "pairs": norm_map(sweep, answers.largest_block(sizes))}
    return facts, figures | ({"heads": head_map(sweep)} if facts["heads"] else {})


def _parameters(name: str, label: str) -> Measured:
    return measure.parameters(_loaded(name, "stages", label).model), {}


def _spectra(name: str, label: str) -> Measured:
    found = measure.found_spectra(_loaded(name, "stages", label), MODELS[name].chosen, MODELS[name].matvecs)
    return measure.spectrum_facts(found), {"spectra": density_figure(found, headline_of(found))}


def _audit(name: str, label: str) -> Measured:
    table = measure.audited(_loaded(name, "stages", label), MODELS[name].chosen, MODELS[name].samples)
    return measure.audit_facts(table), {"audit": depth_figure(table)}


def _sensitivity(name: str, label: str) -> Measured:
    ledger = measure.ledger_of(_loaded(name, "stages", label))
    title = f"int4 in all {len(ledger.changed)} linear weights of the layers: the largest costs"
    return measure.ledger_facts(ledger), {"sensitivity": ranking_figure(ledger.changed, title)}
