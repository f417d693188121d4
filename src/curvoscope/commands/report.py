"""`curvoscope report RUN`: the report of a finished run of analyze or spectrum, from its document and its figures."""

from pathlib import Path

from curvoscope.commands.document import REPORTS, write_report
from curvoscope.report.contents import ReportError

DOCUMENTS = ("table.json", "spectrum.json")


def run(source: Path) -> None:
    """Write report.html and report.md beside the document `source`, or the one in the directory `source`.

    The figures are the PNG files beside the document; one that is not there is left out.
    """
    path = _document(source)
    try:
        document = path.read_text(encoding="utf-8")
        figures = {figure.name: figure.read_bytes() for figure in path.parent.glob("*.png")}
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError("RUN", f"cannot read {path}: {error}") from error
    write_report(path.parent, document, figures)
    for name in REPORTS:
        print(f"wrote {path.parent / name}")


def _document(source: Path) -> Path:
    if source.is_file():
        return source
    found = [source / name for name in DOCUMENTS if (source / name).is_file()]
    if len(found) == 2:
        raise ReportError("RUN", f"{source} holds {' and '.join(DOCUMENTS)}; give one of the two files")
    if not found:
        raise ReportError("RUN", f"there is no {' or '.join(DOCUMENTS)} in {source}; give the directory of a run")
    return found[0]
