"""The attention layer of the paper's small network (d = 16): its exact Hessian, and variants of it."""

from typing import Any

import torch
from torch import Tensor

from curvoscope.exact import SelfAttention
from curvoscope.exact.attention.hessian import AttentionHessian
from curvoscope.papers.experiments.setting import Additions
from curvoscope.papers.networks import GPT2


class PaperLayer(Additions):
    """One block without a norm at initialisation, cross-entropy on additions; parts are cut at the layer's output."""

    d: int = 16

    def network(self, seed: int, attention: str = "softmax") -> GPT2:
        """The network at initialisation, its parameters frozen."""
        return GPT2(self.d, activation=attention, seed=seed).requires_grad_(False)

    def hessian(
        self,
        seed: int,
        attention: str = "softmax",
        logit_scale: float = 1.0,
        mask: Tensor | None = None,
        **options: Any,
    ) -> AttentionHessian:
        """The layer's exact Hessian: W_Q times `logit_scale`, and `options` of `SelfAttention` (heads, temperature)."""
        layer, X, loss = self.parts(seed, attention, logit_scale, **options)
        return layer.hessian(X, loss, mask)

    def parts(self, seed: int, attention: str = "softmax", logit_scale: float = 1.0, **options: Any) -> Any:
        """The layer, its input X (N, L, d), and the loss as a function of its output."""
        model = self.network(seed, attention)
        block = model.blocks[0]
        weights: list[Tensor] = [getattr(block, f"W_{name}").detach() for name in "QKVO"]
        weights[0] = logit_scale * weights[0]
        inputs, targets = self.probe()
        layer = SelfAttention(*weights, activation=attention, causal=True, **options)
        with torch.no_grad():
            return layer, model.attention_input(inputs), model.tail(inputs, targets)
