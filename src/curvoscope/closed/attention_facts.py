"""How an attention layer makes its scores, read off the graph of one forward pass: nothing is taken from names.

The operands of the product that makes the scores are queries and keys as they are multiplied, and the saved result of
the softmax is A. Vector-Jacobian products give the rest: the linear map R_i from a projection x_i to a query, and the
slope of the logits in the scores. A norm before that is known by its derivative J = B (P - x̂ x̂^T / w) / σ: with y = B x̂

    B P = σ J + y x̂^T / w        J x = y ε / σ²        J 1 = 0 if the mean is taken away

With a shift, y = B x̂ + c, the two sides of the first line differ by c x̂^T / w, which two tokens at one position tell.
What is added to the scores (masks, windows, ALiBi, relative positions) is what is left of log A.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvoscope.blocks import Block
from curvoscope.exact.attention.layer import merge_heads, split_heads
from curvoscope.exact.attention.query_key_norm import QueryKeyNorm
from curvoscope.exact.attention.rotary import PositionMatrices
from curvoscope.exact.norms import Normalised
from curvoscope.families.attention_calls import AttentionCall
from curvoscope.families.data_flow import DataFlow, Node, WeightProduct, shape_of
from curvoscope.families.operands import operand

_ROUNDING = 1000  # times epsilon: what counts as equal
_NOTHING = 64  # times epsilon: what counts as nothing that is added to scores


class UnknownAttentionError(Exception):
    """Why no closed form covers an attention layer. It never leaves the package: the layer is left to autodiff."""


@dataclass(frozen=True)
class QueryKeyFacts:
    """From a projection to queries or keys: `factor` R_i (x̂_i), with a norm and positions if there are any."""

    factor: float
    norm: QueryKeyNorm | None = None
    positions: PositionMatrices | None = None


@dataclass(frozen=True)
class AttentionFacts:
    """How scores and their softmax were computed on one batch.

    `scale`: of the scores, `softcap` c of c tanh(T/c), `mask`: booleans, or what is added to the scores (N, H, L, L),
    `sinks`: a logit for each head.
    """

    query: QueryKeyFacts
    key: QueryKeyFacts
    scale: float
    softcap: float | None
    mask: Tensor | None
    sinks: Tensor | None


def call_of(calls: Iterable[AttentionCall], blocks: Mapping[str, Block], latent: bool = False) -> AttentionCall:
    """The call whose weights the blocks are. `latent`: weights before those, in series, may be left aside."""
    for call in calls:
        if all(role in call.weights and _owns(blocks[role], call.weights[role]) for role in "QKVO"):
            if any(len(operands) > 1 for operands in call.operands.values()):
                raise UnknownAttentionError("its attention is computed in several parts")
            if (call.latent and not latent) or call.positions:
                raise UnknownAttentionError("its scores have additional weights (positional, or several in series)")
            return call
    raise UnknownAttentionError("its scores are not found in the graph of a forward pass")


def _owns(block: Block, product: WeightProduct) -> bool:
    return any(piece.parameter == product.parameter for piece in block.pieces)


def attention_facts(
    flow: DataFlow, call: AttentionCall, blocks: Mapping[str, Block], projected: Mapping[str, Tensor]
) -> AttentionFacts:
    """The facts of one call. `projected`: the projections X W + b of "Q" and "K", (N, L, heads*k); without "K", the
    keys are taken as they are multiplied."""
    N, L = projected["Q"].shape[:2]
    heads, groups = (blocks[role].heads or 1 for role in "QK")
    sizes = N, heads, L
    multiplied = {role: _operand(call, role).reshape(*sizes, -1) for role in "QK" if _fits(call, role, sizes)}
    if len(multiplied) < 2:
        raise UnknownAttentionError("its scores are not a product of all queries and keys of each head")
    share = heads // groups
    query = _map(flow, call, "Q", blocks["Q"], projected["Q"], multiplied["Q"], 1)
    key = QueryKeyFacts(1.0)
    if "K" in projected:
        key = _map(flow, call, "K", blocks["K"], projected["K"], multiplied["K"][:, ::share], share)
    scores = multiplied["Q"] @ multiplied["K"].mT
    result = getattr(call.softmax, "_saved_result", None)
    if not isinstance(result, Tensor):
        raise UnknownAttentionError("its softmax is computed in several operations")
    if result.numel() / scores[..., 0].numel() not in (L, L + 1):
        raise UnknownAttentionError("its softmax is not over the keys of one sequence")
    if result.dtype != scores.dtype:
        raise UnknownAttentionError(f"its softmax computes in lower precision, {result.dtype}")
    A = result.detach().reshape(*sizes, -1)
    scale, softcap = _slope(flow, call, scores, A[..., :L] > 0)
    mask, sinks = _added(scale * scores, softcap, A)
    return AttentionFacts(query, key, scale * query.factor * key.factor, softcap, mask, sinks)


# ---- queries and keys


def _fits(call: AttentionCall, role: str, sizes: tuple[int, int, int]) -> bool:
    """Whether an operand is (N H, L, k), with the queries in its rows."""
    _, place = call.operands[role][0]
    return place == "QK".index(role) and _operand(call, role).shape[:2] == (sizes[0] * sizes[1], sizes[2])


def _operand(call: AttentionCall, role: str) -> Tensor:
    """Queries or keys as they are multiplied, (N H, L, k)."""
    node, place = call.operands[role][0]
    names = ("_saved_self", "_saved_mat2") if hasattr(node, "_saved_mat2") else ("_saved_batch1", "_saved_batch2")
    saved: Tensor = getattr(node, names[place]).detach()
    return saved if place == 0 else saved.mT


def _map(
    flow: DataFlow, call: AttentionCall, role: str, block: Block, projected: Tensor, y: Tensor, share: int
) -> QueryKeyFacts:
    """How y (N, H, L, k) is made of a projection (N, L, H*k)."""
    N, heads, L, k = y.shape
    x = split_heads(projected, heads)
    if x.shape != y.shape:
        raise UnknownAttentionError(f"its queries or keys have {k} features, and their projections {x.shape[-1]}")

    def rows(chosen: slice) -> Tensor:
        return _derivative(flow, call, role, block, y, share, chosen)

    J = rows(slice(None)).view(k, N, L, heads, k).permute(1, 3, 2, 0, 4)  # (N, H, L, k, k)
    if share > 1 and not J.any(-1).any(-1).any(-1).any(0).all():
        raise UnknownAttentionError("its query heads do not share key heads in runs of consecutive heads")
    if _same((J @ x[..., None])[..., 0], y):
        return _turned(J)
    B, norm = _normalised(J, x, y)
    layer_norm = _between(flow, _edge(call, role).node, call.weights[role].node, "NativeLayerNormBackward0")
    if norm is None and layer_norm is not None:
        B, norm = _shifted(J, x, y, layer_norm._saved_result2.detach())
    if norm is None:
        J = torch.cat([rows(slice(h, h + 1)) for h in range(heads)]).movedim(0, 2)  # (N, L, H*k, H*k)
        B, norm = _normalised(J, projected, merge_heads(y))
        if norm is None:
            raise UnknownAttentionError("its queries or keys are not a linear map of a norm of their projections")
        B = torch.stack([B[..., h * k : (h + 1) * k, h * k : (h + 1) * k] for h in range(heads)], 1)
    return QueryKeyFacts(1.0, norm, PositionMatrices(_shared(B)))


def _derivative(
    flow: DataFlow, call: AttentionCall, role: str, block: Block, y: Tensor, share: int, chosen: slice
) -> Tensor:
    """dy/dx of the chosen heads of y (N, H, L, k) in the projection x, (k, N, L, columns of the block)."""
    edge, columns = _edge(call, role), _columns(flow, call.weights[role], block)
    whole = shape_of(edge.node, edge.output_nr)
    turned = call.operands[role][0][1] == 1
    (N, heads, L, k), found = y.shape, []
    for feature in range(k):
        cotangent = y.new_zeros(whole)
        view = (cotangent.mT if turned else cotangent).view(N, heads, share, L, k)
        view[:, chosen, 0, :, feature] = 1
        gradient = flow.gradient(edge, GradientEdge(call.weights[role].node, 0), cotangent)
        if gradient is None or gradient.numel() % (N * L):
            raise UnknownAttentionError("its queries and keys do not come from one product each")
        found.append(gradient.reshape(N, L, -1)[..., columns])
    return torch.stack(found)


def placed_keys(flow: DataFlow, call: AttentionCall, block: Block, projected: Tensor) -> tuple[Tensor, Tensor]:
    """E (k, n) and b (N, L, k) of keys k_j = E x_j + b_j, with x (N, L, H*n) the projection of each head; b, the same
    for all heads, has no part among the features that E makes."""
    N, L = projected.shape[:2]
    heads = block.heads or 1
    x, y = split_heads(projected, heads), _operand(call, "K").reshape(N, heads, L, -1)
    k, n = y.shape[-1], x.shape[-1]
    J = _derivative(flow, call, "K", block, y, 1, slice(None)).view(k, N, L, heads, n).permute(1, 3, 2, 0, 4)
    E = J[0, 0, 0]
    b = y - (J @ x[..., None])[..., 0]
    made = E.abs().sum(1) > 0
    constant = _same(J, E.expand_as(J)) and _same(b, b[:, :1].expand_as(b), y.abs().max())
    if not constant or not _same(b[..., made], torch.zeros_like(b[..., made]), y.abs().max()):
        raise UnknownAttentionError("its keys are not a projection plus features shared by all heads")
    return E, b[:, 0]


def _edge(call: AttentionCall, role: str) -> GradientEdge:
    node, place = call.operands[role][0]
    return GradientEdge(*node.next_functions[place - 2])  # a bias may stand before the two


def _columns(flow: DataFlow, product: WeightProduct, block: Block) -> Tensor:
    """The outputs of a product that are the columns of a block, in their order."""
    piece = operand(flow, product.weight)
    if piece is None or product.is_convolution or any(one.parameter != product.parameter for one in block.pieces):
        raise UnknownAttentionError("its queries or keys are not a product with a matrix")
    numbers = torch.zeros(piece.stored, dtype=torch.float64)
    a, p = piece.shape
    region = piece.of(numbers)
    region.copy_(torch.arange(p, dtype=torch.float64).expand(a, p).reshape(region.shape))
    return block.matrix({product.parameter: numbers})[0].long()


def _turned(J: Tensor) -> QueryKeyFacts:
    """A linear map: a number, or a number and positions."""
    matrices = _shared(J)
    k = matrices.shape[-1]
    factor = float(matrices.square().sum((-1, -2)).mean().div(k).sqrt())
    identity = torch.eye(k, dtype=J.dtype, device=J.device).expand_as(matrices)
    if factor and _same(matrices / factor, identity):
        return QueryKeyFacts(factor)
    return QueryKeyFacts(factor or 1.0, None, PositionMatrices(matrices / (factor or 1.0)))


def _normalised(J: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, QueryKeyNorm | None]:
    """B (..., k, w) and the norm of y = B x̂, from J = dy/dx (..., k, w) at x (..., w); None if there is no such one."""
    centred = _same(J.sum(-1), torch.zeros_like(y), J.abs().sum(-1).max())
    at = x - x.mean(-1, keepdim=True) if centred else x
    along = ((J @ at[..., None])[..., 0] * y).sum(-1) / y.square().sum(-1)  # ε / σ²
    epsilons = at.square().mean(-1) * along / (1 - along)
    eps = max(0.0, float(epsilons.median()))
    if not math.isfinite(eps):  # y is a multiple of J x: no norm makes that
        return J, None
    x_hat, B = _without_norm(J, x, y, eps, centred)
    if not _same((B @ x_hat[..., None])[..., 0], y):
        return B, None
    ones = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    return B, QueryKeyNorm(ones, None, eps, centred=centred)


def _without_norm(J: Tensor, x: Tensor, y: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """x̂ and σ J + y x̂^T / w."""
    found = Normalised.of(x.reshape(-1, x.shape[-1]), eps, centred)
    x_hat, sigma = found.x_hat.view(x.shape), found.sigma.view(*x.shape[:-1], 1, 1)
    return x_hat, sigma * J + y[..., :, None] * x_hat[..., None, :] / x.shape[-1]


def _shifted(J: Tensor, x: Tensor, y: Tensor, inverse: Tensor) -> tuple[Tensor, QueryKeyNorm | None]:
    """B and the norm of y = B (x̂ + 1), for heads (N, H, L, k) that a layer norm with a shift normalises alone.

    `inverse`: 1/σ of all tokens, in any order. As x̂ has no mean, B 1 may be the shift c.
    """
    k = x.shape[-1]
    centred = x - x.mean(-1, keepdim=True)
    eps = max(0.0, float(inverse.square().reciprocal().mean() - centred.square().mean()))
    x_hat, B = _without_norm(J, x, y, eps, centred=True)
    apart, moved = B - B[:1, :1], x_hat - x_hat[:1, :1]
    c = k * (apart @ moved[..., None])[..., 0].sum((0, 1)) / moved.square().sum((0, 1, 3))[:, None]
    B = B - c[..., :, None] * (x_hat[..., None, :] - 1) / k
    ones = torch.ones(k, dtype=x.dtype, device=x.device)
    if not _same((B @ (x_hat + 1)[..., None])[..., 0], y) or not _same(B, B[:1, :1].expand_as(B)):
        return B, None
    return B, QueryKeyNorm(ones, ones, eps, centred=True)


def _shared(matrices: Tensor) -> Tensor:
    """Matrices (N, H, ...) of one sequence and one head, if all are the same."""
    for axis in (0, 1):
        first = matrices.narrow(axis, 0, 1)
        matrices = first if _same(matrices, first.expand_as(matrices)) else matrices
    return matrices


def _same(found: Tensor, expected: Tensor, size: Tensor | float = 0.0, rounding: int = _ROUNDING) -> bool:
    """Whether two tensors are the same to rounding, relative to the largest entry or to `size`."""
    largest = max(float(expected.abs().max()), float(size), torch.finfo(found.dtype).tiny)
    return float((found - expected).abs().max()) <= rounding * torch.finfo(found.dtype).eps * largest


# ---- scores


def _slope(flow: DataFlow, call: AttentionCall, scores: Tensor, seen: Tensor) -> tuple[float, float | None]:
    """s and c of the logits s T, or c tanh(s T / c), from their derivative in T where keys are seen: for most keys, as
    the largest logit of a row may have been subtracted."""
    logits, _ = flow.softmaxes[call.softmax]
    ones = scores.new_ones(shape_of(logits.node, logits.output_nr))
    gradient = flow.gradient(logits, GradientEdge(call.scores, 0), ones)
    if gradient is None or gradient.numel() != scores.numel():
        raise UnknownAttentionError("its softmax does not see all scores")
    slopes = (gradient.reshape(scores.shape) * float(getattr(call.scores, "_saved_alpha", 1.0)))[seen]
    capping = _between(flow, logits.node, call.scores, "TanhBackward0")
    if capping is not None:
        capped = capping._saved_result.detach().reshape(scores.shape)[seen]
        slopes = slopes / (1 - capped.square())
    scale = float(slopes.median())
    if not scale or not float((slopes - scale).abs().median()) <= _ROUNDING * torch.finfo(slopes.dtype).eps * abs(
        scale
    ):
        raise UnknownAttentionError("its scores pass through a function that is neither linear nor a soft cap")
    if capping is None:
        return scale, None
    largest = int((capped.abs() * (capped.abs() < 0.9)).argmax())  # nearer to 1 its inverse has few digits
    if not 0 < abs(float(capped[largest])) < 1:
        raise UnknownAttentionError("its capped scores are all zero, or all at the cap")
    return scale, abs(scale * float(scores[seen][largest]) / math.atanh(float(capped[largest])))


def _between(flow: DataFlow, later: Node, earlier: Node, name: str) -> Node | None:
    """The node of that name between two others."""
    inside = flow.passed([later], lambda node: node is earlier) & flow.followed(earlier, flow.stops)
    return next((node for node in inside if node.name() == name), None)


def _added(scores: Tensor, softcap: float | None, A: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores, and the logits of sinks, from A (N, H, L, L) or (N, H, L, L + 1).

    A query whose keys are all hidden by the most negative number, not by -inf, sees all of them alike: its scores are
    lost in rounding.
    """
    capped = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights, beside = A[..., : scores.shape[-1]], A[..., scores.shape[-1] :]
    seen = weights > 0
    some = seen.any(-1)
    added = (weights.log() - capped).masked_fill(~seen, -math.inf)
    level = added.amax(-1, keepdim=True).masked_fill(~some[..., None], 0)
    added = added - level
    lost = (weights == weights[..., :1]).all(-1) & seen.all(-1) & (scores != scores[..., :1]).any(-1)
    counted = seen & ~lost[..., None]
    size = capped[counted].abs().max().clamp_min(1)
    plain = _same(added[counted], torch.zeros_like(added[counted]), size, _NOTHING)
    mask: Tensor | None = added.masked_fill(lost[..., None], torch.finfo(added.dtype).min)
    if plain and not bool(lost.any()):
        mask = None if bool(seen.all()) else _shared(seen.to(scores.dtype)).bool()
    if not beside.numel():
        return mask, None
    sinks = (beside.log() - level)[..., 0]
    found = torch.stack([sinks[:, h][some[:, h]].median() for h in range(sinks.shape[1])])
    if not plain or not _same(sinks[some], found[:, None].expand_as(sinks)[some], size):
        raise UnknownAttentionError("its sinks depend on the query")
    return mask, found
