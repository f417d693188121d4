"""The scale of the inputs of each layer: if it is far from one, normalisation is missing."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.safety import check_mode, undisturbed
from curvoscope.autodiff.snapshot import device_of, keywords_for
from curvoscope.errors import EmptyError
from curvoscope.families.block_maps import blocks_of

_READING = ("*.attn.[QKV]", "*.mlp.up", "*.mlp.gate")


def input_scales(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """The root mean square of the inputs of layers over all batches, by the names of the modules that read them.

    Layers are the projections to queries, keys and values and the first matrices of feed-forward layers: those that
    usually follow a norm. In a model of an unknown family all modules that hold a matrix count. Embeddings, whose
    inputs are integers, and modules that were not called are left out. Sums are float64.

    Args:
        model: in evaluation mode; it is left as it is.
        batches: as in `hessian`; targets are not used.

    Returns:
        {module name: root mean square of its inputs}.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> _ = torch.nn.init.zeros_(model[0].weight), torch.nn.init.ones_(model[0].bias)
        >>> cv.analysis.input_scales(model, [(torch.full((4, 2), 5.0), torch.zeros(4, 1))])
        {'0': 5.0, '1': 1.0}
    """
    device = device_of(model, None)
    data = Batches(batches)
    check_mode(model)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            leaves = tree_flatten((arguments, keywords))[0]
            first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
            if first is not None and first.is_floating_point():
                square = first.detach().double().square().sum()
                sums[name] = sums.get(name, torch.zeros_like(square)) + square
                counts[name] = counts.get(name, 0) + first.numel()

        return hook

    readers = _readers(model)
    holders = [(name, module) for name, module in model.named_modules() if name in readers]
    handles = [module.register_forward_pre_hook(watch(name), with_kwargs=True) for name, module in holders]
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    try:
        with undisturbed(model, data.generators), torch.no_grad():
            for batch in data:
                moved = batch.to(device, dtype)
                model(*moved.arguments, **keywords_for(model, moved))
    finally:
        for handle in handles:
            handle.remove()
    if not sums:
        raise EmptyError("model", "has no module with a matrix and floating-point input")
    return {name: float(sums[name] / counts[name]) ** 0.5 for name, _ in holders if name in sums}


def _readers(model: nn.Module) -> set[str]:
    """Names of the modules whose inputs are measured."""
    first = {
        piece.parameter.rpartition(".")[0]
        for name, block in blocks_of(model).items()
        if any(fnmatchcase(name, pattern) for pattern in _READING)
        for piece in block.pieces
    }
    return first or {
        name
        for name, module in model.named_modules()
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    }
