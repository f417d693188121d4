"""Leave no trace: what runs inside `undisturbed` changes neither the model nor any global setting."""

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from curvoscope.autodiff.kernels import REPLACED, attached, long_attention, not_rescaled, rescales, torch_recurrences
from curvoscope.errors import ModelError

BufferCopies = list[tuple[nn.Module, str, Tensor, Tensor]]


@contextmanager
def undisturbed(
    model: nn.Module, generators: Iterable[torch.Generator] = (), own_kernels: bool = True
) -> Iterator[None]:
    """Run the model so that it can be differentiated twice, and put everything back however the run ends.

    Inside, attention uses torch's MATH kernel, the one that has a second derivative, or ours if there are many
    scores and `own_kernels`; recurrent layers use torch's operations; the norm of DoRA has derivatives; compiled
    modules run eagerly; autocast is off and gradients are on. Afterwards the kernels, the random states (torch, NumPy,
    Python and `generators`), the model's mode, flags, gradients and buffers are what they were, also after an exception
    or Ctrl-C.
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
                settings.enter_context(not_rescaled(model))
                settings.enter_context(torch.compiler.set_stance("force_eager"))
                for device in {"cpu", *(parameter.device.type for parameter, _, _ in parameters)}:
                    settings.enter_context(torch.autocast(device, enabled=False))
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
def same_randomness(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Put the random states of torch, NumPy, Python and `generators` back at the end."""
    held = [(generator, generator.get_state()) for generator in generators]
    cpu, python, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(legacy)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for generator, state in held:
            generator.set_state(state)


def check_mode(model: nn.Module) -> None:
    """Raise if the loss depends on chance or on the cut into batches, or if the next run changes the weights."""
    for path, module in model.named_modules():
        name = f"{path or 'the model itself'} ({type(module).__name__})"
        if rescales(module) and 0 < module.config.rescale_every <= module.config.num_hidden_layers:
            raise ModelError("model", f"{name} scales weights when it next runs: run the model once before, as it is")
        if not module.training:
            continue
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise ModelError("model", f"dropout is active in {name}: the loss is random. Call model.eval() first")
        if isinstance(module, _BatchNorm):
            raise ModelError(
                "model",
                f"{name} is in training mode: the loss depends on the cut into batches. Call model.eval() first",
            )
        dropout = getattr(module, "dropout", None)
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and isinstance(dropout, float) and dropout > 0:
            raise ModelError("model", f"dropout is active in {name}: the loss is random. Call model.eval() first")


def _restore(buffers: BufferCopies) -> None:
    with torch.no_grad():
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            if not torch.equal(buffer, value):
                buffer.copy_(value)
