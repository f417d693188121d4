"""The last product of a model with a weight, when the loss is the cross-entropy of its result.

Its logits need not be kept: cotangents are made of a few columns of the vocabulary at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.cotangents import SampleSeed, SoftmaxCotangents, softmax_cotangents
from curvoscope.autodiff.uses import WeightUse, find_uses
from curvoscope.losses import CrossEntropy, Objective
from curvoscope.losses.objectives import logits_of

_FACTORS = {"MmBackward0": 0, "AddmmBackward0": 1}  # and the place of X among the inputs
_IDENTITIES = {"ViewBackward0", "UnsafeViewBackward0", "AliasBackward0", "ReshapeAliasBackward0"}


@dataclass(eq=False)
class LastProduct:
    """The product and the samples at it: X (T, a), w (a, classes) and a bias. `use`: None if w has no derivatives."""

    node: Node
    use: WeightUse | None
    weight: Tensor
    bias: str | None
    draws: SoftmaxCotangents
    inner: Tensor
    below: Tensor  # the cotangents of X, (n, T, a)

    @property
    def kind(self) -> tuple[str | None, bool, int, str | None]:
        """What the passes of a chunk must have in common: the parameter, whether transposed, the classes, the bias."""
        use, classes = self.use, self.draws.classes
        return (None, False, classes, self.bias) if use is None else (use.parameter, use.transposed, classes, self.bias)

    @property
    def edge(self) -> GradientEdge | None:
        """Where the cotangents of X go on; None if X has no derivatives."""
        before, output = self.node.next_functions[_FACTORS[self.node.name()]]
        return None if before is None else GradientEdge(before, output)


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
    fixed = _fixed_weight(node) if use is None else None
    if use is None and (fixed is None or fixed.shape[1] != logits.shape[-1]):
        return None
    if use is not None and (use.flipped or use.is_look_up or not alone(use.parameter)):
        return None
    if use is not None and use.region != tuple(slice(0, side) for side in leaves[use.parameter].shape):
        return None
    if use is not None and len(use.factor) * use.width != logits.numel():
        return None
    bias = None
    if node.name() == "AddmmBackward0" and node.next_functions[0][0] is not None:
        variable = getattr(node.next_functions[0][0], "variable", None)
        bias = next((known for known, leaf in leaves.items() if leaf is variable), None)
        if bias is None or leaves[bias].ndim != 1:
            return None
    if fixed is not None:  # X is not known, and the logits are there
        draws = softmax_cotangents(objective, logits, batch.targets)
        below = fixed.new_zeros(len(seeds), logits.numel() // logits.shape[-1], len(fixed))
        return LastProduct(node, None, fixed, bias, draws, draws.inner_products(seeds), below)
    assert use is not None
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
    return LastProduct(node, use, weight, bias, draws, draws.inner_products(seeds), below)


def _fixed_weight(node: Node) -> Tensor | None:
    """w (a, classes), if the node is X w + b and w has no derivatives."""
    if node.name() not in _FACTORS or node.next_functions[_FACTORS[node.name()] + 1][0] is not None:
        return None
    if node.name() == "AddmmBackward0" and (node._saved_alpha != 1 or node._saved_beta != 1):  # type: ignore[attr-defined]
        return None
    found: Tensor | None = node._saved_mat2  # type: ignore[attr-defined]
    return found
