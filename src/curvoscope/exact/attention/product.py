"""The closed-form Hessian-vector product of attention: about three forward passes, no d x d or k x k tensor per token.

Notation of the forward pass, and d for the derivative along a direction of the weights and the input:

    dT = s (dq K^T + q dK^T)    dA = D dT    dF_h = dA V + A dV    (D the row derivative of A in T)
    u = G_h V^T                 P = D u      g_q = s P K    g_K = s P^T q    g_V = A^T G_h

The product is the derivative of the gradient: outer through dG = S dF alone, functional with G held fixed. Soft-capped
scores c tanh(T/c) put their slope τ' = 1 - tanh² beside D: dA = D τ' dT and P = τ' D u, whose derivative has the
further term τ'' dT D u. Norms and positions between the projections and q, K are in `layer`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvoscope.exact.assembly import Directions
from curvoscope.exact.attention.layer import AttentionLayer, Pass
from curvoscope.exact.attention.moments import about, softmax_derivative
from curvoscope.losses import LossAt

Moved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, dA and the heads' dF


class AttentionProduct:
    """Products of the Hessian's parts with directions, each a dict of (n, a, p) tensors, n directions at once."""

    def __init__(self, layer: AttentionLayer, passed: Pass, loss: LossAt | None) -> None:
        self.layer, self.passed, self._loss = layer, passed, loss
        share = layer.heads // layer.kv_heads
        groups = (layer.kv_heads, share)
        # (N, G, share, L, ·): the queries of a group beside the keys and values that they share
        self._q = passed.query.unflatten(1, groups)
        self._k, self._v = passed.key[:, :, None], passed.value[:, :, None]
        self._A = passed.A.unflatten(1, groups)
        self._open = passed.open_keys
        if self._open is not None:
            self._open = self._open.expand_as(passed.A).unflatten(1, groups)
        shifts = self._open is None and layer.sinks is None
        self._top = self._A.argmax(-1, keepdim=True) if shifts else None
        self._slope = self._bend = None
        if passed.capped is not None and layer.softcap is not None:
            capped = passed.capped.unflatten(1, groups)
            self._slope = 1 - capped.square()
            self._bend = (-2 / layer.softcap) * capped * self._slope
        self._maps = {role: layer.projection(role, passed.X) for role in "QKV"}
        if loss is None:
            return
        self._G = loss.gradient
        self._Gh = layer.to_heads(self._G).unflatten(1, groups)
        self._u = about(self._Gh @ self._v.mT, self._top)
        self._Du = self._derivative(self._u)
        self._P = self._sloped(self._Du)
        s = layer.scale
        self._at_heads = {  # at queries, keys and values, (N, H or G, L, ·)
            "Q": (s * self._P @ self._k).flatten(-4, -3),
            "K": (s * (self._P.mT @ self._q).sum(2, keepdim=True)).flatten(-4, -3),
            "V": (self._A.mT @ self._Gh).sum(2, keepdim=True).flatten(-4, -3),
        }
        # at the projections X W + b, which the direction of X meets again
        self._gradients = {role: self._maps[role].pull(values) for role, values in self._at_heads.items()}

    def __call__(self, directions: Directions, wanted: Sequence[str], outer: bool, functional: bool) -> Directions:
        """The parts asked for, of the Hessian times the directions, at the blocks `wanted`."""
        assert self._loss is not None
        dF, moved = self.push(directions)
        dG = self._loss.curvature.apply(dF) if outer else torch.zeros_like(dF)
        return self.pull(directions, moved, dG, wanted, functional)

    def push(self, directions: Directions) -> tuple[Tensor, Moved]:
        """dF (n, N, L, m) along the directions, and what moved on the way."""
        moved = self._push(directions)
        return self._to_output(moved[-1], directions), moved

    def pull(
        self, directions: Directions, moved: Moved | None, dG: Tensor, wanted: Sequence[str], functional: bool
    ) -> Directions:
        """How the gradients at the blocks `wanted` move when the one at the output moves by dG (n, N, L, m) and, with
        `functional`, when the layer itself moves along the directions while G is held fixed."""
        layer, s = self.layer, self.layer.scale
        dGh = self._to_heads(dG)
        if functional:
            assert moved is not None
            dq, dk, dv, dA, dFh = moved
        if functional and "O" in directions:
            turned = layer.split(self._G @ directions["O"].mT[:, None], layer.heads)
            dGh = dGh + turned.unflatten(-3, self._A.shape[1:3])
        du = dGh @ self._v.mT
        if functional:
            du = du + self._Gh @ dv.mT
        dP = self._derivative(du)
        if functional and self._open is None:
            mean = (self._A * self._u).sum(-1, keepdim=True)
            dP = dP + dA * (self._u - mean) - self._A * (dA * self._u).sum(-1, keepdim=True)
        dP = self._sloped(dP)
        if functional and self._bend is not None:
            dP = dP + self._bend * self._Du * (s * (dq @ self._k.mT + self._q @ dk.mT))
        at_q, at_k, at_v = dP @ self._k, dP.mT @ self._q, self._A.mT @ dGh
        if functional:
            at_q, at_k, at_v = at_q + self._P @ dk, at_k + self._P.mT @ dq, at_v + dA.mT @ self._Gh
        at_heads = {"Q": s * at_q, "K": s * at_k.sum(-3, keepdim=True), "V": at_v.sum(-3, keepdim=True)}
        projections = {role: self._maps[role].pull(values.flatten(-4, -3)) for role, values in at_heads.items()}
        if functional:
            for role in (role for role in "QK" if not self._maps[role].is_linear):
                moving = self._projected(role, directions, dG.shape[0])
                projections[role] = projections[role] + self._maps[role].bend(moving, self._at_heads[role])
        result: Directions = {}
        for name in wanted:
            if name == "X":
                at_input = self._at_input(projections, directions, functional)
                result[name] = at_input.reshape(at_input.shape[0], -1, layer.d)
            elif name == "O":
                result[name] = (layer.merge(self.passed.head_output).mT @ dG).sum(1)
                if functional:
                    result[name] += (layer.merge(dFh.flatten(-4, -3)).mT @ self._G).sum(1)
            elif name == "b_O":
                result[name] = dG.sum((1, 2))[:, None]
            elif name.startswith("b_"):
                result[name] = projections[name[2]].sum((1, 2))[:, None]
            else:
                result[name] = self._at_weight(name[0], projections, directions, functional)
        return result

    def _push(self, directions: Directions) -> Moved:
        """dq, dk, dv, dA and the heads' dF, (n, N, G, share or 1, L, ·)."""
        layer, s = self.layer, self.layer.scale
        n = next(iter(directions.values())).shape[0]
        share = self._A.shape[1:3]
        dq = self._moved("Q", directions, n, share)
        dk = self._moved("K", directions, n, (layer.kv_heads, 1))
        dv = self._moved("V", directions, n, (layer.kv_heads, 1))
        dA = self._derivative(self._sloped(s * (dq @ self._k.mT + self._q @ dk.mT)))
        return dq, dk, dv, dA, dA @ self._v + self._A @ dv

    def _moved(self, name: str, directions: Directions, n: int, groups: Sequence[int]) -> Tensor:
        """How queries, keys or values move, (n, N, G, share or 1, L, w)."""
        return self._maps[name].push(self._projected(name, directions, n)).unflatten(-3, tuple(groups))

    def _projected(self, name: str, directions: Directions, n: int) -> Tensor:
        """How the projection X W + b moves: dX W + X dW + db, (n, N, L, heads*w)."""
        weight, X = self._weight(name), self.passed.X
        total = X.new_zeros(n, *X.shape[:2], weight.shape[1])
        if self._key(name) in directions:
            total = X @ directions[self._key(name)][:, None]
        if "X" in directions:
            total = total + directions["X"].view(n, *X.shape) @ weight
        if f"b_{name}" in directions:
            total = total + directions[f"b_{name}"][:, None]
        return total

    def _sloped(self, values: Tensor) -> Tensor:
        """Times the slope of capped scores."""
        return values if self._slope is None else self._slope * values

    def _derivative(self, u: Tensor) -> Tensor:
        if self._open is not None:
            return self._open * u
        return softmax_derivative(self._A, about(u, self._top))

    def _to_output(self, dFh: Tensor, directions: Directions) -> Tensor:
        """dF, (n, N, L, m)."""
        dF = self.layer.to_output(dFh.flatten(-4, -3))
        if "O" in directions:
            dF = dF + self.layer.merge(self.passed.head_output) @ directions["O"][:, None]
        return dF + directions["b_O"][:, None] if "b_O" in directions else dF

    def _to_heads(self, gradient: Tensor) -> Tensor:
        return self.layer.to_heads(gradient).unflatten(-3, self._A.shape[1:3])

    def _at_weight(self, name: str, projections: Directions, directions: Directions, functional: bool) -> Tensor:
        """X^T g (+ dX^T g), (n, d, w)."""
        result = (self.passed.X.mT @ projections[name]).sum(1)
        if functional and "X" in directions:
            dX = directions["X"].view(-1, *self.passed.X.shape)
            result = result + (dX.mT @ self._gradients[name]).sum(1)
        return result

    def _at_input(self, projections: Directions, directions: Directions, functional: bool) -> Tensor:
        """g_Q W_Q^T + g_K W_K^T + g_V W_V^T (+ the directions of the weights), (n, N, L, d)."""
        total = self.passed.X.new_zeros(())
        for name, value in projections.items():
            total = total + value @ self._weight(name).mT
            if functional and self._key(name) in directions:
                total = total + self._gradients[name] @ directions[self._key(name)].mT[:, None]
        return total

    def _key(self, name: str) -> str:
        return "QK" if name == "Q" and self.layer.merged else name

    def _weight(self, name: str) -> Tensor:
        return {"Q": self.layer.W_Q, "K": self.layer.W_K, "V": self.layer.W_V}[name]
