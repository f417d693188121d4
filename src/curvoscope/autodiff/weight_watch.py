"""Notice that weights which are shared with a model have changed, without a copy of them.

Torch counts the changes of a tensor in place. It does not count those through `.data`, so a hash of the bits of each
tensor and a few of its entries are remembered as well.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from curvoscope.autodiff.kernels import rescales
from curvoscope.errors import ChangedWeightsError

_ENTRIES = 16  # remembered of each tensor


class WeightWatch:
    """The state of some tensors when the watch began.

    Args:
        tensors: by path, contiguous; they share memory with the tensors that may change.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._versions = self._counts()
        self._views = [tensor.view(-1)[:: max(1, tensor.numel() // _ENTRIES)] for tensor in self._tensors.values()]
        self._entries, self._hashes = self._bits(), self._hashed()
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
        if (
            self._counts() == self._versions
            and torch.equal(self._bits(), self._entries)
            and (self._trusted or self._hashed() == self._hashes)
        ):
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

    def _bits(self) -> Tensor:
        """The remembered entries as bytes: NaN is equal to itself."""
        return torch.cat(self._views).view(torch.uint8) if self._views else torch.empty(0)

    def _hashed(self) -> list[int]:
        """The exclusive or of the bits of all entries, which does not depend on the order of the work."""
        full = [tensor for tensor in self._tensors.values() if tensor.numel()]
        if not full or not hasattr(torch, "hash_tensor"):  # before torch 2.9
            return []
        found: list[int] = torch.stack([torch.hash_tensor(tensor) for tensor in full]).tolist()
        return found


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
