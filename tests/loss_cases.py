"""A base for drawn cases: normal tensors from one generator, and a loss of each kind on an output."""

import torch

import curvoscope as cv


class Draws:
    """What is drawn depends on the seed alone."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def make_loss(self, kind, shape):
        """A loss on outputs of this shape whose second derivative stays within a token, a sequence, or neither."""
        Y = self.normal(*shape)
        if kind == "mse":
            return cv.losses.MSE(Y)
        if kind == "cross-entropy":
            targets = torch.randint(0, 5, shape[:-1], generator=self.generator)
            return cv.losses.CrossEntropy(targets, self.normal(shape[-1], 5))
        return {
            "token": lambda F: ((F * Y).sum(-1).sin() + F.pow(3).sum(-1)).mean(),
            "sequence": lambda F: (F * Y).sum((-1, -2)).pow(3).mean() + F.pow(4).mean(),
            "batch": lambda F: (F * Y).sum().sin() + F.square().mean(),
            "linear": lambda F: (F * Y).sum(),
        }[kind]
