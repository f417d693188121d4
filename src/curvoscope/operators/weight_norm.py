"""Weight normalisation w = g v / |v| with a right second derivative.

Torch's own function, behind `torch.nn.utils.parametrizations.weight_norm` and the older `torch.nn.utils.weight_norm`,
takes |v| for a constant when its derivative is differentiated: gradients are right, products with the Hessian are not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

_torch_weight_norm: Callable[..., Tensor] = torch._weight_norm


def applies(model: nn.Module) -> bool:
    """Whether a module of the model normalises weights."""
    return any(
        isinstance(module, _WeightNorm)
        or any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values())
        for module in model.modules()
    )


class Differentiable(TorchFunctionMode):
    """Inside, weights are normalised by operations that can be differentiated twice."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Torch's function, but for that one."""
        return (_weight_norm if func is _torch_weight_norm else func)(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / |v|; the norm is over all axes but `dim`, or over all if that is -1."""
    return v * (g / torch.norm_except_dim(v, 2, dim))
