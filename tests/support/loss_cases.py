"""A base for drawn cases: normal tensors from one generator, and a loss of each kind on an output."""

import torch

import curvoscope as cv

LOSSES = ["mse", "cross-entropy", "token", "sequence", "batch", "linear"]


class Draws:
    """What is drawn depends on the seed alone. The truth is in float64, what is compared with it in `dtype`."""

    def __init__(self, seed, dtype=torch.float64):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def own(self, values):
        """Values of a dict, or a tensor, in the dtype of the case."""
        if isinstance(values, dict):
            return {name: None if value is None else value.to(self.dtype) for name, value in values.items()}
        return values.to(self.dtype)

    def make_loss(self, kind, shape):
        """A loss on outputs of this shape whose second derivative stays within a token, a sequence, or neither.

        `loss` is in float64, `own_loss` in the dtype of the case.
        """
        Y = self.normal(*shape)
        targets = torch.randint(0, 5, shape[:-1], generator=self.generator)
        U = self.normal(shape[-1], 5)
        if targets.numel() > 2 and kind == "ignoring":
            targets.view(-1)[1] = -100

        def at(dtype):
            y, u = Y.to(dtype), U.to(dtype)
            if kind == "mse":
                return cv.losses.MSE(y)
            if kind in ("cross-entropy", "ignoring"):
                return cv.losses.CrossEntropy(targets, u)
            return {
                "token": lambda F: ((F * y).sum(-1).sin() + F.pow(3).sum(-1)).mean(),
                "sequence": lambda F: (F * y).sum((-1, -2)).pow(3).mean() + F.pow(4).mean(),
                "batch": lambda F: (F * y).sum().sin() + F.square().mean(),
                "linear": lambda F: (F * y).sum(),
            }[kind]

        self.loss, self.own_loss = at(torch.float64), at(self.dtype)
