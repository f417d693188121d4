"""Changes of weights made from the model alone: rounding, pruning, dropping, low rank, merging. Model -> state dict.

A recipe rewrites weights W (a, p), as in X @ W: columns are output channels, and groups are runs of inputs of one
channel. By default it rewrites the weights of attention and feed-forward layers; in a model without known layers all
matrices but embeddings. `names`, shell patterns of block names, choose others. The result has all tensors of
`model.state_dict()`; those that stay are the model's own.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.analysis.changes import Change, changed_state
from curvoscope.blocks import Block, Blocks, layer_and_role
from curvoscope.errors import BlockNameError, DtypeError, EmptyError, RangeError, ShapeError
from curvoscope.families.block_maps import blocks_of

__all__ = [
    "average",
    "drop_heads",
    "drop_layers",
    "drop_neurons",
    "fp8",
    "int3",
    "int4",
    "int8",
    "low_rank",
    "merge_lora",
    "mix",
    "nf4",
    "prune",
    "prune_2_4",
]

Group = int | str  # inputs that share a scale, or "channel", or "tensor"
_NF4 = (  # the sixteen levels of NormalFloat4 (Dettmers et al. 2023), quantiles of a normal distribution
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_LARGEST_FP8 = 448.0  # of float8_e4m3fn
_BRANCH_ENDS = ("attn.O", "attn.b_O", "cross.O", "cross.b_O", "mlp.down", "mlp.b_down")


# ---- rounding


def int8(
    model: nn.Module, group: Group = "channel", symmetric: bool = True, names: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Round every weight to the nearest of 255 (symmetric) or 256 evenly spaced levels.

    Symmetric: s = max|w| / 127, w' = s round(w / s). Otherwise the levels span min(w, 0) to max(w, 0).

    Args:
        model: any module.
        group: what has a scale of its own: the number of inputs in a group (it must divide a), "channel" or "tensor".
        symmetric: whether zero is the middle level.
        names: shell patterns of the blocks to rewrite; none: the default of this module.

    Returns:
        The state dict with rounded weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(8, 2, bias=False)
        >>> rounded = cv.analysis.recipes.int8(model, group=4)["weight"]
        >>> bool(((rounded - model.weight).abs() <= model.weight.abs().max() / 127 / 2 + 1e-7).all())
        True
    """
    return _rounded(model, partial(_integer, bits=8, symmetric=symmetric), group, names)


def int4(
    model: nn.Module, group: Group = "channel", symmetric: bool = True, names: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Round every weight to the nearest of 15 (symmetric) or 16 evenly spaced levels, see `int8`.

    Args:
        model, group, symmetric, names: as in `int8`.

    Returns:
        The state dict with rounded weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> rounded = cv.analysis.recipes.int4(torch.nn.Linear(64, 1))["weight"]
        >>> len(rounded.unique()) <= 15
        True
    """
    return _rounded(model, partial(_integer, bits=4, symmetric=symmetric), group, names)


def int3(
    model: nn.Module, group: Group = "channel", symmetric: bool = True, names: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Round every weight to the nearest of 7 (symmetric) or 8 evenly spaced levels, see `int8`.

    Args:
        model, group, symmetric, names: as in `int8`.

    Returns:
        The state dict with rounded weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> rounded = cv.analysis.recipes.int3(torch.nn.Linear(64, 1), symmetric=False)["weight"]
        >>> len(rounded.unique()) <= 8
        True
    """
    return _rounded(model, partial(_integer, bits=3, symmetric=symmetric), group, names)


def nf4(model: nn.Module, group: Group = 64, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Round every weight to the nearest of the 16 levels of NormalFloat4, times max|w| of its group.

    Args:
        model, group, names: as in `int8`.

    Returns:
        The state dict with rounded weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> rounded = cv.analysis.recipes.nf4(torch.nn.Linear(64, 1))["weight"]
        >>> len(rounded.unique()) <= 16
        True
    """

    def nearest(W: Tensor) -> Tensor:
        scale = _safe(W.abs().amax(1, keepdim=True))
        levels = torch.tensor(_NF4, dtype=W.dtype, device=W.device)
        return levels[torch.bucketize((W / scale).contiguous(), (levels[1:] + levels[:-1]) / 2)] * scale

    return _rounded(model, nearest, group, names)


def fp8(model: nn.Module, group: Group = "channel", names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Round every weight to 8-bit floating point (e4m3), scaled so that max|w| of its group becomes 448.

    Args:
        model, group, names: as in `int8`.

    Returns:
        The state dict with rounded weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(64, 1)
        >>> change = cv.analysis.recipes.fp8(model)["weight"] / model.weight.detach() - 1
        >>> float(change.abs().median()) < 1 / 16  # three bits behind the point
        True
    """

    def nearest(W: Tensor) -> Tensor:
        scale = _safe(W.abs().amax(1, keepdim=True)) / _LARGEST_FP8
        return (W / scale).to(torch.float8_e4m3fn).to(W.dtype) * scale

    return _rounded(model, nearest, group, names)


def _integer(W: Tensor, bits: int, symmetric: bool) -> Tensor:
    """Round (k, g, c) to integers times a scale for each of the (k, 1, c) groups."""
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale = _safe(W.abs().amax(1, keepdim=True)) / top
        return (W / scale).round().clamp(-top, top) * scale
    low, high = W.amin(1, keepdim=True).clamp_max(0), W.amax(1, keepdim=True).clamp_min(0)
    scale = _safe(high - low) / (2**bits - 1)
    zero = (-low / scale).round()
    return (((W / scale).round() + zero).clamp(0, 2**bits - 1) - zero) * scale


def _safe(scale: Tensor) -> Tensor:
    """Groups of zeros stay zero at any scale."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _rounded(
    model: nn.Module, nearest: Callable[[Tensor], Tensor], group: Group, names: Sequence[str]
) -> dict[str, Tensor]:
    if group not in ("channel", "tensor") and (not isinstance(group, int) or group < 1):
        raise RangeError("group", f"got {group!r}, expected a number of inputs, 'channel' or 'tensor'")

    def rounded(block: Block, W: Tensor) -> Tensor:
        if group == "tensor":
            return nearest(W.reshape(1, -1, 1)).view(W.shape)
        size = W.shape[0] if group == "channel" else int(group)
        _check_divides("group", block, W, size)
        return nearest(W.reshape(-1, size, W.shape[1])).view(W.shape)

    return _rewritten(model, rounded, names)


def _check_divides(argument: str, block: Block, W: Tensor, size: int) -> None:
    if W.shape[0] % size:
        name = block.pieces[0].parameter
        raise ShapeError(
            argument, f"{name!r} has {W.shape[0]} inputs, which {size} does not divide; take another, or names="
        )


# ---- pruning and dropping


def prune(model: nn.Module, share: float = 0.5, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Set the smallest weights of each block to zero.

    Args:
        model, names: as in `int8`.
        share: of the weights that become zero, from 0 to 1.

    Returns:
        The state dict with pruned weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> pruned = cv.analysis.recipes.prune(torch.nn.Linear(8, 2), 0.25)["weight"]
        >>> int((pruned == 0).sum())
        4
    """
    _check_share(share)
    return _rewritten(model, lambda block, W: W * _largest(W.abs().flatten(), share).view(W.shape), names)


def prune_2_4(model: nn.Module, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Set the two smallest of every four successive inputs of a channel to zero: the pattern that GPUs run faster.

    Args:
        model, names: as in `int8`.

    Returns:
        The state dict with pruned weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> pruned = cv.analysis.recipes.prune_2_4(torch.nn.Linear(8, 2))["weight"]
        >>> (pruned.view(2, 2, 4) == 0).sum(-1).tolist()
        [[2, 2], [2, 2]]
    """

    def pruned(block: Block, W: Tensor) -> Tensor:
        _check_divides("model", block, W, 4)
        fours = W.reshape(-1, 4, W.shape[1])
        return fours.scatter(1, fours.abs().argsort(dim=1, stable=True)[:, :2], 0.0).view(W.shape)

    return _rewritten(model, pruned, names)


def drop_heads(model: nn.Module, heads: Mapping[str, Sequence[int]] | None = None) -> dict[str, Tensor]:
    """Remove attention heads: set the rows of O that read them to zero.

    Args:
        model: of a family whose attention is known to `blocks_of`.
        heads: head numbers by layer, {"h.0.attn": [0, 3]}; None: all, for a ledger over `per_head` blocks, in which
            every head has a row of its own.

    Returns:
        The state dict without the heads.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8)
        >>> cv.analysis.recipes.drop_heads(model, {"h.0.attn": [1]})["self_attn.out_proj.weight"][:, 2:].abs().sum()
        tensor(0.)
    """
    outputs = {name.rpartition(".")[0]: block for name, block in _with_role(model, ("attn.O", "cross.O")).items()}
    for layer, numbers in (heads or {}).items():
        if layer not in outputs:
            raise BlockNameError("heads", f"there is no {layer!r} among {', '.join(outputs)}")
        count = outputs[layer].heads
        if count is None or any(not 0 <= number < count for number in numbers):
            raise RangeError("heads", f"{layer!r} has {count or 'no'} heads, got {list(numbers)}")

    def dropped(block: Block, W: Tensor) -> Tensor:
        count = block.heads or 1
        gone = range(count) if heads is None else heads.get(block.name.rpartition(".")[0], ())
        kept = torch.tensor([number not in gone for number in range(count)], device=W.device)
        return (W.view(count, -1, W.shape[1]) * kept[:, None, None]).view(W.shape)

    return _rewritten(model, dropped, [block.name for block in outputs.values()])


def drop_neurons(model: nn.Module, share: float = 0.5) -> dict[str, Tensor]:
    """Remove the neurons of each feed-forward layer whose outgoing weights have the smallest norms.

    Args:
        model: of a family whose feed-forward layers are known to `blocks_of`.
        share: of the neurons that are removed, from 0 to 1.

    Returns:
        The state dict with those rows of `mlp.down` set to zero.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8)
        >>> int((cv.analysis.recipes.drop_neurons(model, 0.25)["linear2.weight"].norm(dim=0) == 0).sum())
        2
    """
    _check_share(share)
    return _rewritten(
        model, lambda block, W: W * _largest(W.norm(dim=1), share)[:, None], list(_with_role(model, ("mlp.down",)))
    )


def drop_layers(model: nn.Module, layers: Sequence[str]) -> dict[str, Tensor]:
    """Remove whole layers: what their attention and feed-forward branches add becomes zero.

    Args:
        model: of a family that is known to `blocks_of`.
        layers: such as "h.3".

    Returns:
        The state dict with O, down and their biases of these layers set to zero.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8)
        >>> dropped = cv.analysis.recipes.drop_layers(model, ["h.0"])
        >>> sorted(name for name, tensor in dropped.items() if not tensor.any())[-1]
        'self_attn.out_proj.weight'
    """
    ends = _with_role(model, _BRANCH_ENDS)
    places = {name: found[0] for name in ends if (found := layer_and_role(name)) is not None}
    unknown = next((layer for layer in layers if layer not in places.values()), None)
    if unknown is not None or not layers:
        known = ", ".join(dict.fromkeys(places.values()))
        raise BlockNameError("layers", f"got {unknown!r}, expected some of {known}")
    chosen = [name for name, layer in places.items() if layer in layers]
    return _rewritten(model, lambda block, W: torch.zeros_like(W), chosen)


def _with_role(model: nn.Module, roles: Sequence[str]) -> Blocks:
    found = [
        block
        for name, block in blocks_of(model).items()
        if (place := layer_and_role(name)) is not None and place[1] in roles
    ]
    if not found:
        raise EmptyError("model", f"{type(model).__name__} has no block {' or '.join(roles[:1])} that is known by name")
    return Blocks(found)


def _largest(sizes: Tensor, share: float) -> Tensor:
    """A mask (n,) without round(share n) of the smallest."""
    kept = torch.ones_like(sizes)
    kept[sizes.argsort(stable=True)[: round(share * len(sizes))]] = 0
    return kept


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise RangeError("share", f"got {share}, expected a share from 0 to 1")


# ---- low rank, merging


def low_rank(model: nn.Module, share: float = 0.5, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Keep the largest singular values of each weight: its best approximation of that rank.

    Args:
        model, names: as in `int8`.
        share: rank / min(a, p), from 0 to 1.

    Returns:
        The state dict with weights of low rank.

    Example:
        >>> import torch, curvoscope as cv
        >>> int(torch.linalg.matrix_rank(cv.analysis.recipes.low_rank(torch.nn.Linear(8, 4), 0.5)["weight"]))
        2
    """
    _check_share(share)

    def truncated(block: Block, W: Tensor) -> Tensor:
        U, values, V = torch.linalg.svd(W, full_matrices=False)
        rank = round(share * len(values))
        return (U[:, :rank] * values[:rank]) @ V[:rank]

    return _rewritten(model, truncated, names)


def merge_lora(
    model: nn.Module, adapters: Mapping[str, tuple[Tensor, Tensor]], scale: float = 1.0
) -> dict[str, Tensor]:
    """Add the products of low-rank adapters: W + scale A B.

    Args:
        model: any module.
        adapters: A (a, r) and B (r, p) by the names of the blocks W (a, p).
        scale: usually alpha / r.

    Returns:
        The state dict with merged weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8)
        >>> merged = cv.analysis.recipes.merge_lora(model, {"h.0.mlp.up": (torch.ones(4, 1), torch.ones(1, 8))})
        >>> torch.allclose(merged["linear1.weight"], model.linear1.weight + 1)
        True
    """

    def merged(block: Block, W: Tensor) -> Tensor:
        A, B = adapters[block.name]
        if A.ndim != 2 or B.ndim != 2 or (A.shape[0], B.shape[1]) != W.shape or A.shape[1] != B.shape[0]:
            shapes = f"A {tuple(A.shape)} and B {tuple(B.shape)}"
            raise ShapeError(
                "adapters", f"{block.name!r}: {shapes} do not make {tuple(W.shape)}; expected (a, r) and (r, p)"
            )
        return W + scale * A.to(W) @ B.to(W)

    return _rewritten(model, merged, list(adapters))


def average(model: nn.Module, other: Change, weight: float = 0.5) -> dict[str, Tensor]:
    """The weighted mean of two checkpoints: (1 - weight) w + weight w'.

    Args:
        model: gives w.
        other: gives w': anything that `cv.analysis.sensitivity` takes for `changed`.
        weight: of the other.

    Returns:
        The state dict with averaged weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> one, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> torch.allclose(cv.analysis.recipes.average(one, other)["weight"], (one.weight + other.weight) / 2)
        True
    """
    target = changed_state(model, other)
    return _completed(model, {name: torch.lerp(p, target[name].to(p), weight) for name, p in _parameters(model)})


def mix(model: nn.Module, changes: Mapping[str, Change]) -> dict[str, Tensor]:
    """Change each block in its own way; blocks that are not named stay.

    Args:
        model: any module.
        changes: by block name, anything that `cv.analysis.sensitivity` takes for `changed`.

    Returns:
        The state dict with the blocks of several changes.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, recipes = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), cv.analysis.recipes
        >>> mixed = recipes.mix(model, {"0.weight": recipes.int3, "1.weight": recipes.int8})
        >>> torch.equal(mixed["0.weight"], recipes.int3(model)["0.weight"])
        True
    """
    blocks, parameters = blocks_of(model), dict(_parameters(model))
    states: dict[int, dict[str, Tensor]] = {}
    mixed: dict[str, Tensor] = {}
    for name, change in changes.items():
        if id(change) not in states:
            states[id(change)] = changed_state(model, change)
        block = blocks[name]
        mixed |= {p.parameter: parameters[p.parameter].clone() for p in block.pieces if p.parameter not in mixed}
        block.scatter(block.gather(states[id(change)]), mixed)
    return _completed(model, mixed)


# ---- blocks of a model


def _rewritten(model: nn.Module, rewrite: Callable[[Block, Tensor], Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The state dict with rewrite(block, W) for the weights W (a, p) of the chosen blocks."""
    blocks, parameters = blocks_of(model), dict(_parameters(model))
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
    return _completed(model, changed)


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


def _parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def _completed(model: nn.Module, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's state dict with changed parameters, under all names that they have."""
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(named.items())}
    state = dict(model.state_dict())
    for name, parameter in named.items():
        if first[id(parameter)] in changed:
            state[name] = changed[first[id(parameter)]].to(parameter.dtype)
    return state
