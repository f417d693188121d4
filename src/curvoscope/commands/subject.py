"""The subject of a command: the model that MODEL names, its loss, a batch, and a description of their origin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvoscope.blocks import Blocks, layer_and_role
from curvoscope.commands.data import data_for
from curvoscope.commands.request import ADDITION, Request
from curvoscope.curvature import blocks_of, trainable
from curvoscope.errors import BlockNameError, RangeError
from curvoscope.families import configs, loading
from curvoscope.losses import Objective
from curvoscope.operators import BlockHessian
from curvoscope.papers.networks import GPT2
from curvoscope.versions import versions

__all__ = ["DTYPES", "NAMES", "Request", "Subject", "is_bias", "is_in_layer", "select", "subject_of"]

DTYPES = {"float64": torch.float64, "float32": torch.float32}
NAMES = (ADDITION, *configs.NAMES)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its loss, one batch; `about` describes them to a reader, `facts` to a program."""

    model: nn.Module
    loss: Objective
    batch: Any
    blocks: Blocks
    about: list[str]
    facts: dict[str, Any]
    versions: dict[str, str]

    def exact_hessian(self) -> BlockHessian | None:
        """The closed form of all layers at once, attention's biases apart: the paper's network alone has one."""
        if not isinstance(self.model, GPT2):
            return None
        inputs, targets = self.batch
        with torch.no_grad():
            X = self.model.residual_stream(inputs, 0)
        return self.model.stack().hessian(X, self.model.exact_loss(targets))


def subject_of(request: Request) -> Subject:
    """Load or make the model and give it data. A name of the package is never taken for a folder."""
    folder = None if request.model in NAMES else Path(request.model)
    is_path = folder is not None and (folder.exists() or len(folder.parts) > 1 or folder.is_absolute())
    dtype = request.dtype or "float32"
    if folder is not None and is_path:
        loaded = loading.load(folder, DTYPES[dtype], request.task)
    else:
        folder, loaded = None, _made(request, DTYPES[dtype])
    data, model = data_for(request, loaded, folder), loaded.model
    size = sum(parameter.numel() for parameter in model.parameters())
    weights = f"random weights, seed {request.seed}" if folder is None else f"weights of {folder}"
    lines = [f"{type(model).__name__}, {size:,} parameters in {dtype}, {weights}.", *data.about]
    if loaded.saved_from is not None:
        origin = ", ".join(loaded.saved_from) or "a class that it does not name"
        lines.append(f"The folder was saved from {origin}; it is read as {type(model).__name__}.")
    if request.d is not None:
        lines.append(f"One block, d = {request.d}, norm {request.norm}, {request.attention} attention.")
    if loaded.unused:
        more = ", ..." if len(loaded.unused) > 3 else ""
        lines.append(f"Not used: {len(loaded.unused)} tensors of the folder, {', '.join(loaded.unused[:3])}{more}.")
    facts = {
        "name": request.model,
        "class": type(model).__name__,
        "task": loaded.task,
        "parameters": size,
        "dtype": dtype,
        "weights": "random" if folder is None else "loaded",
        "unused": list(loaded.unused),
        "saved_from": None if loaded.saved_from is None else list(loaded.saved_from),
        "data": data.facts,
    }
    blocks = blocks_of(data.model)
    if not any(map(is_in_layer, blocks)):  # a family without a table of paths
        blocks = blocks_of(data.model, data.batch)
    blocks = trainable(data.model, blocks)
    used = versions()
    if request.model != ADDITION:
        used["transformers"] = loading.transformers().__version__
    return Subject(data.model, data.loss, data.batch, blocks, lines, facts, used)


def _made(request: Request, dtype: torch.dtype) -> loading.Loaded:
    """The model of that name with random weights, in evaluation mode; those of "addition" are drawn in float64."""
    if request.d is None or request.norm is None or request.attention is None:
        made = configs.make(request.model, request.seed, dtype, others=(ADDITION,))
        if request.task not in (None, made.task):
            raise RangeError(
                "task", f"got {request.task}, but {request.model} is a model for {made.task}; leave it out"
            )
        return made
    if request.task is not None:
        raise RangeError("task", f"got {request.task}, but {ADDITION} is a task of its own; leave it out")
    model = GPT2(request.d, norm=request.norm, activation=request.attention, seed=request.seed, dtype=dtype)
    return loading.Loaded(model.eval(), ADDITION)


def select(blocks: Blocks, patterns: tuple[str, ...], layers_only: bool = False) -> Blocks:
    """The blocks of the patterns; without any, all weights, embeddings and norms, that is all but the biases.

    Outside of the layers a tied embedding acts at both ends of the model, where no layer's output can split it.
    """
    if patterns:
        try:
            return blocks.select(*patterns)
        except BlockNameError as error:
            raise BlockNameError("blocks", str(error).removeprefix("patterns: ")) from error
    names = [name for name in blocks if not is_bias(name) and (not layers_only or is_in_layer(name))]
    return Blocks(blocks[name] for name in names or blocks)


def is_bias(name: str) -> bool:
    """Whether a block is a bias, by its name."""
    leaf = name.rpartition(".")[2]
    return leaf.startswith("b_") or leaf == "bias"


def is_in_layer(name: str) -> bool:
    """Whether a block belongs to a numbered layer of a known family."""
    return layer_and_role(name) is not None
