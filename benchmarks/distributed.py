"""Products with a Hessian whose batches are spread over 1, 2 and 4 processes: seconds, efficiency, agreement.

Each process has one thread, and all have the same batches between them, however many they are. On a machine with fewer
cores than processes the efficiency cannot exceed cores / processes, so `of_cores` relates it to that.
"""

import json
import os
import statistics
import sys

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import in_own_process, once
from benchmarks.ranks import together
from curvoscope.curvature import MeanSquaredError, hessian

RANKS = (1, 2, 4)
WIDTH, BATCHES, ROWS, PRODUCTS = 256, 8, 256, 9


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def _measured(rank: int, ranks: int) -> dict[str, object]:
    """Seconds of one product with this rank's share of the batches, and the product."""
    r = torch.Generator().manual_seed(1)
    data = [(torch.randn(ROWS, WIDTH, generator=r), torch.randn(ROWS, WIDTH, generator=r)) for _ in range(BATCHES)]
    H = hessian(_model(), MeanSquaredError(), data[rank::ranks], method="autodiff", process_group="world")
    v = torch.randn(H.shape[0], generator=r)
    product = H @ v
    seconds = statistics.median(once(lambda: H @ v) for _ in range(PRODUCTS))
    reduced = statistics.median(once(lambda: dist.all_reduce(torch.ones_like(v))) for _ in range(PRODUCTS))
    return {"seconds": seconds, "all_reduce_seconds": reduced, "product": product.tolist() if rank == 0 else None}


def run() -> dict[str, object]:
    """The table, one row for each number of ranks."""
    cores = len(os.sched_getaffinity(0))
    rows, first = [], None
    for ranks in RANKS:
        found = in_own_process("benchmarks.distributed", str(ranks))
        product, seconds = torch.tensor(found.pop("product")), float(found["seconds"])  # type: ignore[arg-type]
        first = first or (product, seconds)
        efficiency = first[1] / (ranks * seconds)
        rows.append(
            {
                "ranks": ranks,
                **found,
                "efficiency": efficiency,
                "of_cores": efficiency * ranks / min(ranks, cores),
                "relative_difference": float((product - first[0]).norm() / first[0].norm()),
            }
        )
    parameters = sum(p.numel() for p in _model().parameters())
    return {"parameters": parameters, "batches": BATCHES, "rows": ROWS, "cores": cores, "ranks": rows}


if __name__ == "__main__":
    print(json.dumps(together(_measured, int(sys.argv[1]))[0]))
