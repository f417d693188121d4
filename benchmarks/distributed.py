"""Products with a Hessian whose batches are spread over 1, 2 and 4 processes: seconds, efficiency, agreement.

Each process has one thread, and all have the same batches between them, however many they are. On a machine with fewer
cores than processes the efficiency cannot exceed cores / processes, so `of_cores` relates it to that.
"""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import in_own_process, once
from curvoscope.curvature import MeanSquaredError, hessian

RANKS = (1, 2, 4)
WIDTH, BATCHES, ROWS, PRODUCTS = 256, 8, 256, 9


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def _process(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    r = torch.Generator().manual_seed(1)
    data = [(torch.randn(ROWS, WIDTH, generator=r), torch.randn(ROWS, WIDTH, generator=r)) for _ in range(BATCHES)]
    H = hessian(_model(), MeanSquaredError(), data[rank::ranks], method="autodiff", process_group="world")
    v = torch.randn(H.shape[0], generator=r)
    product = H @ v
    seconds = statistics.median(once(lambda: H @ v) for _ in range(PRODUCTS))
    reduced = statistics.median(once(lambda: dist.all_reduce(torch.ones_like(v))) for _ in range(PRODUCTS))
    if rank == 0:
        found = {"seconds": seconds, "all_reduce_seconds": reduced, "product": product.tolist()}
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def together(ranks: int) -> dict[str, object]:
    """Seconds of one product over so many processes, and a part of the product."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_process, args=(rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found: dict[str, object] = json.loads(Path(folder, "found.json").read_text())
    return found


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
    print(json.dumps(together(int(sys.argv[1]))))
