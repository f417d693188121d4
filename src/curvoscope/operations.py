"""The operations of an autograd graph, and those whose second derivatives were checked.

Torch differentiates each operation of a graph by a formula, and that formula by another one. The second is seldom
used, and some are wrong. `CHECKED` lists the operations for which a test of ours compares both with differences
(`torch.autograd.gradgradcheck`); a graph with any other operation is tested as a whole, when it is first used.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch.autograd.graph import Node

_OWN = "curvoscope."  # functions of this package: their tests are ours


class Operation(NamedTuple):
    """A node of a graph: its name, and which of its inputs have derivatives."""

    name: str
    inputs: tuple[bool, ...]


def operations(roots: Iterable[Node]) -> frozenset[Operation]:
    """The operations from which the roots were computed."""
    stack = list(roots)
    seen = set(stack)
    found = set()
    while stack:
        node = stack.pop()
        following = [before for before, _ in node.next_functions]
        found.add(Operation(_name(node), tuple(before is not None for before in following)))
        for before in following:
            if before is not None and before not in seen:
                seen.add(before)
                stack.append(before)
    return frozenset(found)


def unchecked(found: Iterable[Operation]) -> frozenset[Operation]:
    """Those of the operations whose second derivatives no test of ours has compared."""
    return frozenset(one for one in found if one.name not in CHECKED and not one.name.startswith(_OWN))


def _name(node: Node) -> str:
    """Torch's name of the operation; for a function written in Python its module and class."""
    function = getattr(type(node), "_forward_cls", None)
    return node.name() if function is None else f"{function.__module__}.{function.__qualname__}"


_NAMES = """
    AdaptiveAvgPool2D Add Addmm Addmv Alias Amax AsStrided AvgPool2D Baddbmm BinaryCrossEntropyWithLogits Bmm Cat
    ClampBackward1 ClampMax ClampMin Clone ConstantPadNd Convolution Cos Cumsum DiagEmbed Diagonal Div Dot Elu
    Embedding Erf Exp Expand Expm1 Flip Gather Gelu Glu Hardtanh HuberLoss IndexAdd Index IndexCopy IndexPut
    IndexSelect LeakyRelu LinalgVectorNorm Log1P Log LogSigmoid LogSoftmax Logsumexp MaskedFill Max MaxBackward1
    MaxPool2DWithIndices Maximum Mean MeanBackward1 Min Minimum Mish Mm MseLoss Mul MulBackward1 Mv NativeGroupNorm
    NativeLayerNorm Neg NllLoss2D NllLoss Permute Pow PowBackward1 PowBackward2 ProdBackward1 Reciprocal Relu Repeat
    ReshapeAlias Roll Rsqrt RsubBackward1 SafeSoftmax ScatterAdd Scatter Select Sigmoid Silu Sin Slice SmoothL1Loss
    Softmax Softplus Sort Split SplitWithSizes Sqrt Squeeze SqueezeBackward1 Stack Std Sub Sum SumBackward1 T Tanh
    ToCopy Topk Transpose Tril Triu Unbind Unfold UnsafeView Unsqueeze Var ViewAsReal View Where
"""  # those without an ending stand for ...Backward0

CHECKED = frozenset(name if "Backward" in name else f"{name}Backward0" for name in _NAMES.split()) | {
    "torch::autograd::AccumulateGrad",
    "torch::autograd::CopySlices",
}
