"""Progress bars of commands with many measurements, in place of one for each of them."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from curvoscope.settings import settings

_PATIENCE = 1.0  # seconds without a bar
_UNITS = ((5400, 3600, "hours", 1), (90, 60, "minutes", 0), (0, 1, "seconds", 0))  # from so many seconds on


def duration(least: float, most: float | None = None) -> str:
    """A time in words, such as "4 minutes"; with `most`, a range, such as "1 to 4 minutes"."""
    longest = least if most is None else most
    _, size, unit, digits = next(one for one in _UNITS if longest >= one[0])
    low, high = (f"{max(seconds / size, 10**-digits):.{digits}f}" for seconds in (least, longest))
    if low != high:
        return f"{low} to {high} {unit}"
    return f"1 {unit[:-1]}" if high == "1" else f"{high} {unit}"


def counted(left: bool = False) -> Progress:
    """A bar with the numbers of tasks done and of all, on stderr, if that is a terminal; with `left`, the time left."""
    console = Console(stderr=True, highlight=False)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *((TextColumn("left"), TimeRemainingColumn()) if left else ()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=300.0,
    )


@contextlib.contextmanager
def work(total: int) -> Iterator[Callable[[str], None]]:
    """Inside, call what is yielded with the name of the next piece of work, `total` times.

    The bar goes to stderr, if that is a terminal, once a second has passed.
    """
    stream = sys.stderr
    # on a terminal, what is printed meanwhile stands above the bar; in a file it stays in the file
    progress = Progress(console=Console(file=stream), transient=True, redirect_stdout=sys.stdout.isatty())
    start, done = time.monotonic(), -1
    task = progress.add_task("", total=total)
    shown = stream.isatty()

    def step(label: str) -> None:
        nonlocal done
        done += 1
        progress.update(task, description=label, completed=done)
        if shown and not progress.live.is_started and time.monotonic() - start > _PATIENCE:
            progress.start()

    with settings(progress=False):  # what runs inside draws no bar of its own
        try:
            yield step
        finally:
            if progress.live.is_started:
                progress.stop()
