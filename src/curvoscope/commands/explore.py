"""`curvoscope explore [RUN...]`: the interactive page of a layer, or of runs side by side."""

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from curvoscope import commands
from curvoscope.commands.stored import documents, stored_report
from curvoscope.errors import MissingPackageError, RangeError
from curvoscope.report.comparison import side_by_side
from curvoscope.report.contents import Report, ReportError

if TYPE_CHECKING:
    from curvoscope.explorer.server import Listening


def run(runs: Sequence[Path], output: Path | None, host: str | None, port: int, open_browser: bool) -> None:
    """Serve the page until interrupted, or write that of runs to the file `output`."""
    if output is not None and not runs:
        raise RangeError("output", f"got {output} without a run; give the directories of runs to write a page of")
    page = report_of_runs(runs).html() if runs else None
    if output is not None and page is not None:
        commands.write(output, page.encode())
        print(f"wrote {output}")
        return
    _serve(_listen(host, port, page), host, port, open_browser)


def report_of_runs(sources: Sequence[Path]) -> Report:
    """The report of a run, or of all documents of several runs side by side."""
    paths = [(source, path) for source in sources for path in documents(source)]
    names = [_name(source, path, len(documents(source)) > 1) for source, path in paths]
    known: dict[str, Report] = {}
    for (_, path), name in zip(paths, names, strict=True):
        label = name if names.count(name) == 1 else str(path)
        if label in known:
            raise ReportError("RUN", f"{path} was given twice; give each run once")
        known[label] = stored_report(path)
    return side_by_side(known) if len(known) > 1 else next(iter(known.values()))


def _name(source: Path, path: Path, several: bool) -> str:
    """The name of the directory, with that of the file if it was given or is one of several."""
    directory = path.parent.resolve().name
    return f"{directory}/{path.name}" if several or source == path else directory


def _listen(host: str | None, port: int, page: str | None) -> "Listening":
    try:
        from curvoscope.explorer import server
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(("dash", "flask", "werkzeug")):
            raise
        remedy = "pip install 'curvoscope[explore]'" + (", or write the page with --output FILE" if page else "")
        raise MissingPackageError("explore", f"needs dash: {remedy}") from error
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    return server.listen(host, port, page)


def _serve(found: "Listening", host: str | None, port: int, open_browser: bool) -> None:
    if found.token is not None:
        warning = f"warning: {host} is reachable from other machines; anyone with the link can use the page."
        Console(stderr=True).print(warning, style="yellow", soft_wrap=True)
    print(f"{found.address}\nPress Ctrl-C to stop.", flush=True)
    if port and f":{port}/" not in found.address:
        print(f"port {port} is taken; using a free one", file=sys.stderr, flush=True)
    if open_browser:
        webbrowser.open(found.address)
    with found.server as server:
        server.serve_forever()
