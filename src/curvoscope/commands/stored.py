"""Runs on disk: the documents that a directory holds, with their figures."""

import json
from pathlib import Path

from curvoscope.commands import reproduce_report, watch_report
from curvoscope.commands.reproduce import STORE
from curvoscope.database import RUNS, application_of
from curvoscope.report.contents import Report, ReportError, report_of

DOCUMENTS = (
    *("table.json", "audit.json", "spectrum.json", "sensitivity.json"),
    *(watch_report.DOCUMENT, reproduce_report.DOCUMENT),
)


def documents(source: Path) -> list[Path]:
    """The documents of a run, at least one; of an unfinished training run, its store."""
    if source.is_file():
        return [source]
    found = [source / name for name in DOCUMENTS if (source / name).is_file()]
    if found:
        return found
    if not source.exists():
        raise ReportError("RUN", f"there is no {source}; give the directory of a run")
    store = source / STORE
    if store.is_file() and application_of(store) == RUNS:
        return [store]
    if store.is_file():
        raise ReportError(
            "RUN",
            f"{source} holds a store but no {reproduce_report.DOCUMENT}: the run did not finish; run its command "
            "again, its measurements are kept",
        )
    raise ReportError(
        "RUN", f"there is no {', '.join(DOCUMENTS[:-1])} or {DOCUMENTS[-1]} in {source}: no run has finished there"
    )


def read(path: Path) -> tuple[str, dict[str, bytes]]:
    """A document and the figures next to it; missing ones are left out."""
    try:
        document = path.read_text(encoding="utf-8")
        figures = {one.name: one.read_bytes() for kind in ("png", "svg") for one in path.parent.glob(f"*.{kind}")}
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError("RUN", f"cannot read {path}: {error}") from error
    own = _pictures(document)
    return document, figures if own is None else {name: one for name, one in figures.items() if Path(name).stem in own}


def _pictures(document: str) -> list[str] | None:
    """The names of a document's figures; None if it does not say, as in older versions."""
    try:
        facts = json.loads(document)
    except json.JSONDecodeError:
        return None  # whoever reads the document raises
    return facts.get("pictures") if isinstance(facts, dict) else None


def stored_report(path: Path) -> Report:
    """The report of a document or of the store of a training run; writes no files."""
    if path.name == STORE:
        facts, figures = watch_report.completed(watch_report.stored_facts(path))
        return report_of(json.dumps(facts), figures)
    return report_of(*read(path))
