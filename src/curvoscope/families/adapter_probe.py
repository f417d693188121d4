"""Whether two parameters of a module are the factors of a low-rank adapter: a run on random numbers tells.

The module must compute x W + b + s x A B with matrices A (a, r) and B (r, p), whatever its class and its names.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from curvoscope.blocks import STORED, TRANSPOSED, Layout

_TOKENS = 3
_ROUNDING = 1e-9  # relative, in float64


@dataclass(frozen=True)
class FactorPair:
    """Two parameters of a module that may be A (a, r) and B (r, p) of its weight (a, p)."""

    names: tuple[str, str]
    layouts: tuple[Layout, Layout]
    shape: tuple[int, int]
    rank: int
    base: str | None


class AdapterProbe:
    """A module of a model, run on random numbers in float64, with other parameters than its own. Nothing is changed."""

    def __init__(self, module: nn.Module, pairs: Sequence[FactorPair]) -> None:
        named = [*module.named_parameters(), *module.named_buffers()]
        self._tensors = {n: one.detach().double() if one.is_floating_point() else one.detach() for n, one in named}
        self._copy = copy.deepcopy(module, {id(one): one for _, one in named}).eval()
        for one in self._copy.modules():
            for hooks in (one._forward_hooks, one._forward_pre_hooks):
                hooks.clear()
        self._generator = torch.Generator().manual_seed(0)
        self._pairs = pairs
        self._without = {name: torch.zeros_like(self._tensors[name]) for pair in pairs for name in pair.names}

    def acting(self) -> list[tuple[FactorPair, float, Layout | None]]:
        """The pairs that act as A and B, with s and with the layout of W in its parameter, if one holds it."""
        found: list[tuple[FactorPair, float, Layout | None]] = []
        taken: set[str] = set()
        for pair in self._pairs:
            scale = None if taken & set(pair.names) else self._scale(pair)
            if scale is not None:
                taken |= set(pair.names)
                found.append((pair, scale, self._layout(pair)))
        return found

    def _run(self, x: Tensor, changed: Mapping[str, Tensor]) -> Tensor | None:
        try:
            with torch.no_grad():
                found = functional_call(self._copy, {**self._tensors, **changed}, (x,))
        except Exception:  # whatever a module that is not such a layer says to such a call
            return None
        return found if isinstance(found, Tensor) else None

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(
            next(iter(self._tensors.values())).device
        )

    def _scale(self, pair: FactorPair) -> float | None:
        """s, if A and B alone add s x A B to an output that is otherwise x W + b with W not zero."""
        (a, p), r = pair.shape, pair.rank
        x, A, B = self._drawn(_TOKENS, a), self._drawn(a, r), self._drawn(r, p)
        stored = {
            n: one if layout == STORED else one.T
            for n, one, layout in zip(pair.names, (A, B), pair.layouts, strict=True)
        }
        none = self._without
        own, alone, nothing = (
            self._run(x, none),
            self._run(x, {**none, **stored}),
            self._run(torch.zeros_like(x), none),
        )
        if own is None or alone is None or nothing is None or not own.shape == alone.shape == (_TOKENS, p):
            return None
        expected, added = x @ A @ B, alone - own
        scale = float((added * expected).sum() / expected.square().sum())
        tolerance = _ROUNDING * max(float(alone.abs().max()), float(own.abs().max()))
        is_sum = bool((added - scale * expected).abs().max() <= tolerance) and abs(scale) * expected.abs().max() > (
            100 * tolerance
        )
        return scale if is_sum and bool((own - nothing).abs().max() > tolerance) else None

    def _layout(self, pair: FactorPair) -> Layout | None:
        """How W stands in its parameter, if one holds it."""
        if pair.base is None:
            return None
        stored, none = self._tensors[pair.base], self._without
        x = self._drawn(_TOKENS, pair.shape[0])
        own, nothing = self._run(x, none), self._run(torch.zeros_like(x), none)
        if own is None or nothing is None:
            return None
        for layout, W in ((TRANSPOSED, stored.T), (STORED, stored)):
            if W.shape == pair.shape and bool((own - nothing - x @ W).abs().max() <= _ROUNDING * own.abs().max()):
                return layout
        return None
