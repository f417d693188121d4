"""`hessian`: the loss Hessian of any torch model over named blocks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from curvoscope import checks
from curvoscope.blocks import Blocks
from curvoscope.errors import BlockNameError, EmptyError, ModelError
from curvoscope.models.families import blocks_of
from curvoscope.operators.autodiff import Autodiff
from curvoscope.operators.batches import BatchError, Batches
from curvoscope.operators.block_matrix import BlockHessian
from curvoscope.operators.matrix_free import AutodiffMatrix
from curvoscope.operators.objectives import CrossEntropy, LossFunction, MeanLoss, MeanSquaredError, objective_of

__all__ = [
    "BatchError",
    "CrossEntropy",
    "MeanLoss",
    "MeanSquaredError",
    "ModelHessian",
    "blocks_of",
    "hessian",
]


class ModelHessian(BlockHessian):
    """The Hessian of a model's loss: `total`, `outer` and `functional` from the same kept graphs.

    The total is a double backward pass of its own, not the sum of the two parts: it costs less than they do.
    """

    def __init__(self, engine: Autodiff) -> None:
        blocks = engine.blocks
        self.outer = AutodiffMatrix(engine, "outer", blocks)
        self.functional = AutodiffMatrix(engine, "functional", blocks)
        self.total = AutodiffMatrix(engine, "total", blocks)
        self.loss = engine.survey.loss
        self.terms = sum(engine.survey.terms)
        self._methods = dict.fromkeys(blocks, "autodiff")

    def method_of(self, name: str) -> str:
        """How the block `name` is computed: "exact" or "autodiff"."""
        if name not in self._methods:
            raise BlockNameError("block", f"there is no {name!r} among {', '.join(self._methods)}")
        return self._methods[name]


def hessian(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    blocks: Blocks | None = None,
    method: str = "auto",
    split: str = "model",
    micro_batch: int | None = None,
    device: torch.device | str | None = None,
    memory_limit: int | None = None,
) -> ModelHessian:
    """The Hessian of the mean loss over all batches, at the weights that the model has now.

    Args:
        model: any module, in the mode in which its loss is deterministic (`model.eval()`). It is left as it is.
        loss_fn: `loss_fn(outputs, targets)`, a mean over loss terms. Batches are weighted by their numbers of terms,
            so that the result does not depend on how the data is cut: `CrossEntropy` (and torch's) counts the targets
            that are not ignored, `MeanSquaredError` (and torch's) the entries, any other function the rows unless
            it comes as `MeanLoss(function, terms)`. None: the loss that a Hugging Face model has for its labels.
        batches: a list, a DataLoader without shuffling, or any iterable that can be walked again, of
            (inputs, targets), the model being called as model(inputs), model(*inputs) for a tuple, model(**inputs)
            for a dict; or of dicts with "labels", the model being called with the other entries.
        blocks: named parameters, from `blocks_of(model)`; None: all of them that are not frozen.
        method: "autodiff", or "auto": the fastest known. "exact": only closed forms.
        split: where outer | functional is cut: at the "model"'s output (Gauss-Newton), or at the output of the "layer"
            that each block belongs to. There the parts exist within one layer only.
        micro_batch: rows at a time; None: a batch at a time.
        device: where to compute; None: where the model is.
        memory_limit: bytes for the graphs kept between products; what does not fit is computed anew in each product.
            None: a part of what is free.

    Half-precision weights are converted: operators, vectors and sums are float32.
    """
    checks.choice("method", method, ("auto", "exact", "autodiff"))
    if blocks is None:
        blocks = _trainable(model)
    if method == "exact":
        raise ModelError("method", f"no closed form is known for {', '.join(blocks)}; use method='auto'")
    found = Batches(batches, micro_batch)
    return ModelHessian(Autodiff(model, objective_of(loss_fn), found, blocks, split, device, memory_limit))


def _trainable(model: nn.Module) -> Blocks:
    """The blocks whose parameters are all trainable."""
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    chosen = [b for b in blocks_of(model).values() if all(piece.parameter in free for piece in b.pieces)]
    if not chosen:
        raise EmptyError("model", "all its parameters are frozen; call requires_grad_(True) on some")
    return Blocks(chosen)
