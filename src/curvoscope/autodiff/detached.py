"""DoRA as PEFT has it, with all its derivatives.

A DoRA layer computes x W' with the columns W'_j = m_j V_j / |V_j|, V = W + s A B. PEFT detaches the norms |V_j| from
the graph: training costs less, and its gradient is not that of the loss. A Hessian is the second derivative of the
loss, so that in our passes nothing is detached there.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Inside, the norms of the model's DoRA layers are part of the graph."""
    with ExitStack() as stack:
        for module in model.modules():
            kind = type(module)
            if kind.__name__.startswith("Dora") and kind.__module__.startswith("peft."):
                stack.enter_context(forward_replaced(module, partial(_run, module.forward)))
        yield


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module computes another function."""
    own = {name: value for name, value in vars(module).items() if name == "forward"}
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        vars(module).update(own)


def _run(forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    with _Attached():
        return forward(*inputs, **keywords)


class _Attached(TorchFunctionMode):
    """`detach` does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, or give back the tensor that was to be detached."""
        return args[0] if func is torch.Tensor.detach else func(*args, **(kwargs or {}))
