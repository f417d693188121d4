"""Curvoscope: the loss Hessian of a Transformer, block by block.

Public names are imported when they are first used: `import curvoscope` does not even import torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from curvoscope.errors import CurvoscopeError
from curvoscope.settings import settings

if TYPE_CHECKING:
    from curvoscope import analysis, approximations, attention, exact, losses, training
    from curvoscope.blocks import Blocks
    from curvoscope.curvature import hessian
    from curvoscope.estimate import Estimate
    from curvoscope.families.block_maps import blocks_of
    from curvoscope.operators import BlockHessian, BlockMatrix, KroneckerSum, LinearOperator
    from curvoscope.sweep import Sweep, sweep

__version__ = "0.2.0"

__all__ = [
    "BlockHessian",
    "BlockMatrix",
    "Blocks",
    "CurvoscopeError",
    "Estimate",
    "KroneckerSum",
    "LinearOperator",
    "Sweep",
    "analysis",
    "approximations",
    "attention",
    "blocks_of",
    "exact",
    "hessian",
    "losses",
    "settings",
    "sweep",
    "training",
]

# The modules of the public names that are not modules themselves.
_HOMES = {
    "BlockHessian": "operators",
    "BlockMatrix": "operators",
    "Blocks": "blocks",
    "Estimate": "estimate",
    "KroneckerSum": "operators",
    "LinearOperator": "operators",
    "Sweep": "sweep",
    "blocks_of": "families.block_maps",
    "hessian": "curvature",
    "sweep": "sweep",
}


def __getattr__(name: str) -> object:
    """Import a public name or a module of the package at its first use."""
    if name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        setattr(sys.modules[__name__], name, found)
        return found
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


class _Package(ModuleType):
    """This package, in which a function stays if the import system binds the module of the same name: `cv.sweep`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
