"""Torch's own attention, replaced by ours when its scores would exceed the memory."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from curvoscope.attention.dot_product import sdpa

_MANY = 2**22  # scores from which ours is the faster one, too

_torch_sdpa: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention


@contextmanager
def long_attention(others: Mapping[Callable[..., Any], Callable[..., Any]] | None = None) -> Iterator[None]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` of many scores is `sdpa`; of few, torch's own.

    It is replaced by its name in torch, which `nn.MultiheadAttention` and the models of transformers look up, and,
    for this thread, also if a model has imported it under another name. `others`: more functions of torch, and what
    replaces them for this thread.
    """
    with _by_name, _WhereverCalled({_torch_sdpa: _by_size, **(others or {})}):
        yield


def _by_size(query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Tensor:
    many = not query.is_nested and query.numel() // max(1, query.shape[-1]) * key.shape[-2] >= _MANY
    dropout = more[1] if len(more) > 1 else options.get("dropout_p", 0.0)
    return (sdpa if many and not dropout else _torch_sdpa)(query, key, value, *more, **options)


class _ByName:
    """Replaces the name while any thread is inside. Replacements by others are left alone."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if functional.scaled_dot_product_attention is _torch_sdpa:
                functional.scaled_dot_product_attention = _by_size

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and functional.scaled_dot_product_attention is _by_size:
                functional.scaled_dot_product_attention = _torch_sdpa


_by_name = _ByName()


class _WhereverCalled(TorchFunctionMode):
    """Catches calls of torch's functions. Functions of torch that call them in turn run outside of the mode."""

    def __init__(self, replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._replaced.get(func, func)(*args, **(kwargs or {}))
