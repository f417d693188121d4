"""Replacements for operations of a model whose second derivatives are slow, wrong or missing.

**Layer norm**: a dozen operations instead of three dozen. For each token, with n features, x̂ = r (x - mean x),
r = 1/sqrt(var x + eps) and the projection away from 1 and x̂

    p(h) = h - mean h - x̂ mean(h x̂),

y = γ x̂ + β has the backward pass, with h = γ gy and q = p(h),

    gx = r q        gγ = sum_t gy x̂        gβ = sum_t gy.

Directions (a, c, e) of (gx, gγ, gβ) go back through it to

    gy:  γ A + c x̂ + e                                                  A = r p(a)
    x:   -r (r mean(a x̂) q + mean(h x̂) A + r mean(a q) x̂) + r p(c gy)
    γ:   sum_t gy A

**Activations**: a product with the Hessian costs three multiplications. y = f(x) entry by entry has the backward pass
gx = f'(x) gy, whose derivatives are f'(x) and f''(x) gy; both are kept. Written with primitives, as GPT-2's GELU is,
they take some forty operations on the widest tensors of the network.

**Attention**: torch's own is replaced by ours (`attention.sdpa`) when its scores would exceed the memory.

**DoRA**: a layer computes x W' with the columns W'_j = m_j V_j / |V_j|, V = W + s A B. PEFT detaches the norms |V_j|
from the graph: training costs less, and its gradient is not that of the loss. A Hessian is the second derivative of the
loss, so that in our passes nothing is detached there.

**Recurrences**: transformers' models of state spaces and RWKV call a fused kernel if its package is installed, or their
own torch code otherwise; only that one has second derivatives.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from curvoscope import checks
from curvoscope.attention.dot_product import sdpa
from curvoscope.autodiff.graph import tangents_alone

_KINDS = (nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.Softsign, nn.LogSigmoid)
_LIBRARY = "transformers.activations"  # every class there acts on each entry alone
_MANY = 2**22  # scores from which our attention is the faster one, too

_MODELS, _CHOOSING = "transformers.models.", "transformers.integrations.hub_kernels"
_FLAGS = {"is_fast_path_available": False, "rwkv_cuda_kernel": None}  # of a model's file: whether there is a kernel

_torch_sdpa: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention


# ---- layer norm


class _LayerNorm(torch.autograd.Function):
    """x -> y, given y, the mean and r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, y: Tensor, mean: Tensor, r: Tensor) -> Tensor:
        ctx.save_for_backward(x, gamma, mean, r)
        ctx.biased = beta is not None
        return y.clone()  # not a view: the model may go on in place

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            gx, ggamma, gbeta = _LayerNormBackward.apply(gy, x, gamma, mean, r)
        else:
            wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
            gx, ggamma, gbeta = _layer_norm_backward(gy, x, mean, r, gamma, wanted)
        return gx, ggamma, gbeta if ctx.biased else None, None, None, None


class _LayerNormBackward(torch.autograd.Function):
    """(gy, x, γ) -> gx, gγ, gβ."""

    @staticmethod
    def forward(ctx: Any, gy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor | None, ...]:
        found = _layer_norm_backward(gy, x, mean, r, gamma, [True, True, True])
        assert found[0] is not None
        centred = (x - mean) * r
        ctx.save_for_backward(gy, x, gamma, mean, r, centred, found[0] / r, (gamma * gy * centred).mean(-1, True))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Tensor | None, c: Tensor | None, e: Tensor | None) -> tuple[Tensor | None, ...]:
        gy, x, gamma, mean, r, centred, q, h = ctx.saved_tensors
        _, needs_x, needs_gamma, *_ = ctx.needs_input_grad
        if tangents_alone():
            needs_x = needs_gamma = False
        to_gy = to_x = to_gamma = None
        if a is not None:
            A = _layer_norm_backward(a, x, mean, r, torch.ones_like(gamma), [True, False, False])[0]
            assert A is not None
            to_gy = A * gamma
            if needs_x:
                n = x.shape[-1]
                to_x = A * (-r * h)
                to_x = torch.addcmul(to_x, q, (a * centred).sum(-1, True) * (r * r / -n))
                to_x = torch.addcmul(to_x, centred, (a * q).sum(-1, True) * (r * r / -n))
            if needs_gamma:
                to_gamma = (gy * A).sum(list(range(gy.ndim - 1)))
        if c is not None:
            to_gy = centred * c if to_gy is None else torch.addcmul(to_gy, centred, c)
            if needs_x:
                more = _layer_norm_backward(gy, x, mean, r, c, [True, False, False])[0]
                to_x = more if to_x is None else to_x + more
        if e is not None:
            to_gy = e.expand_as(gy) if to_gy is None else to_gy + e
        return to_gy, to_x, to_gamma, None, None


def _layer_norm_backward(
    gy: Tensor, x: Tensor, mean: Tensor, r: Tensor, gamma: Tensor, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """r p(γ gy), sum_t gy x̂ and sum_t gy, as far as they are wanted."""
    shape = [x.shape[-1]]
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.native_layer_norm_backward(
        gy.contiguous(), x, shape, mean, r, gamma, torch.zeros_like(gamma), wanted
    )
    return found


def _is_layer_norm(module: nn.Module) -> bool:
    """Whether the module is a layer norm over the last axis with a scale γ."""
    known = type(module) is nn.LayerNorm and len(module.normalized_shape) == 1
    return known and module.weight is not None


def layer_norm(module: nn.LayerNorm, x: Tensor, y: Tensor) -> Tensor:
    """y = module(x), with the second derivative of above."""
    with torch.no_grad():
        _, mean, r = torch.native_layer_norm(x.contiguous(), [x.shape[-1]], None, None, module.eps)
    result: Tensor = _LayerNorm.apply(x.contiguous(), module.weight, module.bias, y.detach(), mean, r)
    return result


# ---- activations


class _Pointwise(torch.autograd.Function):
    """x -> y, given y, f'(x) and f''(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(x, first, second)
        return y.clone()  # not a view: the model may go on in place

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None, None]:
        x, first, second = ctx.saved_tensors
        return (
            _Derivative.apply(gy, x, first, second) if torch.is_grad_enabled() else gy * first,
            None,
            None,
            None,
        )


class _Derivative(torch.autograd.Function):
    """(gy, x) -> f'(x) gy."""

    @staticmethod
    def forward(ctx: Any, gy: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(first, gy * second)
        return gy * first

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        first, second = ctx.saved_tensors
        return direction * first, None if tangents_alone() else direction * second, None, None


def pointwise(function: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """y = function(x), with derivatives of `function` that are known beforehand."""
    point = x.detach().requires_grad_()
    with torch.enable_grad():
        (first,) = torch.autograd.grad(function(point).sum(), point, create_graph=True)
        second = torch.autograd.grad(first.sum(), point)[0] if first.requires_grad else torch.zeros_like(point)
    result: Tensor = _Pointwise.apply(x, y.detach(), first.detach(), second)
    return result


def _is_pointwise(module: nn.Module) -> bool:
    """Whether the module is a smooth function of each entry alone."""
    known = type(module) in _KINDS or type(module).__module__ == _LIBRARY
    return known and not getattr(module, "inplace", False) and not any(module.parameters())


# ---- weight norm


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / |v|, the norm over all axes but `dim`, from operations that torch differentiates rightly."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


# The second derivative of torch's fused kernel is wrong in v.
REPLACED = {torch._weight_norm: _weight_norm}


# ---- attention


@contextmanager
def long_attention(others: Mapping[Callable[..., Any], Callable[..., Any]] | None = None) -> Iterator[None]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` of many scores is `sdpa`; of few, torch's own.

    It is replaced by its name in torch, which `nn.MultiheadAttention` and the models of transformers look up, and,
    for this thread, also if a model has imported it under another name. `others`: more functions of torch, and what
    replaces them for this thread.
    """
    with _by_name, _WhereverCalled({_torch_sdpa: _by_size, **(others or {})}):
        yield


def _by_size(query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Tensor:
    many = not query.is_nested and query.numel() // max(1, query.shape[-1]) * key.shape[-2] >= _MANY
    dropout = more[1] if len(more) > 1 else options.get("dropout_p", 0.0)
    return (sdpa if many and not dropout else _torch_sdpa)(query, key, value, *more, **options)


class _ByName:
    """Replaces the name while any thread is inside. Replacements by others are left alone."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if functional.scaled_dot_product_attention is _torch_sdpa:
                functional.scaled_dot_product_attention = _by_size

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and functional.scaled_dot_product_attention is _by_size:
                functional.scaled_dot_product_attention = _torch_sdpa


_by_name = _ByName()


class _WhereverCalled(TorchFunctionMode):
    """Catches calls of torch's functions. Functions of torch that call them in turn run outside of the mode."""

    def __init__(self, replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._replaced.get(func, func)(*args, **(kwargs or {}))


# ---- checkpoints


class _KeptActivations:
    """While any thread is inside, torch's activation checkpointing keeps all activations.

    What it computes anew in a backward pass, it computes at the weights and with the kernels of that moment.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._own = {name: vars(checkpoint)[name] for name in self._replaced()}

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            vars(checkpoint).update(self._replaced())

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                vars(checkpoint).update(self._own)

    def _replaced(self) -> dict[str, Any]:
        return {"CheckpointFunction": _RunAtOnce, "_checkpoint_without_reentrant_generator": _yielding_once}


class _RunAtOnce:
    """In place of the function that runs without a graph, and again in the backward pass."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
        return function(*arguments)


def _yielding_once(*_: Any, **__: Any) -> Iterator[None]:
    """In place of what drops saved tensors while a function runs."""
    yield


kept_activations = _KeptActivations()


# ---- DoRA


@contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Inside, the norms of the model's DoRA layers are part of the graph."""
    with ExitStack() as stack:
        for module in model.modules():
            kind = type(module)
            if kind.__name__.startswith("Dora") and kind.__module__.startswith("peft."):
                stack.enter_context(forward_replaced(module, partial(_run, module.forward)))
        yield


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module computes another function."""
    own = {name: value for name, value in vars(module).items() if name == "forward"}
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        vars(module).update(own)


def _run(forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    with _Attached():
        return forward(*inputs, **keywords)


class _Attached(TorchFunctionMode):
    """`detach` does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, or give back the tensor that was to be detached."""
        return args[0] if func is torch.Tensor.detach else func(*args, **(kwargs or {}))


# ---- recurrences


_kernel_lock = threading.Lock()
_kernels_inside: dict[tuple[str, str], tuple[Any, int]] = {}  # what was replaced, and how many are inside


@contextmanager
def torch_recurrences(model: nn.Module) -> Iterator[None]:
    """Inside, the recurrent layers of a model of transformers run torch's operations only."""
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[name] for name in names if name.startswith(_MODELS) and name in sys.modules]
    with _kernel_lock:
        replaced = [(file, name) for file in files for name in vars(file) if _is_kernel(file, name)]
        for file, name in replaced:
            original, count = _kernels_inside.get((file.__name__, name), (getattr(file, name), 0))
            _kernels_inside[file.__name__, name] = original, count + 1
            setattr(file, name, _FLAGS[name] if name in _FLAGS else inspect.unwrap(original))
    try:
        yield
    finally:
        with _kernel_lock:
            for file, name in replaced:
                original, count = _kernels_inside.pop((file.__name__, name))
                if count > 1:
                    _kernels_inside[file.__name__, name] = original, count - 1
                else:
                    setattr(file, name, original)


def _is_kernel(file: ModuleType, name: str) -> bool:
    """Whether a name of a model's file stands for a kernel, or did before it was replaced."""
    value = vars(file)[name]
    chosen = isinstance(value, FunctionType) and value.__globals__.get("__name__") == _CHOOSING
    return name in _FLAGS or (file.__name__, name) in _kernels_inside or (chosen and hasattr(value, "__wrapped__"))


def rescales(module: nn.Module) -> bool:
    """Whether a module is about to scale weights in place, as RWKV does when it first runs in evaluation mode."""
    return getattr(module, "layers_are_rescaled", None) is module.training


@contextmanager
def not_rescaled(model: nn.Module) -> Iterator[None]:
    """Inside, no module scales its weights in place."""
    found: Iterator[Any] = (module for module in model.modules() if rescales(module))
    held = [(module, module.layers_are_rescaled, module.config.rescale_every) for module in found]
    try:
        for module, _, _ in held:
            module.config.rescale_every = 0
        yield
    finally:
        for module, rescaled, every in held:
            module.layers_are_rescaled, module.config.rescale_every = rescaled, every


# ---- in a model


@contextmanager
def kept_derivatives(model: nn.Module) -> Iterator[None]:
    """Inside, activations and layer norms have derivatives of ours; their outputs are the same to the bit."""
    running: set[nn.Module] = set()  # those whose derivatives are being computed, by running them

    def replace(module: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        known = len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(output, Tensor)
        if not known or module in running or not output.requires_grad:
            return None
        if isinstance(module, nn.LayerNorm):
            return layer_norm(module, inputs[0], output)
        running.add(module)
        try:
            return pointwise(module, inputs[0], output)
        finally:
            running.discard(module)

    alike = (module for module in model.modules() if _is_pointwise(module) or _is_layer_norm(module))
    chosen = [module for module in alike if checks.is_plain(module)]
    handles = [module.register_forward_hook(replace) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
