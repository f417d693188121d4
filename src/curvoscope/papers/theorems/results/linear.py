"""Linear attention: Remark 4.1, Table 1, Section 4.1 with its depth claim."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from curvoscope.papers.theorems.attention import BlockPairs
from curvoscope.papers.theorems.autodiff import (
    LossDerivatives,
    NetworkFunction,
    Parameters,
    differentiate,
    jacobian,
    mean_square,
)
from curvoscope.papers.theorems.calculus import identity
from curvoscope.papers.theorems.growth import norm, slope
from curvoscope.papers.theorems.linear import (
    linear_attention,
    linear_functional_blocks,
    linear_functional_blocks_of_covariances,
    linear_outer_blocks,
    linear_stack,
)
from curvoscope.papers.theorems.registry import (
    OWN,
    PAPER,
    SLIDES,
    Fails,
    largest,
    relative_error,
    relative_size,
)
from curvoscope.papers.theorems.results.instances import (
    ALL_PAIRS,
    AttentionInstance,
    Draw,
    draw_layer,
    rectangular_layers,
    square_layers,
)


@PAPER.corrected("Section 4.1, derivatives of linear attention", "∂A/∂T = I of size L² (E5)")
def linear_activation_derivatives(seed: int) -> Iterator[float]:
    """The Jacobian of the identity on T is the identity on its L² entries; the second derivative is zero."""
    for layer in square_layers(seed):
        L, d = layer.X.shape
        reference = jacobian(lambda logits: logits, layer.logits)
        yield relative_error(identity(L * L), reference)
        yield Fails(relative_error(identity(d * d), reference), "I of size d_V²")


@PAPER.holds("Remark 4.1, outer", "(V,V), (Q,Q), (V,Q), (Q,K)")
def linear_outer(seed: int) -> Iterator[float]:
    """Every outer block is cubic in Σ = XᵀX/L."""
    pairs = (("V", "V"), ("Q", "Q"), ("V", "Q"), ("Q", "K"))
    yield from (_outer_errors(layer, pairs) for layer in square_layers(seed))


@PAPER.holds("Remark 4.1, functional", "(V,Q), (Q,K); diagonal blocks zero")
def linear_functional(seed: int) -> Iterator[float]:
    """The functional Hessian is block-hollow."""
    for layer in square_layers(seed):
        reference = _reference(layer)
        blocks = linear_functional_blocks(*layer.weights, layer.Y)
        yield from (relative_error(blocks[pair], reference.functional[pair]) for pair in (("V", "Q"), ("Q", "K")))
        yield from (relative_size(reference.functional[name, name], reference.hessian[name, name]) for name in "QKV")


@OWN.holds("Remark 4.1, key blocks", "all nine pairs of both parts; L, d, k, e all different")
def linear_keys(seed: int) -> Iterator[float]:
    """The blocks that the paper omits, and any value width."""
    for layer in rectangular_layers(seed):
        reference, blocks = _reference(layer), linear_functional_blocks(*layer.weights, layer.Y)
        yield _outer_errors(layer, ALL_PAIRS)
        yield from (
            relative_error(blocks[pair], reference.functional[pair], reference.hessian[pair]) for pair in ALL_PAIRS
        )


@PAPER.holds("Table 1", "H_o ∈ O(Σ³); H_f is bilinear in Ω = Xᵀ(F − Y)/L and Σ")
def linear_functional_in_covariances(seed: int) -> Iterator[float]:
    """H_f through Σ and Ω alone, in their first power; H_o through Σ alone, in its third."""
    for layer in square_layers(seed) + rectangular_layers(seed):
        X, W_Q, W_K, W_V = layer.weights
        L, reference = len(X), _reference(layer)
        Omega = X.T @ (reference.output - layer.Y) / L
        blocks = linear_functional_blocks_of_covariances(X.T @ X / L, Omega, W_Q, W_K, W_V, L)
        yield from (relative_error(block, reference.functional[pair]) for pair, block in blocks.items())
        doubled = _reference(replace(layer, X=2**0.5 * X))
        yield from (relative_error(doubled.outer[pair], 8 * reference.outer[pair]) for pair in ALL_PAIRS)


@SLIDES.holds("Slides, linear attention", "the tokens enter through Σ and Ω alone")
def covariance_dependence(seed: int) -> Iterator[float]:
    """The same covariances give the same blocks, whatever the tokens behind them."""
    layer = draw_layer(seed, 5, 4, 3, 4)
    X, W_Q, W_K, W_V = layer.weights
    # An orthogonal mix of the tokens keeps XᵀX, and Xᵀ(F − Y) when the residual is mixed alike.
    mix = torch.linalg.qr(Draw(seed, 9, 1).normal(5, 5)).Q
    residual = _reference(layer).output - layer.Y
    mixed = replace(layer, X=mix @ X, Y=linear_attention(mix @ X, W_Q, W_K, W_V) - mix @ residual)
    before, after = _reference(layer), _reference(mixed)
    yield from (relative_error(after.hessian[pair], before.hessian[pair]) for pair in ALL_PAIRS)


@PAPER.holds(
    "Section 4.1, indefiniteness",
    "diagonal blocks of linear attention have no negative eigenvalue (relative to the largest)",
    somewhere=True,
)
def indefiniteness(seed: int) -> Iterator[float]:
    """Without softmax the diagonal blocks are purely outer products; with it they are indefinite."""
    for draw in range(6):
        layer = draw_layer(1000 * seed + draw, 5, 4, 3, 4)
        yield from (_negativity(_reference(layer).hessian[name, name]) for name in ("Q", "K", "V"))
        yield Fails(_negativity(layer.reference.hessian["Q", "Q"]), "the same for H(Q,Q) with softmax")


@PAPER.corrected(
    "Section 4.1, depth",
    "D = 1, 2, 3 layers without skips: H_o has degree 2·3^D, H_f at fixed G degree 3^D (E6)",
    somewhere=True,
)
def depth_degrees(seed: int) -> Iterator[float]:
    """Exact degrees of every diagonal block of a stack; below the top layer H is not homogeneous."""
    sigma = 1.2
    for depth in (1, 2, 3):
        X, Y, weights = _stack(seed, depth)
        before, after = (_stack_reference(scale * X, Y, weights, depth, skip=False) for scale in (1.0, sigma))
        fixed = [_contracted(scale * X, before.loss_gradient, weights, depth) for scale in (1.0, sigma)]
        for name in weights:
            pair = (name, name)
            yield relative_error(after.outer[pair], sigma ** (2 * 3**depth) * before.outer[pair])
            scale = sigma ** (3**depth) * fixed[0][pair]
            yield relative_error(fixed[1][pair], scale, scale + before.outer[pair])
        if depth > 1:
            yield Fails(
                relative_error(after.hessian["Q1", "Q1"], sigma ** (2 * 3**depth) * before.hessian["Q1", "Q1"]),
                "2·3^D for the complete lower blocks",
            )


@PAPER.corrected(
    "Section 4.1, depth with skip connections",
    "two layers: slope 6 for σ → 0, 18 for σ → ∞ in the first (E6)",
    tolerance=2e-2,
)
def depth_with_skips(seed: int) -> Iterator[float]:
    """Skip connections add the paths of every length: the degree is not homogeneous any more."""
    X, Y, weights = _stack(seed, 2)

    def exponent(scales: tuple[float, ...]) -> float:
        sizes = [norm(_stack_reference(scale * X, Y, weights, 2, skip=True).outer["Q1", "Q1"]) for scale in scales]
        return slope(scales, sizes)

    small, large = exponent((1e-3, 2e-3, 4e-3)), exponent((1e4, 2e4, 4e4))
    yield abs(small - 6) / 6
    yield abs(large - 18) / 18
    yield Fails(abs(small - 18) / 18, "18 for σ → 0")


@PAPER.holds("Section 4.1, depth of a linear MLP", "degree 2 at every depth, exactly")
def mlp_depth(seed: int) -> Iterator[float]:
    """The Jacobian of a linear MLP is linear in x however deep it is."""
    sigma = 1.7
    for depth in (1, 2, 3):
        draw = Draw(seed, 9, 2, depth)
        weights = {str(i): draw.normal(3, 3) for i in range(depth)}
        inputs, targets = draw.normal(3, 5), draw.normal(3, 5)
        before, after = (_mlp_hessian(scale * inputs, targets, weights) for scale in (1.0, sigma))
        yield from (relative_error(after[name, name], sigma**2 * before[name, name]) for name in weights)


def _mlp_hessian(inputs: Tensor, targets: Tensor, weights: dict[str, Tensor]) -> BlockPairs:
    """The Hessian of a linear MLP under the mean square loss."""

    def network(parameters: Parameters) -> Tensor:
        signal = inputs
        for weight in parameters.values():
            signal = weight @ signal
        return signal

    return differentiate(network, mean_square(targets), weights).hessian


def _reference(layer: AttentionInstance) -> LossDerivatives:
    """Derivatives of linear attention with the layer's weights."""
    return differentiate(
        lambda parameters: linear_attention(layer.X, parameters["Q"], parameters["K"], parameters["V"]),
        layer.loss,
        layer.parameters,
    )


def _outer_errors(layer: AttentionInstance, pairs: tuple[tuple[str, str], ...]) -> float:
    blocks, reference = linear_outer_blocks(*layer.weights), _reference(layer)
    return largest(relative_error(blocks[pair], reference.outer[pair]) for pair in pairs)


def _negativity(block: Tensor) -> float:
    """−(smallest eigenvalue)/(largest absolute one), 0 for a positive semidefinite block."""
    eigenvalues = torch.linalg.eigvalsh(block)
    return float((-eigenvalues[0]).clamp(min=0) / eigenvalues.abs().max())


def _stack(seed: int, depth: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """X, Y and the weights Q1, K1, V1, Q2, … of a stack of linear attention layers."""
    draw = Draw(seed, 9, 3, depth)
    shapes = {"Q": (3, 2), "K": (3, 2), "V": (3, 3)}
    weights = {f"{name}{i}": 0.7 * draw.normal(*shape) for i in range(1, depth + 1) for name, shape in shapes.items()}
    X, Y = draw.normal(3, 3), draw.normal(3, 3)
    # Targets as large as the output, or the residual would be the output and H_f as homogeneous as H_o.
    size = torch.linalg.norm(_stack_network(X, depth, skip=False)(weights))
    return X, size * Y, weights


def _stack_network(X: Tensor, depth: int, skip: bool) -> NetworkFunction:
    def network(parameters: Parameters) -> Tensor:
        layers = [(parameters[f"Q{i}"], parameters[f"K{i}"], parameters[f"V{i}"]) for i in range(1, depth + 1)]
        return linear_stack(X, layers, skip)

    return network


def _contracted(X: Tensor, gradient: Tensor, weights: dict[str, Tensor], depth: int) -> BlockPairs:
    """H_f of a stack at a given loss gradient G: the Hessian of ⟨G, F⟩."""
    network = _stack_network(X, depth, skip=False)
    return differentiate(network, lambda output: (gradient * output).sum(), weights).hessian


def _stack_reference(X: Tensor, Y: Tensor, weights: dict[str, Tensor], depth: int, skip: bool) -> LossDerivatives:
    return differentiate(_stack_network(X, depth, skip), mean_square(Y), weights)
