"""How a module is wired: the order of a layer's norms, and the layout of a fused attention weight.

Names of modules say little here. OLMo's `post_attention_layernorm` stands where Gemma's of that name does and not where
Llama's does, and a fused weight `c_attn` may hold query, key and value in any order. Both are read off the module: the
order of the norms from the source of its `forward`, the layout from one run on random numbers.
"""

import ast
import copy
import inspect
import re
import textwrap
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_TRANSPARENT = re.compile("Dropout|DropPath|Identity|LayerScale")
_NORM = re.compile("norm|^ln", re.IGNORECASE)
_SUM = "+"
_TOKENS = 3
_ROUNDING = 1e-6


# ---- norms


def norm_roles(layer: nn.Module, attention: str, query: str) -> dict[str, str | None] | None:
    """Where the norms of a layer stand, by the names of its children; None if its source does not tell.

    "norm1" and "norm2" are the norms before attention and before the feed-forward layer, or, if nothing is normalised
    before attention, those behind the sums with the stream. "norm1_post" and "norm2_post" are norms of an output before
    it is added to the stream. A norm that stands elsewhere, or in two places, is None.

    Args:
        layer: a module.
        attention: the name of its child that attends.
        query: the last name in the path of a query weight, by which other attention is known, such as "q_proj".
    """
    steps = _steps(layer)
    if attention not in steps:
        return None
    children = dict(layer.named_children())
    norms = {name for name in children if _NORM.search(name) or _NORM.search(type(children[name]).__name__)}
    attending = {
        name for name, child in children.items() if any(query in path.split(".") for path, _ in child.named_modules())
    }
    forwards = {name for name in steps if name in children} - norms - attending - {attention}
    if not forwards:
        return None
    padded = ["", "", *steps, ""]
    places = [(padded[i - 2 : i], name, padded[i + 1]) for i, name in enumerate(padded) if name in norms]
    pre = any(after == attention for _, _, after in places)
    found: dict[str, set[str | None]] = {}
    for (earlier, before), name, after in places:
        role: str | None = None
        if after == attention:
            role = "norm1"
        elif before == attention or before in forwards:
            role = "norm1_post" if before == attention else "norm2_post"
            role = None if after in forwards else role
        elif after in forwards and (pre or before != _SUM or earlier != attention):
            role = "norm2"
        elif before == _SUM and not pre:
            role = "norm1" if earlier == attention else "norm2" if earlier in forwards else None
        found.setdefault(name, set()).add(role)
    return {name: roles.pop() if len(roles) == 1 else None for name, roles in found.items()}


def _steps(layer: nn.Module) -> list[str]:
    """What `forward` does with the children of a module, in order: their names when they are called, and sums."""
    forward = inspect.unwrap(type(layer).forward)
    if not isinstance(forward, FunctionType):
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # no source
        return []
    function = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if function is None or not function.args.args:
        return []
    reader = _Reader(layer, function.args.args[0].arg)
    for statement in function.body:
        reader.visit(statement)
    return reader.steps


class _Reader(ast.NodeVisitor):
    """Walks through a forward method in the order in which it is run."""

    def __init__(self, layer: nn.Module, own: str) -> None:
        self._layer, self._own = layer, own
        self.steps: list[str] = []

    def visit_Call(self, node: ast.Call) -> None:
        """Arguments first. Children that only scale or drop entries are passed over."""
        self.generic_visit(node)
        name = self._attribute(node.func)
        child = None if name is None else self._layer._modules.get(name)
        if name is not None and child is not None and not _TRANSPARENT.search(type(child).__name__):
            self.steps.append(name)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Sums, but for those with a number."""
        self.generic_visit(node)
        if isinstance(node.op, ast.Add) and not any(isinstance(side, ast.Constant) for side in (node.left, node.right)):
            self.steps.append(_SUM)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """A sum as well."""
        self.visit(ast.BinOp(node.target, node.op, node.value))

    def visit_If(self, node: ast.If) -> None:
        """Only the branch that the layer takes, if one of its own flags decides."""
        test, wanted = node.test, True
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, wanted = test.operand, False
        name = self._attribute(test)
        flag = None if name is None else getattr(self._layer, name, None)
        if not isinstance(flag, bool):
            self.generic_visit(node)
            return
        for statement in node.body if flag == wanted else node.orelse:
            self.visit(statement)

    def _attribute(self, node: ast.expr) -> str | None:
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._own
        return node.attr if own and isinstance(node, ast.Attribute) else None


# ---- fused weights


class _Stopped(Exception):  # noqa: N818
    """The probe has seen enough."""


class _Given(nn.Module):
    """Stands in for the fused projection: its output is known."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        return self.output


class _Seen(nn.Module):
    """Stands in for the output projection: keeps its input and ends the run."""

    def __init__(self) -> None:
        super().__init__()
        self.input: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.input = x
        raise _Stopped


def holds_in_order(attention: nn.Module, fused: str, output: str, width: int, heads: int) -> bool:
    """Whether the fused projection has the outputs Q, K, V one after the other, each head after head.

    The module runs once, on a copy in which random numbers take the place of the fused projection's output. In what
    reaches the output projection, head h of the last token must depend on the last token alone in the columns of Q, on
    several tokens in those of K and V, on no other head, and be linear in V.

    Args:
        attention: a module that is called with one tensor (1, tokens, width).
        fused: name of its child with 3 `width` outputs.
        output: name of its child that reads the heads' outputs, (1, tokens, width).
        width: of all heads together.
        heads: their number.
    """
    with ExitStack() as settings:  # those of the caller do not matter
        for setting in (torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[])):
            settings.enter_context(setting)
        settings.enter_context(torch.autocast("cpu", enabled=False))
        settings.enter_context(torch.device("cpu"))
        return _holds_in_order(attention, fused, output, width, heads)


def _holds_in_order(attention: nn.Module, fused: str, output: str, width: int, heads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1, _TOKENS, 5 * width, generator=generator, dtype=torch.float64)
    x, cotangent, projected = numbers.split([width, width, 3 * width], -1)
    given, seen = _Given(projected.contiguous().requires_grad_()), _Seen()
    children = {name: nn.Identity() if isinstance(one, nn.Dropout) else one for name, one in attention._modules.items()}
    probe = copy.copy(attention)
    probe.__dict__ = {**attention.__dict__, "training": False}
    probe._modules = {**children, fused: given, output: seen}
    try:
        probe._buffers = {name: None if one is None else one.cpu() for name, one in attention._buffers.items()}
        type(probe).forward(probe, x)
    except _Stopped:
        pass
    except Exception:  # it takes other arguments, or does not go through the two children
        return False
    mixed = seen.input
    if not isinstance(mixed, Tensor) or mixed.shape != (1, _TOKENS, width) or not mixed.requires_grad:
        return False
    last, cotangents = (values[0, -1].unflatten(0, (heads, -1)) for values in (mixed, cotangent))
    for head in range(heads):
        value = (last[head] * cotangents[head]).sum()
        found = torch.autograd.grad(value, given.output, retain_graph=True)[0]
        if not _is_one_head(found, given.output.detach(), float(value.detach()), head, heads):
            return False
    return True


def _is_one_head(gradient: Tensor, at: Tensor, value: float, head: int, heads: int) -> bool:
    """Whether the gradient (1, tokens, 3 width) of a number is that of one head's output at the last token."""
    Q, K, V = parts = [part.unflatten(-1, (heads, -1)) for part in gradient[0].chunk(3, -1)]
    others = [i for i in range(heads) if i != head]
    if any(bool(part[:, others].any()) for part in parts) or bool(Q[:-1].any()):
        return False
    if not (bool(Q[-1].any()) and bool(K[:-1].any()) and bool(V[:-1].any())):
        return False
    linear = float((V * at[0].chunk(3, -1)[2].unflatten(-1, (heads, -1))).sum())
    return abs(linear - value) <= _ROUNDING * float(at.norm() * gradient.norm())
