"""What a document says of the programs that made it."""

import platform

import torch

from curvoscope import __version__


def versions() -> dict[str, str]:
    """Of this package, torch and Python."""
    return {"curvoscope": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
