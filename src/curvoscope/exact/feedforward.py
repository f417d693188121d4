"""The feed-forward layer, plain and gated.

    plain   h = x W1 + b1     z = φ(h)                    y = z W2 + b2
    gated   h = x W1 + b1     z = φ(v) ∘ h                y = z W2 + b2     v = x W_gate + b_gate

W1, W_gate (d, f), W2 (f, m). Let z_i and z_ij be the derivatives of z, elementwise in the hidden units, in the
pre-activations i, j (h, v): plain z_h = φ'(h), z_hh = φ''(h); gated z_h = φ(v), z_v = φ'(v) h, z_hv = φ'(v),
z_vv = φ''(v) h and z_hh = 0. For a loss with gradient G and Hessian S at y, g = G W2^T, sums over the tokens t:

    H_o(W_i, W_j)[ae, bg] = Σ x_a x_b (diag(z_i) W2 S_t W2^T diag(z_j))[e, g]     H_f: δ_eg Σ x_a x_b (z_ij g)_e
    H_o(W_i, W2)[ae, gn]  = Σ x_a z_g (diag(z_i) W2 S_t)[e, n]                    H_f: δ_eg Σ x_a (z_i)_e G_n
    H_o(W2, W2)[ec, gn]   = Σ z_e z_g S_t[c, n]                                   H_f: 0

A bias has 1 for x or z, and nothing functional with b2. For ReLU φ'' = 0 leaves no functional diagonal block.
"""

from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from curvoscope.exact.activations import ACTIVATIONS, DiagonalCore
from curvoscope.exact.assembly import Directions
from curvoscope.exact.factor import Factor, TermList, fits_jacobian
from curvoscope.exact.tokenwise import Pairs, TokenwiseHessian, TokenwiseLayer
from curvoscope.losses import LossAt
from curvoscope.operators.base import Shape
from curvoscope.operators.terms import Term


class FeedForward(TokenwiseLayer):
    """y = φ(x W1 + b1) W2 + b2, or with `W_gate` y = (φ(x W_gate + b_gate) ∘ (x W1 + b1)) W2 + b2.

    Blocks "W1", "b1", "W2", "b2", and "W_gate", "b_gate" of a gate; biases that are None have no block. A Hessian also
    answers to their names in a network: "up", "b_up", "down", "b_down" and "gate".

    Args:
        W1: (d, f), called "up" in a network.
        b1: (f,) or None.
        W2: (f, m), called "down" in a network.
        b2: (m,) or None.
        activation: φ: "relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu2" or "gelu_bloom".
        W_gate: (d, f), called "gate" in a network; with it the layer is gated.
        b_gate: (f,) or None.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer = cv.exact.FeedForward(torch.eye(2), None, torch.eye(2), None, activation="relu")
        >>> H = layer.hessian(torch.ones(3, 2), cv.losses.MSE(torch.zeros(3, 2)))
        >>> H.names, round(float(H.outer["W1"].trace()), 6)
        (['W1', 'W2'], 4.0)
        >>> H["up", "down"] is H["W1", "W2"]
        True
    """

    labels = MappingProxyType(
        {"W_gate": "gate", "W1": "up", "W2": "down", "b_gate": "b_gate", "b1": "b_up", "b2": "b_down"}
    )

    def __init__(
        self,
        W1: Tensor,
        b1: Tensor | None,
        W2: Tensor,
        b2: Tensor | None,
        activation: str = "relu",
        W_gate: Tensor | None = None,
        b_gate: Tensor | None = None,
    ) -> None:
        for name, weight in (("W1", W1), ("W2", W2)):
            checks.floating(name, weight, like=W1 if name == "W2" else None)
            if weight.ndim != 2:
                raise ShapeError(name, f"expected a matrix (d_in, d_out), got {tuple(weight.shape)}")
        if W2.shape[0] != W1.shape[1]:
            raise ShapeError("W2", f"expected ({W1.shape[1]}, d_out) after W1, got {tuple(W2.shape)}")
        if b_gate is not None and W_gate is None:
            raise RangeError("b_gate", "is given without W_gate; give both for the gated form")
        hidden, out = tuple(W1.shape[1:]), tuple(W2.shape[1:])
        others = (("b1", b1, hidden), ("b2", b2, out), ("W_gate", W_gate, tuple(W1.shape)), ("b_gate", b_gate, hidden))
        for name, values, shape in others:
            if values is not None and checks.floating(name, values, like=W1).shape != shape:
                raise ShapeError(name, f"expected {shape}, got {tuple(values.shape)}")
        self.activation = checks.choice("activation", activation, tuple(ACTIVATIONS))
        given = {"W1": W1, "b1": b1, "W2": W2, "b2": b2, "W_gate": W_gate, "b_gate": b_gate}
        self.weights = {name: values for name, values in given.items() if values is not None}
        self.d, self.d_out = W1.shape[0], W2.shape[1]

    def __call__(self, X: Tensor) -> Tensor:
        """y, (L, m) or (N, L, m)."""
        return self._pass(X).y.view(*X.shape[:-1], -1)

    def _around(self, X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> TokenwiseHessian:
        at = self._pass(X)
        checks.commensurate({**self.matrices, "X": X})
        return _FeedForwardHessian(at, X, loss, shapes)

    def _pass(self, X: Tensor) -> "_Pass":
        W1 = self.weights["W1"]
        checks.floating("X", X, like=W1)
        if X.ndim not in (2, 3) or X.shape[-1] != W1.shape[0]:
            raise ShapeError("X", f"expected (L, {W1.shape[0]}) or (N, L, {W1.shape[0]}), got {tuple(X.shape)}")
        return _Pass(self.weights, self.activation, X.flatten(0, -2))


class _Pass:
    """The layer at one input x (T, d): z (T, f), its derivatives z_i and z_ij by the weight "W1" or "W_gate", and y."""

    def __init__(self, weights: dict[str, Tensor], activation: str, x: Tensor) -> None:
        self.x, self.weights = x, weights
        self.ones = x.new_ones(x.shape[0], 1)
        h = self._affine("W1", "b1", x)
        self.second: dict[tuple[str, str], Tensor] = {}  # what is not there is zero
        if "W_gate" not in weights:
            self.z, slope, bend = ACTIVATIONS[activation](h)
            self.first = {"W1": slope}
            self._put("W1", "W1", bend)
        else:
            v = self._affine("W_gate", "b_gate", x)
            gate, slope, bend = ACTIVATIONS[activation](v)
            self.z, self.first = gate * h, {"W1": gate, "W_gate": slope * h}
            self._put("W1", "W_gate", slope)
            self._put("W_gate", "W_gate", None if bend is None else bend * h)
        self.y = self._affine("W2", "b2", self.z)

    @cached_property
    def input_jacobian(self) -> Tensor:
        """dy/dx = Σ_i (W_i diag(z_i) W2)^T of every token, (T, m, d)."""
        fits_jacobian(self.y.numel(), self.x.shape[1], "x, token by token", self.x)
        W2 = self.weights["W2"]
        paths = [(slope[:, :, None] * W2).mT @ self.weights[name].T for name, slope in self.first.items()]
        return _added(paths)

    def factor(self, name: str) -> Factor:
        """How a weight or bias moves y: dy_t = (l_t^T dW ∘ s_t) P."""
        bias, weight = name.startswith("b"), "W" + name[1:]
        if weight == "W2":
            return Factor(self.ones if bias else self.z)
        return Factor(self.ones if bias else self.x, self.weights["W2"], self.first[weight])

    def _affine(self, weight: str, bias: str, values: Tensor) -> Tensor:
        result = values @ self.weights[weight]
        if bias in self.weights:
            result = result + self.weights[bias]
        if not bool(torch.isfinite(result).all()):
            what = f"{'z' if weight == 'W2' else 'X'} @ {weight}" + (f" + {bias}" if bias in self.weights else "")
            raise NonFiniteError("X", f"{what} overflows; scale the input or the weights down")
        return result

    def _put(self, row: str, column: str, values: Tensor | None) -> None:
        if values is not None:
            self.second[row, column] = self.second[column, row] = values


class _FeedForwardHessian(TokenwiseHessian):
    def __init__(self, at: _Pass, X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> None:
        super().__init__({name: at.factor(name) for name in shapes if name != "X"}, X, loss, shapes)
        self._at = at
        self._at_z = self.gradient @ at.weights["W2"].T  # g

    def functional_terms(self, row: str, column: str) -> TermList:
        """diag(z_ij g) between hidden weights; x_t, G_t and diag(z_i) between a hidden weight and W2."""
        at, first, second = self._at, "W" + row[1:], "W" + column[1:]
        left, right = self.factors[row].vectors, self.factors[column].vectors
        if (first, second) in at.second:
            return [Term(left, right, DiagonalCore(at.second[first, second] * self._at_z))]
        if column == "W2" and first != "W2":
            return [Term(left, self.gradient, DiagonalCore(at.first[first]), (0, 1))]
        if row == "W2" and second != "W2":
            return [term.T for term in self.functional_terms(column, row)]
        return []

    def push(self, directions: Directions) -> tuple[Tensor, Directions]:
        """dh_i = dx W_i + x dW_i + db_i, dz = Σ z_i dh_i, dy = dz W2 + z dW2 + db2."""
        at = self._at
        n = next(iter(directions.values())).shape[0]
        nothing = self.X.new_zeros(n, 1, 1)
        moved: Directions = {}
        for name in at.first:
            moved[name] = directions.get("b" + name[1:], nothing) + nothing.expand(n, *at.z.shape)
            if "X" in directions:
                moved[name] = moved[name] + directions["X"] @ at.weights[name]
            if name in directions:
                moved[name] = moved[name] + self.X @ directions[name]
        dz = _added([slope * moved[name] for name, slope in at.first.items()])
        dy = dz @ at.weights["W2"] + directions.get("b2", nothing)
        return dy + at.z @ directions["W2"] if "W2" in directions else dy, {**moved, "z": dz}

    def pull(self, directions: Directions, moved: Directions, back: Tensor, functional: bool) -> tuple[Pairs, Tensor]:
        """The gradients z^T G at W2, g = G W2^T at z, z_i g at h_i, x^T (z_i g) at W_i and Σ_i (z_i g) W_i^T at x: they
        move with G, and in the functional part with G held fixed."""
        at = self._at
        found: Pairs = {"W2": [(at.z, back)], "b2": [(at.ones, back)]}
        at_z = back @ at.weights["W2"].T
        if functional:
            found["W2"].append((moved["z"], self.gradient))
            if "W2" in directions:
                at_z = at_z + self.gradient @ directions["W2"].mT
        at_x = self.X.new_zeros(back.shape[0], *self.X.shape)
        for name, slope in at.first.items():
            at_h = slope * at_z
            if functional:
                for other in at.first:
                    if (name, other) in at.second:
                        at_h = at_h + at.second[name, other] * self._at_z * moved[other]
            found[name], found["b" + name[1:]] = [(self.X, at_h)], [(at.ones, at_h)]
            at_x += at_h @ at.weights[name].T
            if functional and "X" in directions:
                found[name].append((directions["X"], slope * self._at_z))
            if functional and name in directions:
                at_x += (slope * self._at_z) @ directions[name].mT
        return found, at_x

    def mixed(self, name: str) -> list[Factor]:
        """x[b] (Σ_j W_j diag(z_ij g))[c, q] + (z_i g)[q] δ_cb at W_i; G[n] (Σ_i W_i diag(z_i))[c, e] at W2."""
        at, weight = self._at, "W" + name[1:]
        if weight == "W2":
            if name == "b2":
                return []
            slopes = _added([at.weights[i] * slope[:, None] for i, slope in at.first.items()])
            return [Factor(self.gradient, slopes.mT, axis=1)]
        found = []
        bends = [
            at.weights[j] * (at.second[weight, j] * self._at_z)[:, None] for j in at.first if (weight, j) in at.second
        ]
        if bends:
            found.append(Factor(self.factors[name].vectors, _added(bends).mT))
        if name == weight:
            identity = torch.eye(self.X.shape[1], dtype=self.X.dtype, device=self.X.device)
            found.append(Factor(at.first[weight] * self._at_z, identity.expand(len(self.X), -1, -1), axis=1))
        return found

    def input_jacobian(self) -> Tensor:
        """Σ_i (W_i diag(z_i) W2)^T."""
        return self._at.input_jacobian

    def input_curvature(self) -> Tensor:
        """Σ_ij W_i diag(z_ij g) W_j^T."""
        at = self._at
        paths = [at.weights[i] * (bend * self._at_z)[:, None] @ at.weights[j].T for (i, j), bend in at.second.items()]
        return _added(paths) if paths else self.X.new_zeros(len(self.X), *2 * self.X.shape[1:])


def _added(paths: list[Tensor]) -> Tensor:
    return paths[0] if len(paths) == 1 else torch.stack(paths).sum(0)
