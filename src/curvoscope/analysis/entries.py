"""Entries of the diagonal blocks of a Hessian: all of a small block, random columns of a large one."""

from dataclasses import dataclass

import torch

from curvoscope.operators.block_matrix import PARTS, BlockHessian, Part
from curvoscope.settings import chosen_seed

_BINS = 60
_TAIL = 1e-3  # share of the entries that the first bin may take beside its own


@dataclass(frozen=True)
class EntryHistogram:
    """Shares of the |entries| of one block and part in bins of log10 |entry|.

    `edges` (bins + 1), `shares` (bins): the first bin includes everything below it; entries that are exactly zero are
    in no bin, `zeros` counts them. `entries` were read, in `columns` of `size` columns; `median` is that of |entry|.
    """

    block: str
    part: Part
    edges: tuple[float, ...]
    shares: tuple[float, ...]
    entries: int
    columns: int
    size: int
    zeros: int
    median: float


def entry_histograms(
    H: BlockHessian, blocks: list[str], columns: int = 16, seed: int | None = None
) -> list[EntryHistogram]:
    """Histograms of the parts of diagonal blocks on one axis, from at most `columns` random columns of each.

    A column is a product with a unit vector: 2 `columns` products per block with the whole matrix.
    """
    generator = torch.Generator().manual_seed(chosen_seed(seed))
    found: dict[tuple[str, Part], torch.Tensor] = {}
    for name in blocks:
        block = H.total.ranges[name]
        chosen = torch.randperm(block.stop - block.start, generator=generator)[:columns].sort().values
        units = torch.zeros(H.shape[0], len(chosen), dtype=H.total.dtype, device=H.total.device)
        units[block.start + chosen, torch.arange(len(chosen))] = 1
        outer, functional = ((matrix @ units)[block] for matrix in (H.outer, H.functional))
        for part, entries in zip(PARTS, (outer, functional, outer + functional), strict=True):
            found[name, part] = entries.abs().double().cpu()
    logs = torch.cat([values[values > 0].log10() for values in found.values()]) if found else torch.zeros(0)
    if not logs.numel():
        return []
    ordered = logs.sort().values
    low, high = float(ordered[int(_TAIL * len(ordered))]), float(ordered[-1])
    edges = torch.linspace(low, high if high > low else low + 1, _BINS + 1, dtype=torch.float64)
    return [
        EntryHistogram(
            name,
            part,
            tuple(edges.tolist()),
            tuple((_counts(values, edges) / values.numel()).tolist()),
            values.numel(),
            values.shape[1],
            values.shape[0],
            int((values == 0).sum()),
            float(values.median()),
        )
        for (name, part), values in found.items()
    ]


def _counts(values: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    logs = values[values > 0].log10()
    bins = (torch.searchsorted(edges, logs, right=True) - 1).clamp(0, len(edges) - 2)
    return torch.bincount(bins, minlength=len(edges) - 1)
