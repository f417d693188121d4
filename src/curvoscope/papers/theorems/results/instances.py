"""Random attention layers that the checks share, with their derivatives by automatic differentiation."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from curvoscope.papers.theorems.attention import jacobians
from curvoscope.papers.theorems.autodiff import Loss, LossDerivatives, Parameters, differentiate, mean_square
from curvoscope.papers.theorems.growth import DEGREES, GrowthKey, Scales
from curvoscope.papers.theorems.registry import largest, relative_error

NAMES = ("Q", "K", "V")
DIAGONAL_AND_UPPER = (("Q", "Q"), ("K", "K"), ("V", "V"), ("Q", "K"), ("V", "Q"), ("V", "K"))
ALL_PAIRS = tuple((row, column) for row in NAMES for column in NAMES)

SQUARE_SIZES = ((5, 4, 3, 4), (3, 2, 4, 2), (4, 3, 2, 3))
"""(L, d, k, e) with e = d as in the paper, k below and above d."""
RECTANGULAR_SIZES = ((4, 3, 2, 5), (3, 4, 5, 2))
"""(L, d, k, e), all different."""


class Draw:
    """A reproducible source of standard normal float64 tensors."""

    def __init__(self, *seeds: int) -> None:
        # A polynomial in the parts keeps draws of different sizes and purposes apart.
        key = sum((part + 1) * 1009**place for place, part in enumerate(seeds))
        self.generator = torch.Generator().manual_seed(key % 2**63)

    def normal(self, *shape: int) -> Tensor:
        """Independent standard normal entries."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def integer(self, low: int, high: int) -> int:
        """Uniform from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def labels(self, count: int, classes: int) -> Tensor:
        """Class labels, one a token."""
        return torch.randint(classes, (count,), generator=self.generator)


@dataclass(frozen=True)
class AttentionInstance:
    """F = softmax(s X W_Q W_Kᵀ Xᵀ + bias) X W_V under `criterion`, by default the square loss against Y."""

    X: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    Y: Tensor
    s: float
    bias: Tensor | None = None
    criterion: Loss | None = None

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """X, W_Q, W_K, W_V: what the outer blocks are a function of."""
        return self.X, self.W_Q, self.W_K, self.W_V

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The weights by the names of their blocks."""
        return {"Q": self.W_Q, "K": self.W_K, "V": self.W_V}

    @property
    def loss(self) -> Loss:
        """The criterion, or ‖F − Y‖² / (number of entries)."""
        return mean_square(self.Y) if self.criterion is None else self.criterion

    @cached_property
    def logits(self) -> Tensor:
        """T, the bias not included."""
        return self.logits_of(self.parameters)

    @cached_property
    def A(self) -> Tensor:
        """The attention matrix."""
        return self.attention_of(self.logits)

    def logits_of(self, parameters: Parameters) -> Tensor:
        """T as a function of the query and key weights."""
        return self.s * self.X @ parameters["Q"] @ parameters["K"].T @ self.X.T

    def attention_of(self, logits: Tensor) -> Tensor:
        """A as a function of T."""
        return torch.softmax(logits if self.bias is None else logits + self.bias, dim=-1)

    def output_of(self, parameters: Parameters) -> Tensor:
        """F as a function of the weights."""
        return self.attention_of(self.logits_of(parameters)) @ self.X @ parameters["V"]

    @cached_property
    def reference(self) -> LossDerivatives:
        """Derivatives in W_Q, W_K, W_V, split at F."""
        return differentiate(self.output_of, self.loss, self.parameters)

    @cached_property
    def logit_reference(self) -> LossDerivatives:
        """Derivatives in W_Q, W_K, split at T: the T-outer and T-functional parts of Remark D.1."""
        return differentiate(
            self.logits_of,
            lambda logits: self.loss(self.attention_of(logits) @ self.X @ self.W_V),
            {"Q": self.W_Q, "K": self.W_K},
        )

    @cached_property
    def graded_blocks(self) -> dict[GrowthKey, Tensor]:
        """The blocks of `DEGREES`, H_f(Q, K) cut into its two summands."""
        coupling = self.logit_reference.functional["Q", "K"]
        parts = {"outer": self.reference.outer, "functional": self.reference.functional}
        blocks = {(part, row, column): parts[part][row, column] for part, row, column in DEGREES if part in parts}
        blocks["functional", "Q", "K"] = blocks["functional", "Q", "K"] - coupling
        blocks["logit", "Q", "K"] = coupling
        return blocks

    def scaled(self, scales: Scales) -> "AttentionInstance":
        """The layer with X and the weights multiplied, A and the residual F − Y unchanged."""
        X, W_V = scales.X * self.X, scales.V * self.W_V
        residual = self.A @ self.X @ self.W_V - self.Y
        return replace(
            self,
            X=X,
            W_Q=scales.Q * self.W_Q,
            W_K=scales.K * self.W_K,
            W_V=W_V,
            Y=self.A @ X @ W_V - residual,
            s=scales.s * self.s,
        )

    def degree_error(self, scales: Scales, part: str) -> float:
        """How far the blocks of a part are from monomials in the scales, A and the residual held fixed."""
        before, after = self.graded_blocks, self.scaled(scales).graded_blocks
        return largest(
            relative_error(after[key], scales.growth(degrees) * before[key])
            for key, degrees in DEGREES.items()
            if key[0] == part
        )


def draw_layer(seed: int, L: int, d: int, k: int, e: int, std: float = 0.7) -> AttentionInstance:
    """X and Y with standard normal entries, weights with standard deviation `std`, s = 1/√k."""
    draw = Draw(seed, L, d, k, e)
    X, Y = draw.normal(L, d), draw.normal(L, e)
    W_Q, W_K, W_V = std * draw.normal(d, k), std * draw.normal(d, k), std * draw.normal(d, e)
    return AttentionInstance(X, W_Q, W_K, W_V, Y, 1 / math.sqrt(k))


@lru_cache(maxsize=64)
def layer(seed: int, L: int, d: int, k: int, e: int) -> AttentionInstance:
    """The shared layer of this seed and size, so that its derivatives are computed once."""
    return draw_layer(seed, L, d, k, e)


def square_layers(seed: int) -> list[AttentionInstance]:
    """Layers with as many outputs as inputs, as in the paper."""
    return [layer(seed, *sizes) for sizes in SQUARE_SIZES]


def rectangular_layers(seed: int) -> list[AttentionInstance]:
    """Layers whose sizes L, d, k and e all differ."""
    return [layer(seed, *sizes) for sizes in RECTANGULAR_SIZES]


def jacobian_errors(layers: Iterable[AttentionInstance], names: str) -> Iterator[float]:
    """Errors of the Jacobians ∂F/∂W of Lemma B.1, for each weight of `names`."""
    for one in layers:
        found = jacobians(*one.weights)
        yield from (relative_error(found[name], one.reference.jacobian[name]) for name in names)


def attention_output(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
    """softmax(X W_Q W_Kᵀ Xᵀ/√k) X W_V."""
    return torch.softmax(X @ W_Q @ W_K.T @ X.T / math.sqrt(W_Q.shape[1]), dim=-1) @ X @ W_V


def cross_entropy(unembedding: Tensor, labels: Tensor) -> Loss:
    """Mean over the tokens of −log softmax(F U)[label]."""

    def loss(output: Tensor) -> Tensor:
        chosen = torch.log_softmax(output @ unembedding, dim=-1)
        return -chosen.gather(1, labels[:, None]).mean()

    return loss
