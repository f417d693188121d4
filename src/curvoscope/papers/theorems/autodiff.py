"""The reference: Jacobians, Hessians and their Gauss-Newton split by nested automatic differentiation in float64.

Second derivatives are forward mode over `grad`. The obvious `torch.func.hessian` is not used because it is
silently wrong through the native layer norm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jacfwd, jacrev

Parameters = Mapping[str, Tensor]
NetworkFunction = Callable[[Parameters], Tensor]
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossDerivatives:
    """Derivatives of ℓ(F(θ)), with n the number of entries of F and p_i that of parameter i.

    G = ∂ℓ/∂F (the shape of F), S = ∂²ℓ/∂F² (n, n), J_i = ∂F/∂θ_i (n, p_i), H = H_o + H_f with
    H_o(i, j) = J_iᵀ S J_j and H_f the Hessian of ⟨G, F(θ)⟩ with G frozen. `hessian` is differentiated on its
    own, not added up from the other two.
    """

    output: Tensor
    loss_gradient: Tensor
    loss_hessian: Float[Tensor, "n n"]
    gradient: dict[str, Tensor]
    jacobian: dict[str, Tensor]
    hessian: dict[tuple[str, str], Tensor]
    outer: dict[tuple[str, str], Tensor]
    functional: dict[tuple[str, str], Tensor]


def differentiate(network: NetworkFunction, loss: Loss, parameters: Parameters) -> LossDerivatives:
    """All first and second derivatives of `loss(network(parameters))`, cut into blocks by parameter name."""
    names = list(parameters)
    sizes = [parameters[name].numel() for name in names]
    theta = torch.cat([parameters[name].reshape(-1) for name in names])

    def function(flat: Tensor) -> Tensor:
        pieces = zip(names, flat.split(sizes), strict=True)
        return network({name: piece.reshape(parameters[name].shape) for name, piece in pieces})

    def blocks(matrix: Tensor) -> dict[tuple[str, str], Tensor]:
        return {
            (row, column): block
            for row, strip in zip(names, matrix.split(sizes), strict=True)
            for column, block in zip(names, strip.split(sizes, dim=1), strict=True)
        }

    output = function(theta)
    loss_gradient = grad(loss)(output)
    loss_hessian = hessian(loss, output)
    jacobian = jacrev(function)(theta).reshape(output.numel(), -1)
    slope = grad(lambda flat: loss(function(flat)))(theta)
    return LossDerivatives(
        output=output,
        loss_gradient=loss_gradient,
        loss_hessian=loss_hessian,
        gradient={
            name: piece.reshape(parameters[name].shape) for name, piece in zip(names, slope.split(sizes), strict=True)
        },
        jacobian=dict(zip(names, jacobian.split(sizes, dim=1), strict=True)),
        hessian=blocks(hessian(lambda flat: loss(function(flat)), theta)),
        outer=blocks(jacobian.T @ loss_hessian @ jacobian),
        functional=blocks(hessian(lambda flat: (loss_gradient * function(flat)).sum(), theta)),
    )


def hessian(function: Callable[[Tensor], Tensor], point: Tensor) -> Float[Tensor, "n n"]:
    """∂²f/∂x² of a scalar function, rows and columns in row-major order of `point`."""
    return jacfwd(grad(function))(point).reshape(point.numel(), point.numel())


def jacobian(function: Callable[[Tensor], Tensor], point: Tensor) -> Float[Tensor, "n p"]:
    """∂ vec F / ∂ vec X: rows are outputs, columns are inputs, both row-major."""
    return jacrev(function)(point).reshape(-1, point.numel())


def second_derivative(network: NetworkFunction, parameters: Parameters, row: str, column: str) -> Float[Tensor, "np q"]:
    """∂²F/∂W_i∂W_j in the layout of equation (4): vec of the Jacobian in W_i, differentiated in W_j."""

    def flat_jacobian(second: Tensor) -> Tensor:
        moved = {**parameters, column: second}
        return jacrev(lambda first: network({**moved, row: first}))(moved[row]).reshape(-1)

    return jacfwd(flat_jacobian)(parameters[column]).reshape(-1, parameters[column].numel())


def mean_square(target: Tensor) -> Loss:
    """ℓ(F) = ‖F − Y‖² / (number of entries), the square loss of the paper."""
    return lambda output: (output - target).square().mean()


def cross_entropy(unembedding: Tensor, labels: Tensor) -> Loss:
    """Mean over the tokens of −log softmax(F U)[label]."""

    def loss(output: Tensor) -> Tensor:
        chosen = torch.log_softmax(output @ unembedding, dim=-1)
        return -chosen.gather(1, labels[:, None]).mean()

    return loss
