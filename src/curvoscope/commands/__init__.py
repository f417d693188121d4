"""The commands of the command line, one file each, and the writing of files that they share."""

import os
from pathlib import Path

from curvoscope.errors import CurvoscopeError


class OutputError(CurvoscopeError):
    """A file or directory that cannot be written."""


def make_directory(path: Path) -> Path:
    """`path`, a directory that exists and can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("out", f"cannot make the directory {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OutputError("out", f"cannot write into {path}: permission denied")
    return path


def write(path: Path, content: bytes) -> None:
    """Write beside `path` and rename, so that a reader finds the old file or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OutputError("out", f"cannot write {path}: {error.strerror}") from error
