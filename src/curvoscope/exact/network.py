"""Networks of layers: what a Transformer block, a stack of them and a linear network have in common."""

from torch import Tensor

from curvoscope import losses
from curvoscope.errors import DtypeError, EmptyError, ShapeError
from curvoscope.exact.chain import Branch, Chain
from curvoscope.exact.chain_hessian import ChainHessian
from curvoscope.exact.factor import fits_jacobians
from curvoscope.operators.block_matrix import BlockHessian


class Network:
    """Branches of layers on a stream of width d: forward pass, Jacobians and Hessian."""

    d: int
    branches: list[Branch]

    def __call__(self, X: Tensor) -> Tensor:
        """Z, of the shape of X but for its width."""
        self._check(X)
        stream = X
        for branch in self.branches:
            value = stream
            for _, layer in branch.layers:
                value = layer(value)
            stream = stream + value if branch.residual else value
        return stream

    def chain(self, X: Tensor, loss: losses.LossFunction) -> Chain:
        """All layers at X, with the gradients of the loss at their outputs."""
        self._check(X)
        return Chain(self.branches, X, loss)

    def jacobian(self, X: Tensor) -> dict[str, Tensor]:
        """dZ/dW for each weight and for "X": (N L m, size), rows in the order of Z."""
        chain = self.chain(X, lambda Z: Z.sum())
        shapes = {**{name: chain.shapes[name] for name in self._names(chain)}, "X": (chain.tokens, self.d)}
        fits_jacobians(chain.output, {name: a * p for name, (a, p) in shapes.items()})
        return {name: chain.jacobian(name, shape) for name, shape in shapes.items()}

    def hessian(self, X: Tensor, loss: losses.LossFunction, *, wrt_input: bool = False) -> BlockHessian:
        """The Hessian of loss(Z) over all weights, blocks of two layers among them.

        `outer` is J^T S J with the Jacobian of Z and S at Z; `functional` is the rest.

        Args:
            X: (L, d) or (N, L, d).
            loss: a loss of `cv.losses`, or any function of Z.
            wrt_input: whether "X" (T, d) is a block too.

        Returns:
            A `BlockHessian` over the weights in the order of the forward pass.
        """
        chain = self.chain(X, loss)
        names = self._names(chain)
        return ChainHessian(chain, [*names, "X"] if wrt_input else names)

    def _names(self, chain: Chain) -> list[str]:
        return list(chain.shapes)

    def _check(self, X: Tensor) -> None:
        if not isinstance(X, Tensor):
            raise DtypeError("X", f"expected a torch.Tensor, got {type(X).__name__}")
        if X.ndim not in (2, 3) or X.shape[-1] != self.d:
            raise ShapeError("X", f"expected (L, {self.d}) or (N, L, {self.d}), got {tuple(X.shape)}")
        if X.numel() == 0:
            raise EmptyError("X", f"has no {'tokens' if X.shape[-2] == 0 else 'sequences'}, shape {tuple(X.shape)}")
