"""Experts whose weights are slices of one tensor: where such an expert reads its tokens and where it writes.

An expert is a feed-forward layer on the tokens that are routed to it. If it is a module, hooks find it. If all experts
share a tensor (experts, ., .), there is nothing to hook: the functions of torch are watched instead for a slice of the
tensor, and then for the product of tokens with that slice.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvoscope.autodiff.hooks import ActivationHook, ShapeHook, Site

_TAKING = (Tensor.__getitem__, torch.select, Tensor.select)
_PRODUCTS = (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


@dataclass(frozen=True)
class StackedSite(Site):
    """The input or the output of the product with slice `number` of the parameter `leaf` of the module at `path`."""

    leaf: str = ""
    number: int = 0

    def hook(self, model: nn.Module) -> ActivationHook:
        """See `Site`."""
        return StackedHook(model, self)

    def shape_hook(self, model: nn.Module) -> ShapeHook:
        """See `Site`."""
        return StackedShapeHook(model, self)


class StackedHook(ActivationHook):
    """Takes down the tensor at a stacked site while the model runs."""

    def __init__(self, model: nn.Module, site: StackedSite) -> None:
        super().__init__(model, site)
        self._site = site

    def __enter__(self) -> "StackedHook":
        _Watch.listen(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _Watch.leave(self)

    def takes_from(self, tensor: Any, index: Any) -> bool:
        """Whether an index of a tensor is the slice of this site."""
        if getattr(self._module, self._site.leaf) is not tensor or isinstance(index, tuple | slice | list):
            return False
        single = not isinstance(index, Tensor) or (index.numel() == 1 and index.dtype != torch.bool)
        return single and int(index) == self._site.number

    def note(self, tokens: Any, product: Any) -> None:
        """What was multiplied with the slice, and the result."""
        self._take(tokens if self._side == "input" else product)


class StackedShapeHook(StackedHook, ShapeHook):
    """Takes down the shapes of the tensors at a stacked site."""


class _Watch(TorchFunctionMode):
    """Watches the functions of torch for all hooks that listen; there is one, as long as there are any."""

    current: ClassVar["_Watch | None"] = None

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[StackedHook] = []
        self._slices: list[tuple[Tensor, StackedHook]] = []

    @classmethod
    def listen(cls, hook: StackedHook) -> None:
        if cls.current is None:
            cls.current = cls()
            cls.current.__enter__()
        cls.current._hooks.append(hook)

    @classmethod
    def leave(cls, hook: StackedHook) -> None:
        watch = cls.current
        assert watch is not None
        watch._hooks.remove(hook)
        if not watch._hooks:
            cls.current = None
            watch.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, and note slices of stacked tensors and products with them."""
        found = func(*args, **(kwargs or {}))
        if func in _TAKING and isinstance(found, Tensor):
            index = args[-1]
            self._slices += [(found, hook) for hook in self._hooks if hook.takes_from(args[0], index)]
        elif func in _PRODUCTS and len(args) > 1:
            for weight, hook in self._slices:
                if weight is args[1]:
                    hook.note(args[0], found)
            self._slices = [(weight, hook) for weight, hook in self._slices if weight is not args[1]]
        return found
