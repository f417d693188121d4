"""Writing new values into the blocks of a model: what all recipes share."""

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
        found = rewrite(block, W.T).T if turn else rewrite(block, W)
        block.scatter(found.reshape(-1), changed)
    return completed(model, changed)


def _weights(model: nn.Module, blocks: Blocks) -> Blocks:
    """The matrices of the layers; of a model without known layers, all but embeddings."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, tables)}
    left_out = {name for name, parameter in model.named_parameters() if id(parameter) in embedded}
    matrices = [
        block
        for block in blocks.values()
        if all(len(piece.stored) > 1 and piece.parameter not in left_out for piece in block.pieces)
    ]
    inside = [block for block in matrices if layer_and_role(block.name) is not None]
    if not matrices:
        raise EmptyError("model", f"{type(model).__name__} has no weight matrix to change")
    return Blocks(inside or matrices)


def _outputs_first(model: nn.Module) -> set[str]:
    """Parameters that are stored with their outputs as the first axis."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {f"{path}.weight".lstrip(".") for path, module in model.named_modules() if isinstance(module, kinds)}


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
