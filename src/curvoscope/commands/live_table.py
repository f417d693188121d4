"""The blocks of a sweep while it runs: the largest so far above a bar with the time left."""

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from curvoscope.estimate import Estimate
from curvoscope.report.model_tables import with_error
from curvoscope.sweep import Sweep
from curvoscope.sweep.plan import CHUNK, MOST

_AROUND = 7  # lines of the terminal that are not rows of the table
_PAUSE = 0.25  # seconds between two pictures


class LiveTable:
    """Shows a sweep whenever another block is known.

    In a terminal, a table of the largest blocks, in the order of their norms, above a bar with the time left; anywhere
    else one line per block, when it is first known.

    Args:
        console: where to show it.
        rows: blocks and heads that every sample passes.
        tolerance: that of the sweep, from which the number of samples is predicted.
    """

    def __init__(self, console: Console, rows: int, tolerance: float) -> None:
        self._console, self._rows, self._tolerance = console, rows, tolerance
        self._known: dict[str, tuple[Estimate, Estimate]] = {}
        self._chunks = 0  # of which the blocks in `_known` are
        self._fresh = set[str]()
        self._passes = 1  # through all rows, as far as is known
        self._drawn = 0.0
        self.last: Sweep | None = None
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("left"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task("", total=rows)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self.draws = console.is_terminal and not console.quiet

    def __enter__(self) -> "LiveTable":
        if self.draws:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.draws:
            self._live.stop()

    def take(self, found: Sweep) -> None:
        """The sweep so far."""
        self.last = found
        if len(found.chunks) != self._chunks:
            if self._fresh:  # a pass is complete
                self._passes = -(-min(MOST, max(found.needed(self._tolerance), found.samples + 1)) // CHUNK)
            self._chunks, self._fresh = len(found.chunks), set()
        for name in found.names:
            if name not in self._fresh and all(row in found.chunks[-1] for row in found.heads(name) or [name]):
                self._fresh.add(name)
                self._tell(name, found.frobenius_norm(name), found.trace(name))
        if self.draws:
            self._draw(found)

    def _tell(self, name: str, norm: Estimate, trace: Estimate) -> None:
        if name not in self._known and not self.draws:
            numbers = f"‖H‖F {with_error(norm):>18}   trace {with_error(trace):>18}"
            self._console.print(Text(f"{name:<28} {numbers}"), soft_wrap=True)
        self._known[name] = norm, trace

    def _draw(self, found: Sweep) -> None:
        done = (len(found.chunks) - 1) * self._rows + len(found.chunks[-1])
        self._bar.update(self._task, completed=done, total=max(done, self._passes * self._rows))
        now = time.monotonic()
        if now - self._drawn < _PAUSE:
            return
        self._drawn = now
        self._bar.update(self._task, description=f"{found.samples} of about {CHUNK * self._passes} samples")
        self._live.update(Group(self._table(), self._bar), refresh=True)

    def _table(self) -> Table:
        order = sorted(self._known, key=lambda name: -self._known[name][0])
        shown = order[: max(1, self._console.height - _AROUND)]
        table = Table("block", "‖H‖F", "trace", title=f"The largest of {len(order)} blocks so far")
        for name in shown:
            table.add_row(name, *map(with_error, self._known[name]))
        return table
