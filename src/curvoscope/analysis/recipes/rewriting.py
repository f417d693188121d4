"""Writing new values into the blocks of a model: what all recipes share."""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.blocks import Block, Blocks, layer_and_role
from curvoscope.errors import DtypeError, EmptyError, ShapeError
from curvoscope.families.block_maps import blocks_of


def rewritten(model: nn.Module, rewrite: Callable[[Block, Tensor], Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The state dict with rewrite(block, W) for the weights W (a, p) of the chosen blocks."""
    blocks, parameters = blocks_of(model), dict(detached_parameters(model))
    chosen = blocks.select(*names) if names else _weights(model, blocks)
    turned = _outputs_first(model)
    changed: dict[str, Tensor] = {}
    for block in chosen.values():
        for piece in block.pieces:
            parameter = parameters[piece.parameter]
            if not parameter.is_floating_point():
                raise DtypeError("model", f"{piece.parameter!r} is {parameter.dtype}: it is quantised already")
            wide = torch.promote_types(torch.float32, parameter.dtype)
            changed.setdefault(piece.parameter, parameter.to(wide, copy=True))
        W = checks.floating("model", block.matrix(changed))
        turn = all(piece.parameter in turned and piece.layout.rows == (0,) for piece in block.pieces)
        if layer_and_role(block.name) is None and len(block.pieces[0].stored) > 2 and not turn:
            path = block.pieces[0].parameter
            turn = _outputs_come_first(model, path)
            for one in changed[path]:
                one.copy_(rewrite(block, one.T).T if turn else rewrite(block, one))
            continue
        found = rewrite(block, W.T).T if turn else rewrite(block, W)
        block.scatter(found.reshape(-1), changed)
    return completed(model, changed)


def _outputs_come_first(model: nn.Module, name: str) -> bool:
    """Whether a stack of matrices has shape (n, out, in), not (n, in, out): only transformers' experts say it."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    transposed = getattr(module, "is_transposed", None)
    if not isinstance(transposed, bool) or getattr(module, leaf).ndim != 3:
        shape = tuple(getattr(module, leaf).shape)
        raise ShapeError(
            "model", f"{name!r} is {shape}, and which axis is its inputs is not known; choose other blocks with names="
        )
    return not transposed


def _weights(model: nn.Module, blocks: Blocks) -> Blocks:
    """The matrices of the layers, known by name or not; of a model without known layers, all but embeddings."""
    tables = (nn.Embedding, nn.EmbeddingBag)  # and parameters (1, L, d): vectors for each place
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, tables)}
    left_out = {name for name, parameter in model.named_parameters() if id(parameter) in embedded}
    left_out |= {name for name, p in model.named_parameters() if p.ndim > 2 and len(p) == 1} - _outputs_first(model)
    matrices = [
        block
        for block in blocks.values()
        if all(piece.parameter not in left_out and len(piece.stored) > 1 for piece in block.pieces)
    ]
    inside = {block.name for block in matrices if layer_and_role(block.name) is not None}
    if inside:
        inside |= set(unnamed_in_layers(model, blocks))
    if not matrices:
        raise EmptyError("model", f"{type(model).__name__} has no weight matrix to change")
    return Blocks([block for block in matrices if block.name in inside] or matrices)


def unnamed_in_layers(model: nn.Module, blocks: Blocks) -> list[str]:
    """Linear maps and stacks of experts inside the layers that have the names of their parameters."""
    known = {piece.parameter for name, block in blocks.items() if layer_and_role(name) for piece in block.pieces}
    fronts = tuple({found[0] for name in known if (found := re.match(r".*\.\d+\.|\d+\.", name))})
    linear = _outputs_first(model)
    return [
        name
        for name, parameter in model.named_parameters()
        if name not in known and name.startswith(fronts)
        if (name in linear and parameter.ndim == 2) or ("experts" in name.split(".") and parameter.ndim > 2)
    ]


def _outputs_first(model: nn.Module) -> set[str]:
    """Parameters that are stored with their outputs as the first axis."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    leaves = ("weight", *(f"parametrizations.weight.original{end}" for end in ("", "0", "1")))  # the norm and direction
    paths = [path for path, module in model.named_modules() if isinstance(module, kinds)]
    found = {f"{path}.{leaf}".lstrip(".") for path in paths for leaf in leaves}
    recurrent = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    return found | {f"{path}.{name}".lstrip(".") for path, one in recurrent for name, _ in one.named_parameters()}


def detached_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Names and values of the parameters."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def completed(model: nn.Module, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's state dict with changed parameters, under all names that they have."""
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(named.items())}
    state = dict(model.state_dict())
    for name, parameter in named.items():
        if first[id(parameter)] in changed:
            state[name] = changed[first[id(parameter)]].to(parameter.dtype)
    return state


def check_divides(argument: str, block: Block, W: Tensor, size: int) -> None:
    """Raise if the inputs of a weight W (a, p) cannot be cut into groups of a size."""
    if W.shape[0] % size:
        name = block.pieces[0].parameter
        other = "choose another group size, or " if argument == "group" else ""
        raise ShapeError(
            argument,
            f"{name!r} has {W.shape[0]} inputs, which {size} does not divide; {other}leave it out (names= in Python)",
        )
