"""Networks trained to a strict minimum of a full-batch loss: there gradient descent sees one quadratic.

Cross-entropy alone has no minimum on data that a network fits, and a ReLU has kinks. So the feed-forward layer of the
paper's GPT-2 gets a GELU, and once trained (weights w₀) the network is pulled towards w₀ (the L2-SP penalty):

    L(w) = cross-entropy(w) + μ/2 |w - w₀|²

If μ exceeds the negative curvature of the cross-entropy near w₀, L has a strict minimum w* close to it.
"""

import scipy.sparse.linalg
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from curvoscope.analysis.surface import Surface
from curvoscope.papers.networks import GPT2, GPT2Block
from curvoscope.papers.tasks import IGNORED

_ITERATIONS = 1000
_NEAR = 1e-7  # the largest entry of the gradient at which L-BFGS hands over: it compares losses, which are rounded
_NEWTON = 3


class Anchored(GPT2):
    """GPT-2 of one block with a GELU, which returns the logits and the penalty μ/2 |w - w₀|²."""

    def __init__(self, d: int, norm: str, seed: int) -> None:
        super().__init__(d, norm=norm, seed=seed)
        self.pull, self.anchor = 0.0, [parameter.detach().clone() for parameter in self.parameters()]

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # the loss needs the penalty
        """(N, L) -> logits (N, L, 12) and a scalar."""
        block = self.blocks[0]
        assert isinstance(block, GPT2Block)
        x = self.residual_stream(tokens, 0)
        x = x + block.attend(block.norm1(x))
        x = x + gelu(block.norm2(x) @ block.W_up + block.b_up) @ block.W_down + block.b_down
        pairs = zip(self.parameters(), self.anchor, strict=True)
        distance = torch.stack([(weight - start).square().sum() for weight, start in pairs]).sum()
        return self.norm(x) @ self.W_U + self.b_U, self.pull / 2 * distance

    def drop_anchor(self, pull: float) -> None:
        """From now on the present weights are w₀, and μ = `pull`."""
        self.pull, self.anchor = pull, [parameter.detach().clone() for parameter in self.parameters()]


def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Cross-entropy at the answers, plus the penalty."""
    logits, penalty = outputs
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED) + penalty


def minimum(
    d: int, norm: str, batch: tuple[Tensor, Tensor], steps: int, rate: float, pull: float, seed: int
) -> Anchored:
    """A network at the minimum w* of the loss of one batch of additions.

    `steps` of Adam on the cross-entropy of all data; there the anchor; then L-BFGS on L until no entry of the gradient
    is above 1e-7, and three Newton steps, each solved by conjugate gradients: the gradient is zero to rounding.
    """
    model = Anchored(d, norm, seed)
    _minimise(model, torch.optim.Adam(model.parameters(), lr=rate), batch, steps)
    model.drop_anchor(pull)
    polish = torch.optim.LBFGS(
        model.parameters(),
        max_iter=_ITERATIONS,
        history_size=100,
        line_search_fn="strong_wolfe",
        tolerance_grad=_NEAR,
        tolerance_change=0.0,
    )
    _minimise(model, polish, batch, 1)
    for _ in range(_NEWTON):
        _newton(model, batch)
    return model


def _minimise(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], steps: int) -> None:
    inputs, targets = batch

    def closure() -> float:
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        return value.item()

    for _ in range(steps):
        optimizer.step(closure)


def _newton(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """w <- w - H⁻¹ g, without a line search: w is in the quadratic region."""
    surface = Surface(model, loss, [batch])
    step, _ = scipy.sparse.linalg.cg(surface.hessian.total.to_scipy(), -surface.gradient().numpy(), rtol=1e-6)
    moved = surface.moved(torch.from_numpy(step))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(moved[name])
