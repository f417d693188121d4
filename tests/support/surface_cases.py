"""The loss of a model as a plain function of one flat vector of weights, and a regression at its minimum."""

import torch
from torch import nn
from torch.func import functional_call

from curvoscope.curvature import blocks_of


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def flat_loss(model, inputs, loss):
    """L of all parameters as one flat vector, in the order of the model's blocks, and that vector."""
    blocks, parameters = blocks_of(model), {name: p.detach() for name, p in model.named_parameters()}
    sizes = {name: p.numel() for name, p in parameters.items()}
    offsets, start = {}, 0
    for name, size in sizes.items():
        offsets[name] = torch.arange(start, start + size).view(parameters[name].shape)
        start += size
    order = blocks.gather(offsets)
    flat = torch.cat([p.flatten() for p in parameters.values()])

    def function(vector):
        unordered = flat.index_put((order,), vector)
        pieces = dict(zip(sizes, unordered.split(list(sizes.values())), strict=True))
        return loss(functional_call(model, {n: piece.view(parameters[n].shape) for n, piece in pieces.items()}, inputs))

    return function, flat[order]


def regression(rows=40, width=3, noise=0.5, seed=0):
    """Linear regression at its least-squares solution: model, inputs, targets, residuals."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    y = X @ torch.ones(width, 1, dtype=torch.float64) + noise * torch.randn(
        rows, 1, generator=generator, dtype=torch.float64
    )
    model = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    solution = torch.linalg.lstsq(X, y).solution
    with torch.no_grad():
        model.weight.copy_(solution.T)
    return model, X, y, (X @ solution - y).flatten()
