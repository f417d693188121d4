"""Self-attention: the weights, the forward pass, and the ways between heads and output.

From the projection X W + b to the queries or keys that make scores there may be a norm (QK-norm), then positions:

    y_i = R_i (γ ∘ x̂_i + β)      x̂ the projection of token i, normalised over each head or over all of them

Both act on each token alone. Along a direction dx of the projection y moves by R (γ ∘ J dx), J = dx̂/dx, and a gradient
g at y goes back to J (γ ∘ R^T g), which itself moves with x: the term `bend`, the only second derivative.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import DtypeError, EmptyError, MaskError, ModelError, NonFiniteError, RangeError, ShapeError
from curvoscope.exact.attention.query_key_norm import HeadMap, QueryKeyNorm
from curvoscope.exact.attention.rotary import PositionMap, Rotary
from curvoscope.losses import Port

_SCORES = 4  # matrices of the scores' size in a forward pass: scores, masked, their softmax and its exponentials


def split_heads(values: Tensor, heads: int) -> Tensor:
    """(..., L, heads*w) -> (..., heads, L, w)."""
    return values.unflatten(-1, (heads, -1)).transpose(-2, -3)


def merge_heads(values: Tensor) -> Tensor:
    """(..., heads, L, w) -> (..., L, heads*w)."""
    return values.transpose(-2, -3).flatten(-2)


@dataclass(frozen=True)
class Pass:
    """A forward pass: X (N, L, d), queries (N, H, L, k) and keys (N, G, L, k) as they make scores, values (N, G, L, e).

    A (N, H, L, L), `open_keys` (N or 1, H or 1, L, L) in {0, 1} for linear attention, head outputs A V (N, H, L, e)
    and the layer's output F (N, L, m). `squeeze`: the input had no batch axis. `capped`: tanh(T/c) of soft-capped
    scores T (N, H, L, L).
    """

    X: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    A: Tensor
    open_keys: Tensor | None
    visible: Tensor
    head_output: Tensor
    F: Tensor
    squeeze: bool
    capped: Tensor | None = None

    @property
    def workspace(self) -> int:
        """Bytes that a product with the Hessian needs for a direction."""
        numbers = 8 * self.A.numel() + 12 * self.query.numel() + 4 * self.X.numel()
        return numbers * self.X.element_size()


class AttentionLayer:
    """F = [A^1 V^1, ..., A^H V^H] W_O with A = softmax(Q K^T / (t sqrt(d_k))), Q = X W_Q + b_Q, and so on.

    `SelfAttention` adds the Hessian.

    Args:
        W_Q: (d, heads*d_k).
        W_K: (d, kv_heads*d_k).
        W_V: (d, kv_heads*d_v).
        W_O: (heads*d_v, d_out); None: the heads are the output.
        b_Q: (heads*d_k,), and b_K, b_V, b_O likewise.
        b_K: see b_Q.
        b_V: see b_Q.
        b_O: see b_Q.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`.
        combine: "concat", or "sum" of the heads.
        activation: "softmax" or "linear".
        temperature: t.
        causal: whether a query sees only the keys up to its own place.
        biases: whether biases are blocks of the Hessian.
        rotary: base of rotary position embeddings, or any linear map for each position, if any.
        key_rotary: that of the keys, if it is another one.
        q_norm: norm of the queries, if any; `k_norm` that of the keys.
        k_norm: see q_norm.
        softcap: c of scores c tanh(T/c), if they are capped.
        sinks: (heads,), the logit of each head's sink, if any.

    Example:
        >>> import torch, curvoscope as cv
        >>> W = torch.eye(2).double()
        >>> cv.exact.SelfAttention(W, W, W, causal=True)(torch.eye(2).double())[0].tolist()
        [1.0, 0.0]
    """

    def __init__(
        self,
        W_Q: Tensor,
        W_K: Tensor,
        W_V: Tensor,
        W_O: Tensor | None = None,
        b_Q: Tensor | None = None,
        b_K: Tensor | None = None,
        b_V: Tensor | None = None,
        b_O: Tensor | None = None,
        *,
        heads: int = 1,
        kv_heads: int | None = None,
        combine: str = "concat",
        activation: str = "softmax",
        temperature: float = 1.0,
        causal: bool = False,
        biases: bool = False,
        rotary: float | PositionMap | None = None,
        key_rotary: PositionMap | None = None,
        q_norm: QueryKeyNorm | None = None,
        k_norm: QueryKeyNorm | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        checks.at_least(1, heads=heads, kv_heads=kv_heads)
        kv_heads = heads if kv_heads is None else kv_heads
        checks.choice("combine", combine, ("concat", "sum"))
        checks.choice("activation", activation, ("softmax", "linear"))
        if heads % kv_heads:
            raise RangeError("kv_heads", f"got {kv_heads}, expected a divisor of heads = {heads}")
        checks.real("temperature", temperature, "a positive number")
        checks.positive(temperature=temperature, softcap=softcap)
        if sinks is not None and activation != "softmax":
            raise RangeError("sinks", f"need a softmax, got activation={activation!r}; leave out one of the two")
        for name, weight in (("W_Q", W_Q), ("W_K", W_K), ("W_V", W_V)):
            checks.floating(name, weight, like=W_Q if isinstance(W_Q, Tensor) else None)
            if weight.ndim != 2 or weight.shape[0] != W_Q.shape[0]:
                raise ShapeError(name, f"expected ({W_Q.shape[0]}, ...), got {tuple(weight.shape)}")
        self.d_k = _per_head("W_Q", W_Q, heads)
        self.d_v = _per_head("W_V", W_V, kv_heads)
        if _per_head("W_K", W_K, kv_heads) != self.d_k:
            raise ShapeError("W_K", f"has {W_K.shape[1] // kv_heads} columns per head, W_Q has {self.d_k}")
        if W_O is not None:
            checks.floating("W_O", W_O, like=W_Q)
            if combine == "sum":
                raise RangeError("combine", "'sum' adds heads without W_O; leave out one of the two")
            if W_O.ndim != 2 or W_O.shape[0] != heads * self.d_v:
                raise ShapeError("W_O", f"expected ({heads * self.d_v}, d_out), got {tuple(W_O.shape)}")
        self.d = W_Q.shape[0]
        self.d_out = W_O.shape[1] if W_O is not None else self.d_v * (heads if combine == "concat" else 1)
        widths = {"b_Q": W_Q.shape[1], "b_K": W_K.shape[1], "b_V": W_V.shape[1], "b_O": self.d_out}
        for name, bias in (("b_Q", b_Q), ("b_K", b_K), ("b_V", b_V), ("b_O", b_O)):
            if bias is not None and checks.floating(name, bias, like=W_Q).shape != (widths[name],):
                raise ShapeError(name, f"expected ({widths[name]},), got {tuple(bias.shape)}")
        if sinks is not None and checks.floating("sinks", sinks, like=W_Q).shape != (heads,):
            raise ShapeError("sinks", f"expected ({heads},), a logit for each head, got {tuple(sinks.shape)}")
        for name, norm, weight in (("q_norm", q_norm, W_Q), ("k_norm", k_norm, W_K)):
            if norm is not None and not isinstance(norm, QueryKeyNorm):
                raise ModelError(name, f"expected a QueryKeyNorm, got {type(norm).__name__}")
            if norm is not None and norm.width not in (self.d_k, weight.shape[1]):
                raise ShapeError(name, f"has width {norm.width}, expected {self.d_k} or {weight.shape[1]}")
        self.W_Q, self.W_K, self.W_V, self.W_O = W_Q, W_K, W_V, W_O
        self.b_Q, self.b_K, self.b_V, self.b_O = b_Q, b_K, b_V, b_O
        self.heads, self.kv_heads, self.combine = heads, kv_heads, combine
        self.activation, self.temperature, self.causal, self.biases = activation, temperature, causal, biases
        self.scale = 1 / (temperature * math.sqrt(self.d_k))
        self.rotary = rotary if rotary is None or isinstance(rotary, PositionMap) else Rotary(rotary, self.d_k)
        self.key_rotary = self.rotary if key_rotary is None else key_rotary
        self.q_norm, self.k_norm, self.softcap, self.sinks = q_norm, k_norm, softcap, sinks
        self.merged = False

    def __call__(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """F, (L, d_out) or (N, L, d_out)."""
        passed = self.forward_pass(X, mask)
        return passed.F[0] if passed.squeeze else passed.F

    def forward_pass(self, X: Tensor, mask: Tensor | None = None) -> Pass:
        """Everything that the forward pass computes, with a batch axis. `mask`: see `hessian`."""
        if not isinstance(X, Tensor) or X.numel():  # that nothing is there is said below, with what is missing
            checks.floating("X", X, like=self.W_Q)
        if X.ndim not in (2, 3) or X.shape[-1] != self.d:
            raise ShapeError("X", f"expected (L, {self.d}) or (N, L, {self.d}), got {tuple(X.shape)}")
        if X.numel() == 0:
            raise EmptyError("X", f"has no {'tokens' if X.shape[-2] == 0 else 'sequences'}, shape {tuple(X.shape)}")
        batch = X if X.ndim == 3 else X[None]
        query, key, value = (self.projection(role, batch).output for role in "QKV")
        share = self.heads // self.kv_heads
        checks.fits(
            _SCORES * query[..., 0].numel() * batch.shape[1] * X.element_size(),
            None,
            f"attention between {batch.shape[1]} tokens of {batch.shape[0]} sequences, {self.heads} heads",
            "use fewer or shorter sequences; of long ones, products by cv.hessian need memory linear in the length",
        )
        scores = self.scale * (query @ key.repeat_interleave(share, 1).mT)
        capped = None if self.softcap is None else (scores / self.softcap).tanh()
        if capped is not None and self.softcap is not None:
            scores = self.softcap * capped
        bias, visible = self._mask(scores, mask)
        if bias is not None:
            scores = scores + bias
        open_keys = None
        if self.activation == "softmax":
            scores = scores.masked_fill(~visible, -math.inf)
            A = scores.softmax(-1) if self.sinks is None else _softmax_beside(scores, self.sinks)
        else:
            A = scores.masked_fill(~visible, 0)
            open_keys = visible.to(X.dtype)
        head_output = A @ value.repeat_interleave(share, 1)
        F = self.to_output(head_output)
        F = F if self.b_O is None else F + self.b_O
        if not bool(torch.isfinite(F).all()):
            raise NonFiniteError("X", "the scores or values overflow; scale the input or the weights down")
        return Pass(batch, query, key, value, A, open_keys, visible, head_output, F, X.ndim == 2, capped)

    def projection(self, role: str, X: Tensor) -> "ProjectionMap":
        """Queries "Q", keys "K" or values "V" of X (N, L, d)."""
        if role == "Q":
            return ProjectionMap(_affine(X, self.W_Q, self.b_Q), self.heads, self.q_norm, self.rotary)
        if role == "K":
            return ProjectionMap(_affine(X, self.W_K, self.b_K), self.kv_heads, self.k_norm, self.key_rotary)
        return ProjectionMap(_affine(X, self.W_V, self.b_V), self.kv_heads)

    @property
    def is_bilinear(self) -> bool:
        """Whether scores are bilinear in W_Q and W_K alone: no positions, no norms and no cap act on them."""
        between = self.rotary, self.key_rotary, self.q_norm, self.k_norm, self.softcap
        return all(one is None for one in between)

    def has_cores(self, role: str) -> bool:
        """Whether a weight moves the output by z_i (x) M_i at each token i. Keys behind a norm or positions do not:
        their map is that of the key, not of token i. Nor do queries that are normalised together with other heads."""
        if role not in "QKM" or self.softcap is not None:
            return role not in "QKM"
        if role == "K":
            return self.key_rotary is None and self.k_norm is None
        return self.q_norm is None or self.q_norm.width == self.d_k

    @property
    def turns_keys(self) -> bool:
        """Whether scores are linear in W_K behind positions of the keys: then `RotaryKeys` has the functional part."""
        between = self.k_norm, self.softcap
        return self.key_rotary is not None and self.activation == "softmax" and all(one is None for one in between)

    def coreless(self, functional: bool) -> str:
        """The roles among Q and K whose blocks have products only: of all parts, or of the functional part."""
        return "".join(
            role for role in "QK" if not (self.has_cores(role) or (functional and role == "K" and self.turns_keys))
        )

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The weight matrices."""
        found = {"W_Q": self.W_Q, "W_K": self.W_K, "W_V": self.W_V, "W_O": self.W_O}
        return {name: weight for name, weight in found.items() if weight is not None}

    def shapes(self, biases: bool) -> dict[str, tuple[int, int]]:
        """Names and shapes of the weights that are blocks of the Hessian; a bias is a weight with one row."""
        d, query = self.d, "QK" if self.merged else "Q"
        shapes = {query: (d, self.heads * self.d_k)}
        if not self.merged:
            shapes["K"] = (d, self.kv_heads * self.d_k)
        shapes["V"] = (d, self.kv_heads * self.d_v)
        if self.W_O is not None:
            shapes["O"] = (self.heads * self.d_v, self.d_out)
        if biases:
            present = {"b_Q": self.b_Q, "b_K": self.b_K, "b_V": self.b_V, "b_O": self.b_O}
            shapes |= {name: (1, bias.numel()) for name, bias in present.items() if bias is not None}
        return shapes

    split = staticmethod(split_heads)
    merge = staticmethod(merge_heads)

    def to_output(self, head_output: Tensor) -> Tensor:
        """From the heads (..., H, L, e) to the output (..., L, m), without its bias."""
        if self.W_O is not None:
            return self.merge(head_output) @ self.W_O
        return self.merge(head_output) if self.combine == "concat" else head_output.sum(-3)

    def to_heads(self, gradient: Tensor) -> Tensor:
        """The transposed map, from gradients at the output (..., L, m) to the heads (..., H, L, e)."""
        if self.W_O is not None:
            return self.split(gradient @ self.W_O.mT, self.heads)
        if self.combine == "concat":
            return self.split(gradient, self.heads)
        return gradient[..., None, :, :].expand(*gradient.shape[:-2], self.heads, *gradient.shape[-2:])

    def port(self, head: int) -> Port:
        """How head `head` reaches the output: its rows of W_O, its columns of F, or directly (None)."""
        part = slice(head * self.d_v, (head + 1) * self.d_v)
        if self.W_O is not None:
            return self.W_O[part]
        return None if self.combine == "sum" or self.heads == 1 else part

    def _mask(self, scores: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """What to add to the scores, and where keys are visible, broadcastable to (N, H, L, L)."""
        sequences, heads, length = scores.shape[:3]
        visible = torch.ones(1, 1, length, length, dtype=torch.bool, device=scores.device)
        visible = visible.tril() if self.causal else visible
        if mask is None:
            return None, visible
        if not isinstance(mask, Tensor):
            raise DtypeError("mask", f"expected a torch.Tensor, got {type(mask).__name__}")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise MaskError("mask", f"expected boolean or floating point, got {mask.dtype}")
        if mask.ndim not in (2, 3, 4):
            raise ShapeError("mask", f"expected (L, L), (N, L, L) or (N, heads, L, L), got {tuple(mask.shape)}")
        full = mask[None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
        if any(n not in (1, m) for n, m in zip(full.shape[:2], (sequences, heads), strict=True)) or full.shape[2:] != (
            length,
            length,
        ):
            raise ShapeError("mask", f"{tuple(mask.shape)} does not fit scores of {tuple(scores.shape)}")
        bias = None
        if full.dtype == torch.bool:
            visible = visible & full
        else:
            if bool(torch.isnan(full).any() | (full == math.inf).any()):
                raise NonFiniteError("mask", "additive masks may hold -inf, but neither NaN nor +inf")
            visible = visible & (full > -math.inf)
            bias = full.masked_fill(full == -math.inf, 0).to(scores.dtype)
        if not bool(visible.any(-1).all()):
            row = (~visible.any(-1)).nonzero()[0].tolist()
            raise MaskError("mask", f"query {row[2]} of sequence {row[0]} sees no key at all")
        return bias, visible


def _per_head(name: str, weight: Tensor, heads: int) -> int:
    if weight.shape[1] % heads:
        raise ShapeError(name, f"{weight.shape[1]} columns cannot be divided among {heads} heads")
    return weight.shape[1] // heads


def _affine(X: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return X @ weight if bias is None else X @ weight + bias


def _softmax_beside(scores: Tensor, sinks: Tensor) -> Tensor:
    """The softmax over the keys and a sink of each head, without the sink: (N, H, L, L)."""
    beside = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


# ---- from projections to queries, keys and values


class ProjectionMap:
    """y of above for `heads` heads, at one projection (N, L, heads*w)."""

    def __init__(
        self, projected: Tensor, heads: int, norm: QueryKeyNorm | None = None, positions: PositionMap | None = None
    ) -> None:
        self._heads, self._positions = heads, positions
        self._norm = None if norm is None else norm.at(projected)
        normalised = projected if self._norm is None else self._norm.output
        self.output = self._turned(split_heads(normalised, heads))

    @property
    def is_linear(self) -> bool:
        """Whether there is no second derivative."""
        return self._norm is None

    def push(self, direction: Tensor) -> Tensor:
        """dy (n, N, H, L, w) along dx (n, N, L, heads*w)."""
        moved = direction if self._norm is None else self._norm.push(direction)
        return self._turned(split_heads(moved, self._heads))

    def pull(self, gradient: Tensor) -> Tensor:
        """The gradient at the projection (..., N, L, heads*w) for one at y (..., N, H, L, w)."""
        back = self._turned_back(gradient)
        return back if self._norm is None else self._norm.pull(back)

    def bend(self, direction: Tensor, gradient: Tensor) -> Tensor:
        """How `pull` of a gradient (N, H, L, w) moves along dx (n, N, L, heads*w)."""
        if self._norm is None:
            return torch.zeros_like(direction)
        return self._norm.bend(direction, self._turned_back(gradient))

    def _turned(self, vectors: Tensor) -> Tensor:
        return vectors if self._positions is None else self._positions.of_heads(vectors)

    def _turned_back(self, gradient: Tensor) -> Tensor:
        return merge_heads(gradient if self._positions is None else self._positions.of_heads(gradient, back=True))

    def of_head(self, head: int) -> HeadMap | None:
        """The derivative of y in the projection of one head, if it is not the identity and each head has its own."""
        positions = None if self._positions is None else self._positions.of_head(head)
        if self._norm is None:
            return None if positions is None else HeadMap(positions)
        return HeadMap(positions, *self._norm.of_head(head, self._heads))
