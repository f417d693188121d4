"""Recipes that remove parts of weights: single entries, heads, neurons, layers, small singular values."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.analysis.recipes.rewriting import check_divides, rewritten, unnamed_in_layers
from curvoscope.blocks import Block, Blocks, layer_and_role
from curvoscope.errors import BlockNameError, EmptyError, ModelError, RangeError
from curvoscope.families.block_maps import blocks_of

_BRANCH_ENDS = (
    *("attn.O", "attn.b_O", "cross.O", "cross.b_O", "mlp.down", "mlp.b_down", "mlp.shared.down", "mlp.shared.b_down"),
    *("mixer.out", "mixer.b_out", "channel.down"),
)


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
    return rewritten(model, lambda block, W: W * _largest(W.abs().flatten(), share).view(W.shape), names)


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
        check_divides("model", block, W, 4)
        fours = W.reshape(-1, 4, W.shape[1])
        return fours.scatter(1, fours.abs().argsort(dim=1, stable=True)[:, :2], 0.0).view(W.shape)

    return rewritten(model, pruned, names)


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
        checks.block_named("heads", layer, outputs)
        count = outputs[layer].heads
        if count is None or any(not 0 <= number < count for number in numbers):
            raise RangeError("heads", f"{layer!r} has {count or 'no'} heads, got {list(numbers)}")

    def dropped(block: Block, W: Tensor) -> Tensor:
        count = block.heads or 1
        gone = range(count) if heads is None else heads.get(block.name.rpartition(".")[0], ())
        kept = torch.tensor([number not in gone for number in range(count)], device=W.device)
        return (W.view(count, -1, W.shape[1]) * kept[:, None, None]).view(W.shape)

    return rewritten(model, dropped, [block.name for block in outputs.values()])


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
    _check_named(model)
    return rewritten(
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
    if any(f"{layer}.mlp.down" not in chosen for layer in layers):
        _check_named(model)
    return rewritten(model, lambda block, W: torch.zeros_like(W), chosen)


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

    return rewritten(model, truncated, names)


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


def _check_named(model: nn.Module) -> None:
    """Raise if the layers have weights, such as experts, of which names do not tell what they do there."""
    found = unnamed_in_layers(model, blocks_of(model))
    if found:
        raise ModelError("model", f"the role of {found[0]!r} is not known by name; pass a changed state dict instead")


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise RangeError("share", f"got {share}, expected a share from 0 to 1")
