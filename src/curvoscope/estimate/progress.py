"""A progress bar for what takes longer than a second: on a terminal, on stderr, gone when done."""

import sys
import time
from typing import TYPE_CHECKING

from curvoscope.settings import current

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE = 1.0  # seconds without a bar


class Ticker:
    """Counts work done towards `total` (None: not known), and shows it once it has taken more than a second."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label, self._total = label, total
        self._start = time.monotonic()
        self._done = 0
        self._bar: Progress | None = None

    def advance(self, amount: int) -> None:
        """`amount` more units are done."""
        self._done += amount
        if self._bar is None:
            if not current().progress or time.monotonic() - self._start < _PATIENCE or not sys.stderr.isatty():
                return
            from rich.console import Console
            from rich.progress import Progress

            # on a terminal, what is printed meanwhile stands above the bar; in a file it stays in the file
            redirect = sys.stdout.isatty()
            self._bar = Progress(console=Console(stderr=True), transient=True, redirect_stdout=redirect)
            self._task = self._bar.add_task(self._label, total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=self._done)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
