"""The layers of a model, and their calls: who wants to run a layer once more, on its own, takes them over here."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from curvoscope.errors import ModelError

LayerCalled = Callable[[str, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class NotRepeatableError(ModelError):
    """A layer cannot be run a second time on its own."""


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


def listed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The members of the outermost module lists, by path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found |= {f"{path}.{name}" if path else name: child for name, child in module.named_children()}
    return found


@contextmanager
def replaced_forward(layers: Mapping[str, nn.Module], call: LayerCalled) -> Iterator[None]:
    """Inside, a call of a layer is `call(path, layer, forward, args, kwargs)`, but for those that it makes itself."""
    inside = [False]

    def replaced(path: str, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return forward(*args, **kwargs)
            inside[0] = True
            try:
                return call(path, layer, forward, args, kwargs)
            finally:
                inside[0] = False

        return run

    chosen = {id(module): (path, module) for path, module in layers.items()}
    held = [(module, "forward" in vars(module), module.forward) for _, module in chosen.values()]
    try:
        for path, module in chosen.values():
            module.forward = replaced(path, module, module.forward)
        yield
    finally:
        for module, own, forward in held:
            if own:
                module.forward = forward
            else:
                del module.forward


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Inside, a model of Hugging Face keeps no keys and values of the past: a layer run twice would see them twice."""
    found: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    configs = [config for config in found if getattr(config, "use_cache", None) is True]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True
