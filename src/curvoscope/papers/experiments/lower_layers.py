"""The query and value blocks of the layers below the last: the outer part exactly, the functional part by probes.

Attention layers above mix the tokens of a sequence, so the Jacobian of a sequence's logits has a part at each token:
row o of R^T J (an answer position and a word) is sum_i z_i (x) Y_oi over the L tokens i, with

    query   z_i = x_i/√d                Y_oi = Cov_i[K, V W_O] b_oi
    value   z_i = attention mean of x   Y_oi = W_O b_oi            b_oi: R^T dlogits/dF_i, row o

and |H_o|² = |R^T J J^T R|² = sum over pairs of sequences (n, m) and rows (o, o') of (sum_ij (z_i . z_j) Y_oi . Y_o'j)²:
products of vectors of length L p, while the block has d p columns.

The functional part, the Hessian of <G, logits> in one weight at fixed G, is known by its products (double backward).
On the span Q of a few images of H_f and H_o everything is exact; on the rest, P = I - Q Q^T, averages over normal v:

    |H_f|² = |H_f Q|² + E |H_f P v|²        |H|² = |H_o|² + 2 <H_o, H_f> + |H_f|², <H_o, H_f> in the same two parts

It is kept because its outer part is exact: a point of Figure 6 at depth 2 takes 16 s of processor time here, and as
long by `cv.hessian` with method="autodiff", which estimates all parts to 5 %.
"""

import math

import torch
from torch import Tensor
from torch.func import functional_call

from curvoscope.estimate.result import Estimate
from curvoscope.papers.experiments.setting import ANSWERS, LogitLoss, logit_loss
from curvoscope.papers.networks import GPT2, GPT2Block

TOLERANCE = 0.05
"""The relative standard error that the estimates are carried to."""

_PROBES, _MOST_PROBES = 8, 400
Estimates = dict[tuple[int, str, str], Estimate]
"""By layer (0 is the input's), block and part."""


def lower_layer_norms(model: GPT2, tokens: Tensor, kind: str, seed: int) -> Estimates:
    """Frobenius norms of W_Q's and W_V's diagonal blocks in all layers but the last; `kind` is the loss."""
    if len(model.blocks) == 1:
        return {}
    tokens = tokens[:, : ANSWERS.stop + 1]
    inputs = tokens[:, : ANSWERS.stop]  # no later position is seen by an answer
    loss, cotangents = _backward(model, inputs, tokens, kind)
    found: Estimates = {}
    for layer, at_output in enumerate(cotangents):
        for name in ("Q", "V"):
            outer = _Outer(*_factors(model, inputs, layer, name, at_output))
            functional = _Functional(model, inputs, loss.gradient, layer, name)
            for part, estimate in _parts(outer, functional, seed).items():
                found[layer, name, part] = estimate
    return found


def _backward(model: GPT2, inputs: Tensor, tokens: Tensor, kind: str) -> tuple[LogitLoss, list[Tensor]]:
    """The loss at the logits, and for each layer but the last b (N, O, L, d): R^T dlogits/dF."""
    x = model.residual_stream(inputs, 0)
    outputs = []
    for block in model.blocks:
        assert isinstance(block, GPT2Block)
        F = block.attend(block.norm1(x))
        outputs.append(F if F.requires_grad else F.requires_grad_())
        x = block.after_attention(x, F)
    logits = (model.norm(x) @ model.W_U + model.b_U)[:, ANSWERS]
    loss = logit_loss(kind, logits.detach(), tokens)
    below: list[list[Tensor]] = [[] for _ in outputs[:-1]]
    for position in range(logits.shape[1]):
        rows = torch.zeros(logits.shape[-1], *logits.shape, dtype=logits.dtype)
        rows[:, :, position] = loss.root[:, position].permute(2, 0, 1)
        found = torch.autograd.grad(logits, outputs[:-1], rows, retain_graph=True, is_grads_batched=True)
        for kept, one in zip(below, found, strict=True):
            kept.append(one.transpose(0, 1))
    return loss, [torch.cat(kept, 1) for kept in below]


def _factors(model: GPT2, inputs: Tensor, layer: int, name: str, b: Tensor) -> tuple[Tensor, Tensor]:
    """z (N, L, d) and Y (N, O, L, p) of a layer's block."""
    block = model.blocks[layer]
    assert isinstance(block, GPT2Block)
    with torch.no_grad():
        X = block.norm1(model.residual_stream(inputs, layer))
        key, value = X @ block.W_K + block.b_K, (X @ block.W_V + block.b_V) @ block.W_O
        scores = (X @ block.W_Q + block.b_Q) @ key.mT / math.sqrt(key.shape[-1])
        visible = torch.ones(X.shape[1], X.shape[1], dtype=torch.bool).tril()
        softmax = block.activation == "softmax"
        A = scores.masked_fill(~visible, -math.inf).softmax(-1) if softmax else scores.masked_fill(~visible, 0.0)
        if name == "V":
            return A @ X, b @ block.W_O.mT
        u = b @ value[:, None].mT  # (N, O, L, L)
        u = A[:, None] * (u - (A[:, None] * u).sum(-1, keepdim=True)) if softmax else u * visible
        return X / math.sqrt(key.shape[-1]), u @ key[:, None]


class _Outer:
    """H_o = sum over sequences and rows of j j^T, j = sum_i z_i (x) Y_oi."""

    def __init__(self, vectors: Tensor, rows: Tensor) -> None:
        self._vectors, self._rows = vectors, rows

    def squared_norm(self) -> float:
        """|H_o|², from the inner products of all rows, a sequence against all later ones at a time."""
        total = 0.0
        sequences, outputs, length, p = self._rows.shape
        for n in range(sequences):
            later = self._rows[n:]
            gram = self._vectors[n] @ self._vectors[n:].mT  # (m, L, L)
            carried = (gram[:, None] @ later).view(-1, length * p)
            products = (self._rows[n].reshape(outputs, -1) @ carried.T).square_()
            total += 2 * float(products.sum()) - float(products[:, :outputs].sum())
        return total

    def __matmul__(self, probes: Tensor) -> Tensor:
        """H_o v for v (m, d, p)."""
        sequences, outputs, length, p = self._rows.shape
        moved = (self._vectors @ probes[:, None]).transpose(0, 1).reshape(sequences, -1, length * p)
        rows = self._rows.view(sequences, outputs, length * p)
        back = (moved @ rows.mT @ rows).view(sequences, -1, length, p)
        return torch.einsum("nla,nmlp->map", self._vectors, back)


class _Functional:
    """H_f, the Hessian of <G, logits> in one weight."""

    def __init__(self, model: GPT2, inputs: Tensor, gradient: Tensor, layer: int, name: str) -> None:
        block = model.blocks[layer]
        assert isinstance(block, GPT2Block)
        with torch.no_grad():
            x = model.residual_stream(inputs, layer)
        self._weight = getattr(block, f"W_{name}").detach().clone().requires_grad_()
        x = functional_call(block, {f"W_{name}": self._weight}, x)
        for one in model.blocks[layer + 1 :]:
            x = one(x)
        logits = (model.norm(x) @ model.W_U + model.b_U)[:, ANSWERS]
        self._slope = torch.autograd.grad((gradient * logits).sum(), self._weight, create_graph=True)[0]
        self.shape, self.dtype = self._weight.shape, self._weight.dtype

    def __matmul__(self, probes: Tensor) -> Tensor:
        """H_f v for v (m, d, p)."""
        return torch.autograd.grad(self._slope, self._weight, probes, retain_graph=True, is_grads_batched=True)[0]


def _parts(outer: _Outer, functional: _Functional, seed: int) -> dict[str, Estimate]:
    exact = outer.squared_norm()
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(_PROBES, *functional.shape, generator=generator, dtype=functional.dtype)

    sketch = normal()
    columns = torch.cat([functional @ sketch, outer @ sketch]).flatten(1)
    columns = columns / columns.norm(dim=1, keepdim=True).clamp_min(torch.finfo(columns.dtype).tiny)
    basis = torch.linalg.qr(columns.T).Q  # (d p, 2 probes)
    spanned = basis.T.reshape(-1, *functional.shape)
    bent = functional @ spanned
    captured, crossed = float(bent.square().sum()), 2 * float((bent * (outer @ spanned)).sum())
    samples: dict[str, list[float]] = {"functional": [], "total": []}
    while True:
        flat = normal().flatten(1)
        probes = (flat - flat @ basis @ basis.T).view(-1, *functional.shape)
        bent = functional @ probes
        squares = bent.square().sum((1, 2))
        samples["functional"] += (captured + squares).tolist()
        both = squares + 2 * (bent * (outer @ probes)).sum((1, 2))
        samples["total"] += (exact + captured + crossed + both).tolist()
        found = {part: _root(values) for part, values in samples.items()}
        if len(samples["total"]) >= _MOST_PROBES or all(e.stderr <= TOLERANCE * e.value for e in found.values()):
            return {"outer": Estimate(exact**0.5), **found}


def _root(squares: list[float]) -> Estimate:
    values = torch.tensor(squares, dtype=torch.float64)
    mean, stderr = float(values.mean()), float(values.std()) / len(squares) ** 0.5
    return Estimate(mean, stderr, len(squares), "hutchinson", degrees=float(len(squares) - 1)).root()
