"""Softmaxes in autograd's graph: an operation of torch, or one that a model writes out."""

from typing import Any

from torch.autograd.graph import GradientEdge

_SOFTMAX = frozenset({"SoftmaxBackward0", "SafeSoftmaxBackward0", "_SafeSoftmaxBackward0"})
_MASKS = frozenset({"MulBackward0", "MaskedFillBackward0", "WhereBackward0"})
_AROUND_SUMS = frozenset(
    {"AddBackward0", "ClampBackward0", "ClampMinBackward0", "UnsqueezeBackward0", "ExpandBackward0"}
)


def softmax_of(node: Any) -> tuple[GradientEdge, int] | None:
    """Where the logits of a softmax come from and the axis that it normalises, or None if the node is none.

    It is an operation of torch, or the last one of e / e.sum(axis) with e = exp(x), possibly masked and with a constant
    added to the sum, or of exp(x) with x = log_softmax(y) or y - logsumexp(y).
    """
    if node.name() in _SOFTMAX:
        return GradientEdge(*node.next_functions[0]), _axis(node._saved_dim)
    if node.name() == "ExpBackward0":
        return _log_softmax(node.next_functions[0][0])
    above, below = [before for before, _ in node.next_functions] if node.name() == "DivBackward0" else (None, None)
    if above is None or below is None:
        return None
    total = _before(below, _AROUND_SUMS)
    if total.name() != "SumBackward1" or len(total._saved_dim) != 1 or total.next_functions[0][0] != above:
        return None
    powers = _before(above, _MASKS)
    if powers.name() != "ExpBackward0":
        return None
    return GradientEdge(*powers.next_functions[0]), _axis(total._saved_dim[0])


def _log_softmax(node: Any) -> tuple[GradientEdge, int] | None:
    """Where the logits of a log-softmax come from and its axis, or None if the node is none."""
    if node is None:
        return None
    if node.name() == "LogSoftmaxBackward0":
        return GradientEdge(*node.next_functions[0]), _axis(node._saved_dim)
    total = _before(node.next_functions[1][0], _AROUND_SUMS) if node.name() == "SubBackward0" else None
    if total is None or total.name() != "LogsumexpBackward0" or len(total._saved_dim) != 1:
        return None
    same = total.next_functions[0] == node.next_functions[0]
    return (GradientEdge(*node.next_functions[0]), _axis(total._saved_dim[0])) if same else None


def _before(node: Any, passed: frozenset[str]) -> Any:
    """The node before those with the names `passed` that have one operand that is not constant."""
    while node is not None and node.name() in passed:
        others = [before for before, _ in node.next_functions if before is not None]
        if len(others) != 1:
            break
        node = others[0]
    return node


def _axis(saved: int) -> int:
    """An axis as autograd keeps it: negative numbers are unsigned ones of 64 bits."""
    return saved - 2**64 if saved >= 2**63 else saved
