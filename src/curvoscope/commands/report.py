"""`curvoscope report RUN`: the report of a run again, from its document and its figures."""

from pathlib import Path

from curvoscope.commands import reproduce_report, watch_report
from curvoscope.commands.document import REPORTS, write_report
from curvoscope.commands.reproduce import STORE
from curvoscope.database import RUNS, application_of
from curvoscope.report.contents import ReportError

DOCUMENTS = (
    *("table.json", "audit.json", "spectrum.json", "sensitivity.json"),
    *(watch_report.DOCUMENT, reproduce_report.DOCUMENT),
)


def run(source: Path) -> None:
    """Write report.html and report.md beside the document `source`, or the one in the directory `source`.

    The figures are the files beside the document; one that is not there is left out. Of a training run that did not
    come to its end the store is read.
    """
    path = _document(source)
    if path.name == STORE:
        watch_report.read_store(path)
    else:
        _again(path)
    for name in REPORTS:
        print(f"wrote {path.parent / name}")


def _again(path: Path) -> None:
    try:
        document = path.read_text(encoding="utf-8")
        files = {one.name: one.read_bytes() for kind in ("png", "svg") for one in path.parent.glob(f"*.{kind}")}
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError("RUN", f"cannot read {path}: {error}") from error
    write_report(path.parent, document, files)


def _document(source: Path) -> Path:
    """The document of a run, or the store of a training run that has none."""
    if source.is_file():
        return source
    found = [source / name for name in DOCUMENTS if (source / name).is_file()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise ReportError("RUN", f"{source} holds {names}; give one of the files")
    if found:
        return found[0]
    if not source.exists():
        raise ReportError("RUN", f"there is no {source}; give the directory of a run")
    store = source / STORE
    if store.is_file() and application_of(store) == RUNS:
        return store
    if store.is_file():
        raise ReportError(
            "RUN",
            f"{source} holds a store but no {reproduce_report.DOCUMENT}: the run did not finish; run its command "
            "again, its measurements are kept",
        )
    raise ReportError(
        "RUN", f"there is no {', '.join(DOCUMENTS[:-1])} or {DOCUMENTS[-1]} in {source}: no run has finished there"
    )
