"""Self-attention and its exact Hessian."""

import torch
from torch import Tensor

from curvoscope import checks, losses
from curvoscope.errors import ShapeError
from curvoscope.exact.assembly import pushed_jacobian
from curvoscope.exact.attention.hessian import AttentionHessian
from curvoscope.exact.attention.layer import AttentionLayer
from curvoscope.exact.attention.moments import Moments
from curvoscope.exact.attention.product import AttentionProduct
from curvoscope.exact.factor import fits_jacobians
from curvoscope.exact.frozen import frozen


class SelfAttention(AttentionLayer):
    """Self-attention with its exact Hessian.

    F = [A^1 V^1, ..., A^H V^H] W_O with A = softmax(Q K^T / (t sqrt(d_k))), Q = X W_Q + b_Q, and so on.

    Args:
        W_Q: (d, heads*d_k), heads one after the other in the columns.
        W_K: (d, kv_heads*d_k).
        W_V: (d, kv_heads*d_v).
        W_O: (heads*d_v, d_out); without it the heads are combined as `combine` says.
        b_Q: bias of the queries; `b_K`, `b_V` and `b_O` are those of keys, values and output.
        heads: number of heads; `kv_heads`, a divisor of it, is that of keys and values (grouped queries).
        combine: without W_O, "concat" the heads or "sum" them (Appendix E).
        activation: "softmax", or "linear" for none: masked scores are then 0.
        temperature: t.
        causal: whether a query sees no later key.
        biases: whether the biases are blocks "b_Q", ... of the Hessian; if not they are constants.
        rotary: base of rotary positions, or any linear map for each position; `key_rotary` that of the keys, if it is
            another one.
        q_norm: a `QueryKeyNorm` of the queries before their scores; `k_norm` one of the keys.
        softcap: c of soft-capped scores, c tanh(T/c).
        sinks: (heads,), for each head the logit of a sink: an additional key without a value.

    Example:
        >>> import torch, curvoscope as cv
        >>> W = torch.eye(4)
        >>> layer = cv.exact.SelfAttention(W, W, W, causal=True)
        >>> H = layer.hessian(torch.ones(3, 4), cv.losses.MSE(torch.zeros(3, 4)))
        >>> H.names, H.shape
        (['Q', 'K', 'V'], (48, 48))
        >>> round(float(H.outer["V"].trace()), 6)
        8.0
    """

    @classmethod
    def single_matrix(
        cls,
        W_QK: Tensor,
        W_V: Tensor,
        W_O: Tensor | None = None,
        *,
        heads: int = 1,
        combine: str = "concat",
        activation: str = "softmax",
        temperature: float = 1.0,
        causal: bool = False,
    ) -> "SelfAttention":
        """One matrix for queries and keys, T = X W_QK X^T / t (Lemma 4.1): blocks "QK", "V", "O".

        Args:
            W_QK: (d, heads*d).
            W_V: (d, heads*d_v).
            W_O: (heads*d_v, d_out), or None, as in `SelfAttention`.
            heads, combine, activation, temperature, causal: as in `SelfAttention`.

        Returns:
            A layer without biases.
        """
        checks.floating("W_QK", W_QK)
        if W_QK.ndim != 2 or W_QK.shape[1] != heads * W_QK.shape[0]:
            raise ShapeError("W_QK", f"expected (d, {heads} d), got {tuple(W_QK.shape)}")
        identity = torch.eye(W_QK.shape[0], dtype=W_QK.dtype, device=W_QK.device)
        layer = cls(
            W_QK,
            identity.repeat(1, heads),
            W_V,
            W_O,
            heads=heads,
            combine=combine,
            activation=activation,
            temperature=temperature,
            causal=causal,
        )
        layer.scale = 1 / temperature
        layer.merged = True
        return layer

    def moments(self, X: Tensor, mask: Tensor | None = None) -> Moments:
        """The attention moments M1, M2, M3 of Definition 3.1 at X.

        Args:
            X: (L, d) or (N, L, d).
            mask: as in `SelfAttention.hessian`.

        Returns:
            A `Moments`, which computes `M1`, `M2`, `M3` and `entropy` when asked: with a batch axis if X has one, and
            before L a head axis if there are several heads.
        """
        passed = self.forward_pass(X, mask)
        inputs, attention = passed.X, passed.A
        if self.heads == 1:
            attention = attention[:, 0]
        else:
            inputs = inputs[:, None]
        return Moments(inputs[0], attention[0]) if passed.squeeze else Moments(inputs, attention)

    def hessian(
        self,
        X: Tensor,
        loss: losses.LossFunction,
        mask: Tensor | None = None,
        *,
        biases: bool | None = None,
        per_head: bool = False,
        wrt_input: bool = False,
    ) -> AttentionHessian:
        """The Hessian of loss(F(W)) over the weights, by blocks "Q", "K", "V", "O" (and "b_Q", ..., and "X").

        Args:
            X: (L, d) or (N, L, d).
            loss: a loss of `cv.losses`, or any function of F.
            mask: (L, L), (N, L, L) or (N, heads, L, L): boolean, True if a query may look, or floating point, added to
                the scores.
            biases: whether biases are blocks; by default as the layer was made.
            per_head: whether single heads are blocks, "Q.0", "Q.1", ...
            wrt_input: whether "X" (T, d) is a block too.

        Returns:
            An `AttentionHessian`: a `BlockHessian` with its split at the scores.
        """
        layer = frozen(self)
        passed = layer.forward_pass(frozen(X), frozen(mask))
        found = losses.at(loss, passed.F, passed.squeeze)
        with_biases = self.biases if biases is None else biases
        return AttentionHessian(layer, passed, found, with_biases, per_head, wrt_input)

    def jacobian(self, X: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """dF/dW for each weight, and dF/dX, as dense matrices.

        Args:
            X: (L, d) or (N, L, d).
            mask: as in `SelfAttention.hessian`.

        Returns:
            By name, for weights, biases (if they are blocks) and "X": (N L d_out, size), rows in the order of F.
        """
        layer = frozen(self)
        passed = layer.forward_pass(frozen(X), frozen(mask))
        product = AttentionProduct(layer, passed, None)
        shapes = {**self.shapes(self.biases), "X": (passed.X[..., 0].numel(), self.d)}
        fits_jacobians(passed.F, {name: a * p for name, (a, p) in shapes.items()})
        return {
            name: pushed_jacobian(
                lambda directions: product.push(directions)[0], name, shape, passed.F, passed.workspace
            )
            for name, shape in shapes.items()
        }
