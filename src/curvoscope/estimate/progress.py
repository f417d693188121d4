"""A progress bar for what takes longer than a second: on a terminal or in a notebook, gone when done."""

import html
import sys
import time
from typing import Any, Protocol

from curvoscope.settings import current

_PATIENCE = 1.0  # seconds without a bar
_PAUSE = 0.1  # seconds from one picture of a notebook's bar to the next


class Ticker:
    """Counts work done towards `total` (None: not known), and shows it once it has taken more than a second."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label, self._total = label, total
        self._start = time.monotonic()
        self._done = 0
        self._bar: _Bar | None = None

    def advance(self, amount: int) -> None:
        """`amount` more units are done."""
        self._done += amount
        if self._bar is None and current().progress and time.monotonic() - self._start >= _PATIENCE:
            if _in_notebook():
                self._bar = _NotebookBar(self._label, self._total)
            elif sys.stderr.isatty():
                self._bar = _TerminalBar(self._label, self._total)
        if self._bar is not None:
            self._bar.update(self._done)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Bar(Protocol):
    def update(self, done: int) -> None: ...

    def close(self) -> None: ...


class _TerminalBar:
    def __init__(self, label: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import Progress

        # on a terminal, what is printed meanwhile stands above the bar; in a file it stays in the file
        redirect = sys.stdout.isatty()
        self._progress = Progress(console=Console(stderr=True), transient=True, redirect_stdout=redirect)
        self._task = self._progress.add_task(label, total=total)
        self._progress.start()

    def update(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def close(self) -> None:
        self._progress.stop()


class _NotebookBar:
    """By IPython's own display, which every notebook has; rich would need ipywidgets."""

    def __init__(self, label: str, total: int | None) -> None:
        from IPython.display import display

        self._label, self._total, self._last = label, total, time.monotonic()
        self._shown = display(self._picture(0), raw=True, display_id=True)

    def update(self, done: int) -> None:
        if time.monotonic() - self._last >= _PAUSE:
            self._last = time.monotonic()
            self._shown.update(self._picture(done), raw=True)

    def close(self) -> None:
        self._shown.update({"text/plain": "", "text/html": ""}, raw=True)

    def _picture(self, done: int) -> dict[str, str]:
        known = self._total is not None
        text = f"{self._label} {done:,}" + (f" of {self._total:,}" if known else "")
        place = f" value={done} max={self._total}" if known else ""
        return {"text/plain": text, "text/html": f"<label><progress{place}></progress> {html.escape(text)}</label>"}


def _in_notebook() -> bool:
    """Whether this runs in a kernel of Jupyter."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
