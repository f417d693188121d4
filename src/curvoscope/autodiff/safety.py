"""A model that is not ours stays as it is: our runs leave no trace, and changes by others do not pass unnoticed.

What runs inside `undisturbed` changes neither the model nor any global setting. `WeightWatch` notices that weights
which are shared with a model have changed, without a copy of them: torch counts the changes of a tensor in place. It
does not count those through `.data`, so a hash of the bits of each tensor is remembered, which finds a change of one
entry, and its products with fixed random vectors, which find entries that have moved or changed their signs.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from curvoscope.autodiff.kernels import (
    REPLACED,
    attached,
    kept_activations,
    long_attention,
    not_rescaled,
    rescales,
    torch_recurrences,
)
from curvoscope.autodiff.uses import nodes_below
from curvoscope.errors import ChangedWeightsError, ModelError

BufferCopies = list[tuple[nn.Module, str, Tensor, Tensor]]

_ROW = 1024  # entries of a watched tensor that give one number
_STRIP = 2**20  # entries at a time, a multiple of it
_SAME = 1e3  # units of rounding, of the length of a row, that the order of a sum may change


@contextmanager
def undisturbed(
    model: nn.Module, generators: Iterable[torch.Generator] = (), own_kernels: bool = True
) -> Iterator[None]:
    """Run the model so that it can be differentiated twice, and put everything back however the run ends.

    Inside, attention uses torch's MATH kernel, the one that has a second derivative, or ours if there are many
    scores and `own_kernels`; recurrent layers use torch's operations; the norm of DoRA has derivatives; compiled
    modules run eagerly; activations are kept, not checkpointed; autocast is off and gradients are on. Afterwards the
    kernels, the random states (torch, NumPy, Python and `generators`), the model's mode, flags, gradients and buffers
    are what they were, also after an exception or Ctrl-C.
    """
    with same_randomness(generators):
        modes = [(module, module.training) for module in model.modules()]
        parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
        buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        fast_path = torch.backends.mha.get_fastpath_enabled()
        try:
            with ExitStack() as settings:
                settings.enter_context(torch.inference_mode(False))
                settings.enter_context(torch.enable_grad())
                settings.enter_context(sdpa_kernel(SDPBackend.MATH))
                settings.enter_context(attached(model))
                if own_kernels:
                    settings.enter_context(long_attention(REPLACED))
                settings.enter_context(torch_recurrences(model))
                settings.enter_context(_without_cached_weights())
                settings.enter_context(kept_activations)
                settings.enter_context(not_rescaled(model))
                settings.enter_context(torch.compiler.set_stance("force_eager"))
                settings.enter_context(_without_autocast(parameter for parameter, _, _ in parameters))
                torch.backends.mha.set_fastpath_enabled(False)  # its kernels have no derivative
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, mode in modes:
                module.training = mode
            for parameter, flag, gradient in parameters:
                parameter.requires_grad_(flag)
                parameter.grad = gradient
            _restore(buffers)


@contextmanager
def _without_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, operations on the devices of the tensors, and on the CPU, compute in the precision of their inputs."""
    with ExitStack() as settings:
        for device in {"cpu", *(tensor.device.type for tensor in tensors)}:
            settings.enter_context(torch.autocast(device, enabled=False))
        yield


def within(module: nn.Module, tensors: Mapping[str, Tensor], action: Callable[[], Any]) -> Any:
    """What the action returns while the module has these parameters and buffers, by path.

    They are put back in reverse: a module with two names, whose tensors two paths replace, gets its own ones again.
    """
    held: list[tuple[dict[str, Any], str, Tensor | None]] = []
    try:
        for path, tensor in tensors.items():
            parent, _, name = path.rpartition(".")
            owner = module.get_submodule(parent)
            table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
            held.append((table, name, table[name]))
            table[name] = tensor
        return action()
    finally:
        for table, name, own in reversed(held):
            table[name] = own


@contextmanager
def same_randomness(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Put the random states of torch, NumPy, Python and `generators` back at the end."""
    held = RandomStates(generators)
    try:
        yield
    finally:
        held.restore()


class RandomStates:
    """The random states of torch, NumPy, Python and `generators` at this moment."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._held = [(generator, generator.get_state()) for generator in generators]
        self._cpu, self._python, self._legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        np.random.set_state(self._legacy)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._held:
            generator.set_state(state)


@contextmanager
def _without_cached_weights() -> Iterator[None]:
    """Inside, parametrised weights are computed anew: `parametrize.cached` would keep those of one pass for all."""
    held = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = held


@contextmanager
def in_modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Inside, modules are in training mode (True) or in evaluation mode, whatever they have been switched to."""
    switched = [(module, module.training) for module, mode in modes.items() if module.training is not mode]
    try:
        for module, _ in switched:
            module.training = modes[module]
        yield
    finally:
        for module, mode in switched:
            module.training = mode


def check_mode(model: nn.Module) -> None:
    """Raise if the loss is random or depends on how the data is batched, or if the next run changes the weights."""
    for path, module in model.named_modules():
        name = f"{path or 'the model itself'} ({type(module).__name__})"
        if rescales(module) and 0 < module.config.rescale_every <= module.config.num_hidden_layers:
            raise ModelError("model", f"{name} rescales its weights on the next forward pass; run the model once first")
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            raise ModelError("model", f"{name} is quantised, and has no derivatives; use the model before quantisation")
        if not module.training:
            continue
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise ModelError("model", f"dropout is active in {name}: the loss is random. Call model.eval() first")
        if isinstance(module, _BatchNorm):
            raise ModelError(
                "model",
                f"{name} is in training mode: the loss depends on how the data is batched. Call model.eval() first",
            )
        dropout = getattr(module, "dropout", None)
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and isinstance(dropout, float) and dropout > 0:
            raise ModelError("model", f"dropout is active in {name}: the loss is random. Call model.eval() first")


def check_reads(model: nn.Module, outputs: Sequence[Tensor]) -> None:
    """Raise if outputs of a run at other weights depend on the model's own: these are read from somewhere else than
    the modules that hold them, and the derivatives in them would be missing."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    nodes = nodes_below([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None])
    leaves = [*outputs, *(node.variable for node in nodes if hasattr(node, "variable"))]
    name = next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
    if name is not None:
        raise ModelError(
            name,
            "acts on the outputs through another reference than the attribute of its module (a list, a closure, or a "
            "tensor made of it in an earlier pass): its derivatives cannot be taken. Read the attribute in `forward`",
        )


def _restore(buffers: BufferCopies) -> None:
    with torch.no_grad():
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            if not torch.equal(buffer, value):
                buffer.copy_(value)


# ---- changes by others


class WeightWatch:
    """The state of some tensors when the watch began.

    Args:
        tensors: by path, contiguous; they share memory with the tensors that may change.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._versions = self._counts()
        self._hashes, self._projections = self._hashed(), self._projected()
        self._lengths = self._by_rows(lambda rows: rows.norm(dim=1))
        self._trusted = False

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Compare hashes when it begins and when it ends, but not at each check inside: they read all weights."""
        self.check()
        before, self._trusted = self._trusted, True
        try:
            yield
        finally:
            self._trusted = before
        self.check()

    def check(self) -> None:
        """Raise if a tensor has changed."""
        if self._counts() == self._versions and (self._trusted or self._is_same()):
            return
        counts = zip(self._tensors, self._counts(), self._versions, strict=True)
        changed = [path for path, now, then in counts if now != then]
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise ChangedWeightsError(
            "model",
            f"its weights have changed since the Hessian was made ({shown or 'through .data'}); make a new one, or "
            "give copy=True, which keeps the weights of the old one",
        )

    def _counts(self) -> list[int]:
        return [tensor._version for tensor in self._tensors.values()]

    def _is_same(self) -> bool:
        """Whether hashes and projections are what they were."""
        if self._hashed() != self._hashes:
            return False
        several = zip(self._projected(), self._projections, self._lengths, self._tensors.values(), strict=True)
        return all(_agree(now, then, _SAME * _epsilon(tensor) * length) for now, then, length, tensor in several)

    def _projected(self) -> list[Tensor]:
        return self._by_rows(_projection)

    def _by_rows(self, number: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with _without_autocast(self._tensors.values()):
            return [_by_rows(tensor, number) for tensor in self._tensors.values()]

    def _hashed(self) -> list[int]:
        """The exclusive or of the bits of all entries, which does not depend on the order of the work."""
        full = [tensor for tensor in self._tensors.values() if tensor.numel()]
        if not full or not hasattr(torch, "hash_tensor"):  # before torch 2.9
            return []
        found: list[int] = torch.stack([torch.hash_tensor(_real(tensor)) for tensor in full]).tolist()
        return found


def _by_rows(tensor: Tensor, number: Callable[[Tensor], Tensor]) -> Tensor:
    """A number (rows,) of each row of `_ROW` entries of a tensor; the last row may be shorter."""
    flat = _real(tensor).view(-1)
    found = [flat.new_zeros(0, dtype=torch.float64)]
    for strip in flat.split(_STRIP):
        values = strip if strip.is_floating_point() else strip.to(torch.float32)
        whole = len(values) // _ROW * _ROW
        for rows in (values[:whole].view(-1, _ROW), values[None, whole:]):
            if rows.numel():
                found.append(number(rows).double())
    return torch.cat(found)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _projection(rows: Tensor) -> Tensor:
    return rows @ _direction(rows.dtype, rows.device)[: rows.shape[1]]


@lru_cache(maxsize=4)
def _direction(dtype: torch.dtype, device: torch.device) -> Tensor:
    found = torch.randn(_ROW, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return found.to(device, dtype)


def _epsilon(tensor: Tensor) -> float:
    """Of the numbers that projections are computed in."""
    return torch.finfo(tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.float32).eps


def _agree(now: Tensor, then: Tensor, allowed: Tensor) -> bool:
    """Whether projections are the same; NaN is equal to itself."""
    same = ((now - then).abs() <= allowed) | (now == then) | (now.isnan() & then.isnan())
    return bool(same.all())


def can_be_watched(tensor: Tensor) -> bool:
    """Whether changes of a tensor are counted, and its entries are plain numbers."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous() and not tensor.is_inference()


def rewritten_by(model: nn.Module) -> set[int]:
    """The ids of parameters that a model changes as it runs: embeddings with `max_norm`, what it is about to scale."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    scaled = (module for module in model.modules() if rescales(module))
    return {id(table.weight) for table in tables if table.max_norm is not None} | {
        id(parameter) for module in scaled for parameter in module.parameters()
    }
