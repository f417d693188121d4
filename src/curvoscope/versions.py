"""What an output says of the programs that made it."""

import platform

import torch

import curvoscope


def versions() -> dict[str, str]:
    """Of this package, torch and Python."""
    return {
        "curvoscope": curvoscope.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
