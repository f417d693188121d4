"""What is measured: a model with its loss, a batch and its blocks; and the same model without its norms."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.blocks import Blocks
from curvoscope.losses import CrossEntropy

SEED = 0


@dataclass(frozen=True)
class Exhibit:
    """A model with its loss, one batch, and the blocks to look at."""

    model: nn.Module
    loss: CrossEntropy
    batch: Any
    blocks: Blocks


class Unnormed(nn.Module):
    """The identity in the place of a norm. The norm's weight stays as a buffer, for models that ask for its type."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones_like(norm.get_parameter("weight")))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return x


def without_norms(model: nn.Module) -> nn.Module:
    """The model itself, with the identity in the place of its norms."""
    norms = [path for path, module in model.named_modules() if type(module).__name__.endswith("Norm")]
    for path in norms:
        model.set_submodule(path, Unnormed(model.get_submodule(path)))
    return model
