"""Section 2: the Gauss-Newton split, its layout, the square loss, batches, and the linear MLP."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from curvoscope.papers.theorems.autodiff import (
    LossDerivatives,
    Parameters,
    differentiate,
    hessian,
    mean_square,
    second_derivative,
)
from curvoscope.papers.theorems.calculus import assemble, identity, kron, vec
from curvoscope.papers.theorems.linear import mlp_functional_block, mlp_outer_block
from curvoscope.papers.theorems.registry import OWN, PAPER, Fails, relative_error, relative_size
from curvoscope.papers.theorems.results.draws import Draw
from curvoscope.papers.theorems.results.instances import (
    ALL_PAIRS,
    NAMES,
    AttentionInstance,
    rectangular_layers,
    square_layers,
)

MLP_WIDTHS = (3, 5, 2, 4)


@PAPER.holds("Equation (2)", "H = H_o + H_f, H_f = (∂ℓ/∂F ⊗ I) ∂²F/∂W_i∂W_j")
def gauss_newton_split(seed: int) -> Iterator[float]:
    """The Hessian is J_iᵀ S J_j plus the second derivative of F contracted with the loss gradient."""
    for layer in rectangular_layers(seed):
        reference = layer.reference
        gradient = vec(reference.loss_gradient).T
        for row, column in ALL_PAIRS:
            functional = kron(gradient, identity(layer.parameters[row].numel())) @ _second(layer, row, column)
            yield relative_error(reference.outer[row, column] + functional, reference.hessian[row, column])


@PAPER.holds("Equation (3)", "H(W_i, W_j) = H(W_j, W_i)ᵀ for both parts")
def block_symmetry(seed: int) -> Iterator[float]:
    """The matrices of all blocks are symmetric."""
    yield from (
        relative_error(matrix.T, matrix)
        for layer in rectangular_layers(seed)
        for matrix in (assemble(layer.reference.outer, NAMES), assemble(layer.reference.functional, NAMES))
    )


@PAPER.holds("Equation (4)", "the Hessians of the entries of F, one below the other")
def layout_of_second_derivatives(seed: int) -> Iterator[float]:
    """Differentiating vec(∂F/∂W_i) stacks the second derivatives of F_11, F_12, … (Figure 2)."""
    for layer in rectangular_layers(seed):
        stacked = torch.cat([_entry_hessian(layer, entry) for entry in range(layer.Y.numel())])
        yield relative_error(stacked, _second(layer, "Q", "Q"))


@PAPER.holds("Section 2, square loss", "∂ℓ/∂F = 2/(L d) vec(F − Y)ᵀ, ∂²ℓ/∂F² = 2/(L d) I")
def square_loss_derivatives(seed: int) -> Iterator[float]:
    """Gradient and Hessian of the loss at the output."""
    for layer in rectangular_layers(seed):
        reference, size = layer.reference, layer.Y.numel()
        yield relative_error(2 / size * (reference.output - layer.Y), reference.loss_gradient)
        yield relative_error(2 / size * identity(size), reference.loss_hessian)


@PAPER.holds("Section 2, batches (footnote 1)", "the mean of the samples' Hessians")
def batch_average(seed: int) -> Iterator[float]:
    """The Hessian of a batch's mean loss is the average over the sequences."""
    draw = Draw(seed, 2, 1)
    inputs, targets = draw.normal(3, 4, 3), draw.normal(3, 4, 3)
    W_Q, W_K, W_V = draw.normal(3, 2), draw.normal(3, 2), draw.normal(3, 3)

    def query_hessian(X: Tensor, Y: Tensor) -> Tensor:
        def loss(weight: Tensor) -> Tensor:
            return (torch.softmax(X @ weight @ W_K.T @ X.mT, dim=-1) @ X @ W_V - Y).square().mean()

        return hessian(loss, W_Q)

    samples = [query_hessian(X, Y) for X, Y in zip(inputs, targets, strict=True)]
    yield relative_error(torch.stack(samples).mean(0), query_hessian(inputs, targets))


@PAPER.corrected(
    "Section 2, linear MLP",
    "2/d_out × the printed block for the paper's mean square loss; as printed for ½E‖F − y‖² (E11)",
)
def mlp_outer_hessian(seed: int) -> Iterator[float]:
    """H_o(Wⁱ, Wⁱ) = BᵀB ⊗ C Σ Cᵀ, and functional diagonal blocks zero."""
    weights, inputs, targets = _mlp(seed)
    mean = _mlp_reference(weights, inputs, targets, factor=1.0)
    half = _mlp_reference(weights, inputs, targets, factor=len(targets) / 2)
    for i in range(len(weights)):
        block, pair = mlp_outer_block(weights, inputs, i), (str(i), str(i))
        yield relative_error(2 / len(targets) * block, mean.outer[pair])
        yield relative_error(block, half.outer[pair])
        yield relative_size(mean.functional[pair], mean.hessian[pair])
        yield Fails(relative_error(block, mean.outer[pair]))


@OWN.holds("Section 2, linear MLP, functional blocks", "H_f(W^j, W^i)[pq, rs] = (Bᵀ Ω Dᵀ)_ps C_qr")
def mlp_functional_hessian(seed: int) -> Iterator[float]:
    """Linear in Ω = E[∂ℓ/∂F xᵀ], as Table 1 says of the MLP."""
    weights, inputs, targets = _mlp(seed)
    reference = _mlp_reference(weights, inputs, targets, factor=1.0)
    Omega = reference.loss_gradient @ inputs.T
    yield from (
        relative_error(mlp_functional_block(weights, Omega, upper, lower), reference.functional[str(upper), str(lower)])
        for upper in range(len(weights))
        for lower in range(upper)
    )


@PAPER.holds("Section 3, value block", "the value block is that of a linear layer with input M1")
def value_block_is_linear_layer(seed: int) -> Iterator[float]:
    """H_o(V, V) equals the Hessian of the linear model M1 W_V; its functional part is zero."""
    for layer in square_layers(seed):
        linear = _linear_layer_hessian(layer)
        yield relative_error(layer.reference.outer["V", "V"], linear)
        yield relative_size(layer.reference.functional["V", "V"], linear)


def _entry_hessian(layer: AttentionInstance, entry: int) -> Tensor:
    """The Hessian of one entry of F in W_Q."""
    return hessian(lambda weight: layer.output_of({**layer.parameters, "Q": weight}).reshape(-1)[entry], layer.W_Q)


def _linear_layer_hessian(layer: AttentionInstance) -> Tensor:
    """The Hessian in W_V of the linear model M1 W_V."""
    M1 = layer.A @ layer.X
    return hessian(lambda weight: layer.loss(M1 @ weight), layer.W_V)


def _second(layer: AttentionInstance, row: str, column: str) -> Tensor:
    """∂²F/∂W_row∂W_column by differentiating the Jacobian."""
    return second_derivative(layer.output_of, layer.parameters, row, column)


def _mlp(seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights W¹, …, W^D, inputs (d_in, N), targets (d_out, N)."""
    draw = Draw(seed, 2, 2)
    weights = [draw.normal(above, below) for below, above in pairwise(MLP_WIDTHS)]
    return weights, draw.normal(MLP_WIDTHS[0], 6), draw.normal(MLP_WIDTHS[-1], 6)


def _mlp_reference(weights: list[Tensor], inputs: Tensor, targets: Tensor, factor: float) -> LossDerivatives:
    """Derivatives of F(x) = W^D … W¹ x under `factor` times the mean square loss."""

    def network(parameters: Parameters) -> Tensor:
        signal = inputs
        for i in range(len(weights)):
            signal = parameters[str(i)] @ signal
        return signal

    loss = mean_square(targets)
    return differentiate(
        network, lambda output: factor * loss(output), {str(i): weight for i, weight in enumerate(weights)}
    )
