"""Fused kernels of recurrent layers, replaced by the torch code beside them: only that one has second derivatives.

Transformers' models of state spaces and RWKV call a kernel if its package is installed, or their own code otherwise.
"""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

_MODELS, _CHOOSING = "transformers.models.", "transformers.integrations.hub_kernels"
_FLAGS = {"is_fast_path_available": False, "rwkv_cuda_kernel": None}  # of a model's file: whether there is a kernel

_lock = threading.Lock()
_inside: dict[tuple[str, str], tuple[Any, int]] = {}  # what was replaced, and how many are inside


@contextmanager
def torch_recurrences(model: nn.Module) -> Iterator[None]:
    """Inside, the recurrent layers of a model of transformers run torch's operations only."""
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[name] for name in names if name.startswith(_MODELS) and name in sys.modules]
    with _lock:
        replaced = [(file, name) for file in files for name in vars(file) if _is_kernel(file, name)]
        for file, name in replaced:
            original, count = _inside.get((file.__name__, name), (getattr(file, name), 0))
            _inside[file.__name__, name] = original, count + 1
            setattr(file, name, _FLAGS[name] if name in _FLAGS else inspect.unwrap(original))
    try:
        yield
    finally:
        with _lock:
            for file, name in replaced:
                original, count = _inside.pop((file.__name__, name))
                if count > 1:
                    _inside[file.__name__, name] = original, count - 1
                else:
                    setattr(file, name, original)


def _is_kernel(file: ModuleType, name: str) -> bool:
    """Whether a name of a model's file stands for a kernel, or did before it was replaced."""
    value = vars(file)[name]
    chosen = isinstance(value, FunctionType) and value.__globals__.get("__name__") == _CHOOSING
    return name in _FLAGS or (file.__name__, name) in _inside or (chosen and hasattr(value, "__wrapped__"))
