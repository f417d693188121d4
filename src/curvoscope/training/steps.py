"""The optimizer that a monitor watches: its learning rate, and the move that its step makes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.blocks import Blocks
from curvoscope.errors import RangeError


class WatchedOptimizer:
    """Read-only hooks around `step()`.

    Args:
        optimizer: the largest learning rate of its parameter groups counts.
        wanted: asked before each step whether to record it.
        guard: a context for what the hooks do.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        blocks: Blocks,
        wanted: Callable[[], bool],
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._optimizer, self._model, self._blocks, self._wanted, self._guard = optimizer, model, blocks, wanted, guard
        self._move: Tensor | None = None  # of the last step, (P,) over the blocks in their order, if it was wanted
        self._rate: float | None = None  # of the last step: a scheduler may have moved on since
        self._before: dict[str, Tensor] | None = None
        _ = self.learning_rate
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of the parameter groups at present."""
        rates = [group["lr"] for group in self._optimizer.param_groups if group.get("lr") is not None]
        if not rates:
            name = type(self._optimizer).__name__
            raise RangeError(
                "optimizer", f"{name} has no 'lr' in its parameter groups; call step(loss, lr) without watch"
            )
        return max(float(rate) for rate in rates)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def last_move(self) -> Tensor | None:
        """The move of the last step; reading it clears it."""
        move, self._move = self._move, None
        return move

    def last_rate(self) -> float | None:
        """The learning rate that the last step was made with; reading it clears it."""
        rate, self._rate = self._rate, None
        return rate

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._before, self._move, self._rate = None, None, self.learning_rate
        if self._wanted():
            with self._guard():
                self._before = self._weights()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        before, self._before = self._before, None
        if before is not None:
            with self._guard():
                after = self._weights()
                self._move = self._blocks.gather({name: after[name].double() - before[name].double() for name in after})

    def _weights(self) -> dict[str, Tensor]:
        parameters = dict(self._model.named_parameters())
        return {name: parameters[name].detach().clone() for name in sorted(self._blocks.parameters)}
