"""The last product of a model with a weight, when the loss is the cross-entropy of its result.

Its logits need not be kept: cotangents are made of a few columns of the vocabulary at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.cotangents import SampleSeed, SoftmaxCotangents, softmax_cotangents
from curvoscope.autodiff.uses import WeightUse, find_uses
from curvoscope.losses import CrossEntropy, Objective
from curvoscope.losses.objectives import logits_of

_IDENTITIES = {"ViewBackward0", "UnsafeViewBackward0", "AliasBackward0", "ReshapeAliasBackward0"}


@dataclass(eq=False)
class LastProduct:
    """The product and the samples at it: X (T, a), w (a, classes) and a bias."""

    use: WeightUse
    weight: Tensor
    bias: str | None
    draws: SoftmaxCotangents
    inner: Tensor
    below: Tensor  # the cotangents of X, (n, T, a)


def last_product(
    objective: Objective,
    outputs: Any,
    batch: Batch,
    seeds: Sequence[SampleSeed],
    leaves: Mapping[str, Tensor],
    alone: Callable[[str], bool],
) -> LastProduct | None:
    """The last product, if the loss is the cross-entropy of its result and nothing else reads the logits.

    `alone`: whether one product only reads a parameter, all of which is one row of the sweep.
    """
    if not isinstance(objective, CrossEntropy) or objective.unembedding is not None or objective.bias is not None:
        return None
    logits = logits_of(outputs)
    node: Node | None = logits.grad_fn
    while node is not None and node.name() in _IDENTITIES:
        node = node.next_functions[0][0]
    if node is None or objective.class_axis(logits) not in (-1, logits.ndim - 1):
        return None
    uses, _ = find_uses([node], leaves)
    use = next((use for use in uses if use.node is node), None)
    if use is None or use.flipped or use.is_look_up or not alone(use.parameter):
        return None
    if len(use.factor) * use.width != logits.numel():
        return None
    bias = None
    if node.name() == "AddmmBackward0" and node.next_functions[0][0] is not None:
        variable = getattr(node.next_functions[0][0], "variable", None)
        bias = next((known for known, leaf in leaves.items() if leaf is variable), None)
        if bias is None or leaves[bias].ndim != 1:
            return None
    weight = leaves[use.parameter].detach()
    weight = weight.mT if use.transposed else weight
    constant = None if bias is None else leaves[bias].detach()
    if node.name() == "AddmmBackward0" and bias is None:  # a bias that is none of the blocks, nor of the graph
        constant = logits.detach().reshape(-1, use.width)[0] - use.factor[0] @ weight

    def columns(start: int, stop: int) -> Tensor:
        found = use.factor @ weight[:, start:stop]
        return found if constant is None else found.add_(constant[start:stop])

    draws = softmax_cotangents(objective, logits, batch.targets, columns)
    below = use.factor.new_zeros(len(seeds), *use.factor.shape)
    return LastProduct(use, weight, bias, draws, draws.inner_products(seeds), below)
