"""The paper's GPT-2: one causal head per block, a ReLU feed-forward layer, with or without Pre-LayerNorm.

    x   = W_E[tokens] + W_pos                                   (N, L, d)
    x  <- x + F,   F = attention(norm(x))                       one head, d_head = d, scores over sqrt(d)
    x  <- x + relu(norm(x) W_up + b_up) W_down + b_down         width 4 d
    logits = norm(x) W_U + b_U                                  (N, L, vocabulary)

Weights act from the right, `X @ W`, so W is (d_in, d_out). `attention`, `attention_input` and `tail` cut the
network at the attention output F of one block: loss(tokens, targets) = tail(attention(attention_input)).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvoscope import checks, exact, losses
from curvoscope.errors import DtypeError, EmptyError, RangeError, ShapeError

_NORMS = ("none", "pre")
_ACTIVATIONS = ("softmax", "linear")
_IGNORED = -100

DrawWeight = Callable[[int, int], nn.Parameter]


class PrimitiveLayerNorm(nn.Module):
    """y = gamma (x - mean x) / sqrt(var x + eps) + beta over the last axis, variance over d.

    Made of primitives: torch's native layer norm has wrong derivatives under nested torch.func transforms.
    """

    def __init__(self, d: int, dtype: torch.dtype, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(d, dtype=dtype))
        self.beta = nn.Parameter(torch.zeros(d, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        centred = x - x.mean(-1, keepdim=True)
        return self.gamma * centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() + self.beta


class GPT2Block(nn.Module):
    """One attention head and one feed-forward layer, each on a residual branch."""

    def __init__(
        self, d: int, norm: str, activation: str, draw: DrawWeight, dtype: torch.dtype, residual: bool = True
    ) -> None:
        super().__init__()
        self.activation, self.residual = activation, residual
        self.norm1, self.norm2 = _norm(norm, d, dtype), _norm(norm, d, dtype)
        self.W_Q, self.W_K, self.W_V, self.W_O = (draw(d, d) for _ in range(4))
        self.b_Q, self.b_K, self.b_V, self.b_O = (_zeros(d, dtype) for _ in range(4))
        self.W_up, self.b_up = draw(d, 4 * d), _zeros(4 * d, dtype)
        self.W_down, self.b_down = draw(4 * d, d), _zeros(d, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(N, L, d) -> (N, L, d)."""
        return self.after_attention(x, self.attend(self.norm1(x)))

    def attend(self, X: Tensor) -> Tensor:
        """Causal attention on its input X, biases and W_O included: F, (N, L, d)."""
        query, key, value = X @ self.W_Q + self.b_Q, X @ self.W_K + self.b_K, X @ self.W_V + self.b_V
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        visible = torch.ones(X.shape[1], X.shape[1], dtype=torch.bool, device=X.device).tril()
        if self.activation == "softmax":
            weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        else:
            weights = scores.masked_fill(~visible, 0.0)
        return weights @ value @ self.W_O + self.b_O

    def after_attention(self, x: Tensor, F: Tensor) -> Tensor:
        """The block's output, from the residual stream x before it and its attention output F."""
        x = x + F if self.residual else F
        return x + (self.norm2(x) @ self.W_up + self.b_up).relu() @ self.W_down + self.b_down


class GPT2(nn.Module):
    """The paper's network at initialisation: weights N(0, 0.64/d), biases 0, LayerNorms (if any) the identity map.

    The weights are drawn in float64 from a generator of their own and then rounded to `dtype`: a function of
    `seed` and of the sizes alone, the same for every `norm` and `activation`.

    Args:
        d: the width.
        depth: the number of blocks.
        norm: "none" or "pre" for LayerNorms before attention, feed-forward layer and unembedding.
        activation: of attention, "softmax" or "linear".
        vocabulary: the number of tokens.
        context: the largest length of a sequence.
        seed: for the weights.
        dtype: of the weights.
        residual: if False, the attention output replaces the stream, x <- F, as in the paper's chains of linear
            attention layers; the feed-forward branch stays.

    Example:
        >>> from curvoscope.papers.networks import GPT2
        >>> from curvoscope.papers.tasks import addition, answer_targets
        >>> model, batch = GPT2(d=4), addition(sequences=2)
        >>> tokens, targets = batch[:, :-1], answer_targets(batch)
        >>> tuple(model(tokens).shape)
        (2, 17, 12)
        >>> H = model.attention().hessian(model.attention_input(tokens), model.tail(tokens, targets))
        >>> tuple(H["Q", "V"].shape)
        (16, 16)
    """

    def __init__(
        self,
        d: int = 16,
        depth: int = 1,
        norm: str = "none",
        activation: str = "softmax",
        vocabulary: int = 12,
        context: int = 18,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        residual: bool = True,
    ) -> None:
        super().__init__()
        checks.at_least(1, d=d, depth=depth, vocabulary=vocabulary, context=context)
        checks.torch_seed(seed)
        if not dtype.is_floating_point:
            raise DtypeError("dtype", f"got {dtype}, expected a floating-point dtype")
        checks.choice("norm", norm, _NORMS)
        checks.choice("activation", activation, _ACTIVATIONS)
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int) -> nn.Parameter:
            weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            return nn.Parameter((0.8 / math.sqrt(d) * weight).to(dtype))

        self.W_E, self.W_pos = draw(vocabulary, d), draw(context, d)
        self.blocks = nn.ModuleList(GPT2Block(d, norm, activation, draw, dtype, residual) for _ in range(depth))
        self.norm = _norm(norm, d, dtype)
        self.W_U, self.b_U = draw(d, vocabulary), _zeros(vocabulary, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: (N, L) int64 -> (N, L, vocabulary)."""
        return self._logits(self._stream(tokens, len(self.blocks)))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, the mean over the positions whose target is not -100. Both arguments are (N, L)."""
        return self._cross_entropy(self(tokens), targets)

    def attention(self, block: int = -1) -> exact.SelfAttention:
        """The attention layer of `block` with its present weights, for the closed forms."""
        part = self._block(block)
        weights = (part.get_parameter(f"{kind}_{role}").detach() for kind in "Wb" for role in "QKVO")
        return exact.SelfAttention(*weights, activation=part.activation, causal=True)

    def stack(self) -> exact.Stack:
        """All blocks and the final norm, if any, with their present weights, for the closed forms.

        It reads `residual_stream(tokens, 0)`; its loss is `exact_loss(targets)`.
        """
        parts = [self._block(i) for i in range(len(self.blocks))]
        if not parts[0].residual:
            raise RangeError("residual", "is False; a stack's blocks have a residual connection around attention")
        found: list[exact.TransformerBlock | exact.LayerNorm] = []
        for i, part in enumerate(parts):
            names = ("W_up", "b_up", "W_down", "b_down")
            up, b_up, down, b_down = (part.get_parameter(name).detach() for name in names)
            feedforward = exact.FeedForward(up, b_up, down, b_down, "relu")
            norm1, norm2 = exact_norm(part.norm1), exact_norm(part.norm2)
            placement = "none" if norm1 is None else "pre"
            found.append(exact.TransformerBlock(self.attention(i), feedforward, norm1, norm2, placement))
        last = exact_norm(self.norm)
        if last is not None:
            found.append(last)
        return exact.Stack(found)

    def exact_loss(self, targets: Tensor) -> losses.CrossEntropy:
        """The cross-entropy after the unembedding, as a function of the output (N, L, d) of `stack`."""
        return losses.CrossEntropy(targets, self.W_U.detach(), self.b_U.detach(), ignore_index=_IGNORED)

    def residual_stream(self, tokens: Tensor, block: int = -1) -> Tensor:
        """The residual stream before `block`, (N, L, d)."""
        return self._stream(tokens, self._index(block))

    def attention_input(self, tokens: Tensor, block: int = -1) -> Tensor:
        """X, (N, L, d): the input of the attention layer of `block`, after the norm if there is one."""
        part = self._block(block)
        with torch.no_grad():
            X: Tensor = part.norm1(self._stream(tokens, self._index(block)))
        return X

    def tail(self, tokens: Tensor, targets: Tensor, block: int = -1) -> Callable[[Tensor], Tensor]:
        """The rest of the network: a function from the attention output F (N, L, d) of `block` to the loss.

        It adds the residual stream, a constant, and runs the network to the end. Behind the last block it acts on each
        token alone; behind an earlier one the following attention layers mix the tokens of a sequence.
        """
        part, index = self._block(block), self._index(block)
        with torch.no_grad():
            residual = self._stream(tokens, index)

        def loss(F: Tensor) -> Tensor:
            x = part.after_attention(residual, F)
            for later in self.blocks[index + 1 :]:
                x = later(x)
            return self._cross_entropy(self._logits(x), targets)

        return loss

    def _stream(self, tokens: Tensor, index: int) -> Tensor:
        """The residual stream after `index` blocks, (N, L, d)."""
        vocabulary, context = self.W_E.shape[0], self.W_pos.shape[0]
        if tokens.dtype != torch.int64:
            raise DtypeError("tokens", f"expected torch.int64, got {tokens.dtype}")
        if tokens.ndim != 2 or tokens.shape[1] > context:
            raise ShapeError("tokens", f"got shape {tuple(tokens.shape)}, expected (N, L) with L at most {context}")
        if tokens.numel() == 0:
            raise EmptyError("tokens", f"is empty, shape {tuple(tokens.shape)}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise RangeError(
                "tokens", f"from {int(tokens.min())} to {int(tokens.max())}, expected 0 to {vocabulary - 1}"
            )
        x = self.W_E[tokens] + self.W_pos[: tokens.shape[1]]
        for block in self.blocks[:index]:
            x = block(x)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.norm(x) @ self.W_U + self.b_U
        return logits

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        vocabulary = logits.shape[-1]
        if targets.dtype != torch.int64:
            raise DtypeError("targets", f"expected torch.int64, got {targets.dtype}")
        if targets.shape != logits.shape[:-1]:
            raise ShapeError("targets", f"got shape {tuple(targets.shape)}, expected {tuple(logits.shape[:-1])}")
        counted = targets[targets != _IGNORED]
        if counted.numel() == 0:
            raise EmptyError("targets", f"every one is {_IGNORED}: no position has a loss")
        if int(counted.min()) < 0 or int(counted.max()) >= vocabulary:
            raise RangeError(
                "targets", f"expected 0 to {vocabulary - 1}, or {_IGNORED} for a position without a target"
            )
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)

    def _index(self, block: int) -> int:
        depth = len(self.blocks)
        if not -depth <= block < depth:
            raise RangeError("block", f"got {block}, expected {-depth} to {depth - 1}")
        return block % depth

    def _block(self, block: int) -> GPT2Block:
        part = self.blocks[self._index(block)]
        assert isinstance(part, GPT2Block)
        return part


def _zeros(size: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, dtype=dtype))


def exact_norm(norm: nn.Module) -> exact.LayerNorm | None:
    """A norm of the network with its present weights, for the closed forms; None if there is none."""
    if not isinstance(norm, PrimitiveLayerNorm):
        return None
    return exact.LayerNorm(norm.gamma.detach(), norm.beta.detach(), norm.eps)


def _norm(norm: str, d: int, dtype: torch.dtype) -> nn.Module:
    return PrimitiveLayerNorm(d, dtype) if norm == "pre" else nn.Identity()
