"""The tiles that attention is computed in: some rows of some heads, with all the keys that they see."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Four = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # something of q, k, v and the mask

_TILE = 2**18  # scores in a tile: with the arrays of its size that a pass needs it stays in the cache
_FEWEST_ROWS = 64  # matrix products of fewer rows are slow


@dataclass(frozen=True)
class AttentionOptions:
    """The scale s, whether query i sees the keys up to i alone, and which of q, k, v, M have their gradient wanted."""

    scale: float
    causal: bool
    wanted: tuple[bool, bool, bool, bool] = (False, False, False, False)

    def wanting(self, wanted: tuple[bool, bool, bool, bool]) -> "AttentionOptions":
        """The same with other gradients wanted."""
        return replace(self, wanted=wanted)


@dataclass(frozen=True)
class Tile:
    """Some heads, some of their rows, and as many keys as these rows can see."""

    heads: slice
    rows: slice
    keys: int

    def of_rows(self, x: Tensor) -> Tensor:
        """(N, G, L, .) -> (n, G rows, .)."""
        return x[self.heads, :, self.rows].flatten(1, 2)

    def put_rows(self, total: Tensor, x: Tensor) -> None:
        """The other way."""
        total[self.heads, :, self.rows] = x.unflatten(1, (total.shape[1], -1))

    def of_keys(self, x: Tensor) -> Tensor:
        """(N, K, .) -> (n, keys, .), a view."""
        return x[self.heads, : self.keys]

    def of_mask(self, x: Tensor) -> Tensor:
        """(m, L or 1, K or 1) -> (m, rows or 1, keys or 1), a view."""
        return x[:, self.rows if x.shape[1] > 1 else slice(None), : self.keys]


class AttentionTiles:
    """Queries, keys, values and masks of one attention, cut into tiles.

    q (N, G, L, E), where the G heads of a group share their keys and values; k (N, K, E); v (N, K, D); mask
    (m, L or 1, K or 1), of which a head has the one that `which` (N, G) names; statistics (N, G, L, 2), the maximum
    and the mass of each row. All is computed in `dtype`, float32 at least, and all tiles share one workspace.
    """

    def __init__(
        self,
        options: AttentionOptions,
        which: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        statistics: Tensor | None = None,
    ) -> None:
        self.options, self._which, self._statistics = options, which, statistics
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k, self.v = self.scaled(q), self.cast(k), self.cast(v)
        self._mask = mask if mask is None or mask.dtype == torch.bool else mask.to(self.dtype)
        self._N, self._G, self._L, self._K = *q.shape[:3], k.shape[1]
        self._space: dict[str, Tensor] = {}

    def cast(self, x: Tensor) -> Tensor:
        """`x` in the precision of the computation."""
        return x.to(self.dtype).contiguous()

    def scaled(self, x: Tensor) -> Tensor:
        """s x: queries are only ever used so."""
        return self.cast(x) * self.options.scale

    def direction(self, direction: tuple[Tensor | None, ...]) -> Four:
        """A direction (a, b, c, e) of (q, k, v, M) in the precision of the computation, a with the scale in it."""
        a, b, c, e = direction
        b, c, e = (None if x is None else self.cast(x) for x in (b, c, e))
        return None if a is None else self.scaled(a), b, c, e

    def tiles(self) -> Iterator[Tile]:
        """All tiles: whole heads if several fit into one, else rows of one head."""
        heads = min(self._N, max(1, _TILE // (self._G * self._L * self._K)))
        rows = self._L if heads > 1 else min(self._L, max(_FEWEST_ROWS, _TILE // self._K) // self._G or 1)
        for head in range(0, self._N, heads):
            for row in range(0, self._L, rows):
                end = min(row + rows, self._L)
                keys = min(end, self._K) if self.options.causal else self._K
                yield Tile(slice(head, min(head + heads, self._N)), slice(row, end), keys)

    # ---- the matrices of a tile, (n, G rows, keys)

    def scores(self, tile: Tile) -> Tensor:
        """S, -inf where a key is hidden."""
        S = self.product("P", tile.of_rows(self.q), tile.of_keys(self.k))
        by_head = S.unflatten(1, (self._G, -1))
        if self._mask is not None:
            mask = self._masks(tile, self._mask)
            if mask.dtype == torch.bool:
                by_head.masked_fill_(~mask, -math.inf)
            else:
                by_head.add_(mask)
        first = tile.rows.start
        if self.options.causal and first < tile.keys:
            rows = torch.arange(first, tile.rows.stop, device=S.device)
            keys = torch.arange(first, tile.keys, device=S.device)
            by_head[..., first:].masked_fill_(keys > rows[:, None], -math.inf)
        return S

    def probabilities(self, tile: Tile) -> Tensor:
        """P, from the statistics of its rows."""
        assert self._statistics is not None
        peak, mass = tile.of_rows(self._statistics).split(1, -1)
        return self.scores(tile).sub_(peak).exp_().div_(mass)

    def slope(self, name: str, tile: Tile, direction: Four) -> Tensor | None:
        """U = s (a k^T + q b^T) + e, the derivative of S."""
        a, b, _, e = direction
        U = None
        if a is not None:
            U = self.product(name, tile.of_rows(a), tile.of_keys(self.k))
        if b is not None:
            U = self.product(name, tile.of_rows(self.q), tile.of_keys(b), U)
        if e is not None:
            U = self._named(name, (*tile.of_rows(self.q).shape[:2], tile.keys)).zero_() if U is None else U
            U.unflatten(1, (self._G, -1)).add_(self._masks(tile, e))
        return U

    def product(self, name: str, left: Tensor, right: Tensor, to: Tensor | None = None) -> Tensor:
        """left right^T, added to `to` or in the part of the workspace called `name`."""
        if to is not None:
            return to.baddbmm_(left, right.mT)
        return torch.bmm(left, right.mT, out=self._named(name, (left.shape[0], left.shape[1], right.shape[1])))

    def centre(self, name: str, P: Tensor, x: Tensor) -> Tensor:
        """x' = x - <P.x>, in place, and P.x', in the part of the workspace called `name`."""
        weighted = torch.mul(P, x, out=self._named(name, tuple(P.shape)))
        mean = weighted.sum(-1, keepdim=True)
        x.sub_(mean)
        return weighted.addcmul_(P, mean, value=-1)

    def _masks(self, tile: Tile, mask: Tensor) -> Tensor:
        """The masks of a tile's heads, (n, G, rows or 1, keys or 1)."""
        assert self._which is not None
        which = self._which[tile.heads]
        return tile.of_mask(mask).index_select(0, which.flatten()).unflatten(0, tuple(which.shape))

    def _named(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        if name not in self._space or self._space[name].numel() < size:
            self._space[name] = self.q.new_empty(size)
        return self._space[name][:size].view(shape)

    # ---- sums over tiles

    def totals(self) -> Four:
        """Zeros shaped like q, k, v and M where these are wanted."""
        shapes = (self.q, self.k, self.v, self._mask)
        return tuple(  # type: ignore[return-value]
            torch.zeros_like(x, dtype=self.dtype) if wanted and x is not None else None
            for x, wanted in zip(shapes, self.options.wanted, strict=True)
        )

    def add_to_mask(self, total: Tensor, tile: Tile, x: Tensor) -> None:
        """Add x (n, G rows, keys) to the masks that its heads have."""
        assert self._which is not None
        part = tile.of_mask(total)
        by_head = x.reshape(-1, tile.rows.stop - tile.rows.start, tile.keys)
        part.index_add_(0, self._which[tile.heads].flatten(), by_head.sum_to_size(by_head.shape[0], *part.shape[1:]))
