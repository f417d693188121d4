"""Attention and its first two derivatives, each one pass over tiles of rows: nothing of size L x L is ever held.

For one head, with the scale s, an additive mask M and row sums written <.>,

    S = s q k^T + M        P = exp(S - row maximum) / row mass        out = P v.

A direction (a, b, c, e) of (q, k, v, M) and a cotangent g of out meet in two matrices, both centred on each row:

    U = s (a k^T + q b^T) + e,  U' = U - <P.U>        dP = g v^T,  dP' = dP - <P.dP>

    tangent of out:          (P.U') v + P c
    gradient of <g, out>:    q: s (P.dP') k     k: s (P.dP')^T q     v: P^T g     M: P.dP'
    curvature, the Hessian of <g, out> times (a, b, c, e), with X = U'.dP' + g c^T and Z = P.(X - <P.X>):
                             q: s (Z k + (P.dP') b)     k: s (Z^T q + (P.dP')^T a)     v: (P.U')^T g     M: Z
    second tangent along two directions, with X = U1'.U2' + s (a1 b2^T + a2 b1^T) and Z = P.(X - <P.X>):
                             Z v + (P.U1') c2 + (P.U2') c1

out, g: (N, G, L, D); the other shapes are those of `AttentionTiles`. A direction that is None is zero. A row without
keys has P = 0, and so no derivatives.
"""

import math

import torch
from torch import Tensor

from curvoscope.attention.rows import AttentionTiles, Four, Tile

Tangents = tuple[Tensor | None, ...]


def forward(rows: AttentionTiles) -> tuple[Tensor, Tensor]:
    """out, and the statistics (N, G, L, 2): the maximum and the mass of each row."""
    out = rows.q.new_empty(*rows.q.shape[:3], rows.v.shape[2])
    statistics = rows.q.new_empty(*rows.q.shape[:3], 2)
    for tile in rows.tiles():
        S = rows.scores(tile)
        peak = S.amax(-1, keepdim=True)
        peak.masked_fill_(peak == -math.inf, 0.0)  # a row without keys
        mass = S.sub_(peak).exp_().sum(-1, keepdim=True)
        mass.masked_fill_(mass == 0, math.inf)
        tile.put_rows(statistics, torch.cat([peak, mass], -1))
        tile.put_rows(out, torch.bmm(S, tile.of_keys(rows.v)).div_(mass))
    return out, statistics


def tangent(rows: AttentionTiles, direction: Tangents) -> Tensor:
    """The derivative of out along (a, b, c, e)."""
    along = rows.direction(direction)
    out = rows.q.new_zeros(*rows.q.shape[:3], rows.v.shape[2])
    for tile in rows.tiles():
        P = rows.probabilities(tile)
        U = rows.slope("U", tile, along)
        PU = None if U is None else rows.centre("PU", P, U)
        _put(tile, out, (PU, rows.v), (P, along[2]))
    return out


def gradient(rows: AttentionTiles, g: Tensor) -> Four:
    """Gradients of <g, out> by q, k, v and M, as far as they are wanted."""
    to_q, to_k, to_v, to_mask = rows.totals()
    g = rows.cast(g)
    scores_move = to_q is not None or to_k is not None or to_mask is not None
    for tile in rows.tiles():
        P, g_rows = rows.probabilities(tile), tile.of_rows(g)
        _add(tile, to_v, (P, g_rows))
        if scores_move:
            dP = rows.product("dP", g_rows, tile.of_keys(rows.v))
            PdP = rows.centre("PdP", P, dP)
            _put(tile, to_q, (PdP, rows.k))
            _add(tile, to_k, (PdP, tile.of_rows(rows.q)))
            if to_mask is not None:
                rows.add_to_mask(to_mask, tile, PdP)
    return None if to_q is None else to_q.mul_(rows.options.scale), to_k, to_v, to_mask


def curvature(rows: AttentionTiles, g: Tensor, direction: Tangents) -> tuple[Four, Tensor]:
    """The Hessian of <g, out> times (a, b, c, e), as far as wanted, and the tangent of out along the same."""
    along = rows.direction(direction)
    a, b, c, _ = along
    to_q, to_k, to_v, to_mask = rows.totals()
    g = rows.cast(g)
    out = torch.zeros_like(g)
    for tile in rows.tiles():
        P, g_rows, q_rows = rows.probabilities(tile), tile.of_rows(g), tile.of_rows(rows.q)
        U = rows.slope("U", tile, along)
        PU = None if U is None else rows.centre("PU", P, U)
        _put(tile, out, (PU, rows.v), (P, c))
        _add(tile, to_v, (PU, g_rows))
        PdP = X = None
        if U is not None:
            dP = rows.product("dP", g_rows, tile.of_keys(rows.v))
            PdP = rows.centre("PdP", P, dP)
            X = U.mul_(dP)
        if c is not None:
            X = rows.product("U", g_rows, tile.of_keys(c), X)
        Z = None if X is None else rows.centre("PU", P, X)
        _put(tile, to_q, (Z, rows.k), (PdP, b))
        _add(tile, to_k, (Z, q_rows), (PdP, None if a is None else tile.of_rows(a)))
        if to_mask is not None and Z is not None:
            rows.add_to_mask(to_mask, tile, Z)
    return (None if to_q is None else to_q.mul_(rows.options.scale), to_k, to_v, to_mask), out


def second_tangent(rows: AttentionTiles, first: Tangents, second: Tangents) -> Tensor:
    """The second derivative of out along two directions."""
    one, two = rows.direction(first), rows.direction(second)
    out = rows.q.new_zeros(*rows.q.shape[:3], rows.v.shape[2])
    for tile in rows.tiles():
        P = rows.probabilities(tile)
        U1, U2 = rows.slope("U1", tile, one), rows.slope("U2", tile, two)
        PU1 = None if U1 is None else rows.centre("PU1", P, U1)
        PU2 = None if U2 is None else rows.centre("PU2", P, U2)
        X = None if U1 is None or U2 is None else U1.mul_(U2)
        for (a, *_), (_, b, *_) in ((one, two), (two, one)):
            if a is not None and b is not None:
                X = rows.product("U1", tile.of_rows(a), tile.of_keys(b), X)
        Z = None if X is None else rows.centre("Z", P, X)
        _put(tile, out, (Z, rows.v), (PU1, two[2]), (PU2, one[2]))
    return out


def _put(tile: Tile, total: Tensor | None, *terms: tuple[Tensor | None, Tensor | None]) -> None:
    """Rows of `total` (N, G, L, .) become the sum of matrix products with keys; None stands for zero."""
    if total is None:
        return
    found = None
    for left, right in terms:
        if left is not None and right is not None:
            keys = tile.of_keys(right)
            found = torch.bmm(left, keys) if found is None else found.baddbmm_(left, keys)
    if found is not None:
        tile.put_rows(total, found)


def _add(tile: Tile, total: Tensor | None, *terms: tuple[Tensor | None, Tensor | None]) -> None:
    """Keys of `total` (N, K, .) receive the sum of transposed matrix products with rows; None stands for zero."""
    for left, right in terms:
        if total is not None and left is not None and right is not None:
            tile.of_keys(total).baddbmm_(left.mT, right)
