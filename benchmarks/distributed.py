"""Products with a Hessian whose batches are spread over 1, 2 and 4 processes: seconds, efficiency, agreement.

Each process has one thread, and all have the same batches between them, however many they are: of a network of half a
million parameters, and of GPT-2 small (124 million). On a machine with fewer cores than processes the efficiency cannot
exceed cores / processes, so `of_cores` relates it to that. `seconds` needs as many idle cores as ranks;
`processor_seconds`, the most of all ranks, does not.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import in_own_process, once
from benchmarks.ranks import together
from curvoscope.curvature import MeanSquaredError, hessian

RANKS = {"mlp": (1, 2, 4), "gpt2": (1, 2)}
WIDTH, BATCHES, ROWS = 256, 8, 256  # of the small network
SEQUENCES, LENGTH = 4, 128  # of GPT-2, one sequence a batch
PRODUCTS = {"mlp": 9, "gpt2": 3}
AIM = 0.85
_KEPT = 2**33  # bytes for graphs: those of all batches, also on one rank


def _mlp() -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    r = torch.Generator().manual_seed(1)
    data = [(torch.randn(ROWS, WIDTH, generator=r), torch.randn(ROWS, WIDTH, generator=r)) for _ in range(BATCHES)]
    return model, MeanSquaredError(), data


def _gpt2() -> tuple[nn.Module, Any, list[Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    tokens = torch.randint(0, model.config.vocab_size, (SEQUENCES, 1, LENGTH))
    return model, None, [{"input_ids": one, "labels": one} for one in tokens]


PROBLEMS = {"mlp": _mlp, "gpt2": _gpt2}


def _measured(rank: int, ranks: int, kind: str) -> dict[str, object]:
    """Seconds of one product with this rank's share of the batches, and some of its entries."""
    model, loss, data = PROBLEMS[kind]()
    H = hessian(model, loss, data[rank::ranks], method="autodiff", process_group="world", memory_limit=_KEPT)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    product = H @ v
    start = time.process_time()
    seconds = statistics.median(once(lambda: H @ v) for _ in range(PRODUCTS[kind]))
    processor = (time.process_time() - start) / PRODUCTS[kind]
    reduced = statistics.median(once(lambda: dist.all_reduce(v.clone())) for _ in range(PRODUCTS[kind]))
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "all_reduce_seconds": reduced,
        "product": product[:: len(product) // 1000].tolist(),
        "parameters": len(v),
    }


def _slowest(kind: str, ranks: int) -> dict[str, object]:
    found = together(_measured, ranks, kind)
    return {**found[0], "processor_seconds": max(float(str(one["processor_seconds"])) for one in found)}


def _table(kind: str) -> dict[str, object]:
    """One row for each number of ranks."""
    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    first: tuple[torch.Tensor, float] | None = None
    for ranks in RANKS[kind]:
        found: dict[str, Any] = in_own_process("benchmarks.distributed", kind, str(ranks))
        product, parameters = torch.tensor(found.pop("product")), found.pop("parameters")
        first = first or (product, found["seconds"])
        efficiency = first[1] / (ranks * found["seconds"])
        rows.append(
            {
                "ranks": ranks,
                **found,
                "efficiency": efficiency,
                "of_cores": efficiency * ranks / min(ranks, cores),
                "relative_difference": float((product - first[0]).norm() / first[0].norm()),
            }
        )
    return {"parameters": parameters, "cores": cores, "ranks": rows}


def run() -> dict[str, object]:
    """Both models."""
    return {"aim": AIM, **_table("mlp"), "gpt2": _table("gpt2")}


if __name__ == "__main__":
    print(json.dumps(_slowest(sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else run()))
