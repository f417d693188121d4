"""The commands of the command line, one file each, and what they share: the writing of files, the console."""

import contextlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from curvoscope.errors import CurvoscopeError

if TYPE_CHECKING:
    import matplotlib.figure

_TABLE_WIDTH = 132
"""Columns of a table if there is no terminal to ask."""


class OutputError(CurvoscopeError):
    """A file or directory that cannot be written."""


_made: list[Path] = []
"""Directories that this program has made, in order."""


def make_directory(path: Path) -> Path:
    """`path`, a directory that exists and can be written to."""
    absent = [parent for parent in (path, *path.parents) if not parent.exists()]
    _made.extend(reversed(absent))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("out", f"cannot make the directory {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OutputError("out", f"cannot write into {path}: permission denied")
    return path


def remove_empty() -> None:
    """Remove the directories that were made for results that never came."""
    while _made:
        with contextlib.suppress(OSError):  # it holds something, or is gone
            _made.pop().rmdir()


def write(path: Path, content: bytes) -> None:
    """Write next to `path` and rename, so that a reader finds the old file or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OutputError("out", f"cannot write {path}: {error.strerror}") from error


def png(figure: "matplotlib.figure.Figure") -> bytes:
    """The figure at print resolution."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200)
    return buffer.getvalue()


def console() -> Console:
    """Of stdout: as wide as the terminal, or wide enough for the tables if there is none."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_TABLE_WIDTH)
