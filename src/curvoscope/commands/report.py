"""`curvoscope report RUN`: the report of a run again, from its document and its figures."""

from pathlib import Path

from curvoscope.commands import watch_report
from curvoscope.commands.document import REPORTS, write_report
from curvoscope.commands.reproduce import STORE
from curvoscope.commands.stored import documents, read
from curvoscope.report.contents import ReportError


def run(source: Path) -> None:
    """Write report.html and report.md next to the document `source`, or to the one in the directory `source`.

    The figures are the files beside the document; one that is not there is left out. Of a training run that did not
    come to its end the store is read.
    """
    found = documents(source)
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise ReportError("RUN", f"{source} holds {names}; give one of the files")
    (path,) = found
    if path.name == STORE:
        watch_report.write_report(path.parent, watch_report.stored_facts(path))
    else:
        write_report(path.parent, *read(path))
    for name in REPORTS:
        print(f"wrote {path.parent / name}")
