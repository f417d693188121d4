"""What some figures need besides the package, by the extra that installs it: `pip install 'curvoscope[EXTRA]'`."""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from curvoscope.errors import MissingPackageError

_PRESENT: dict[str, Callable[[], bool]] = {
    "digits": lambda: find_spec("sklearn") is not None,
    "optimizers": lambda: find_spec("pytorch_optimizer") is not None and hasattr(torch.optim, "Muon"),
}
_WHY = {
    "digits": "the handwritten digits come with scikit-learn, which is missing",
    "optimizers": "Muon comes with torch 2.9 and SOAP with pytorch-optimizer, and one is missing",
}


def is_installed(extra: str) -> bool:
    """Whether the packages of an extra are there."""
    return _PRESENT[extra]()


def check_installed(extra: str) -> None:
    """Raise `MissingPackageError` unless the packages of an extra are there."""
    if not is_installed(extra):
        raise MissingPackageError(extra, f"{_WHY[extra]}: pip install 'curvoscope[{extra}]'")
