"""Products with a Hessian whose batches are spread over 2 and 4 processes: seconds, efficiency, agreement.

Each process has one thread and a batch of its own, of a network of half a million parameters or of GPT-2 small (124
million). Three products with the same batch are timed in the same processes: by one while the others wait, by all at
once without a group, and by all as one Hessian. Hence two efficiencies: the time of one process alone over that of the
group, and the time of independent processes, which also share cores and memory bandwidth, over that of the group. On a
machine with fewer cores than processes the first cannot exceed cores / processes: `of_cores` relates it to that.
Seconds need as many idle cores as ranks; `processor_efficiency`, from processor times, does not.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import in_own_process
from benchmarks.ranks import efficiencies, timed, together
from curvoscope.curvature import MeanSquaredError, hessian

RANKS = {"mlp": (2, 4), "gpt2": (2,)}
WIDTH, ROWS = 256, 1024  # of the small network
SEQUENCES, LENGTH = 2, 128  # of GPT-2
PRODUCTS = {"mlp": 15, "gpt2": 3}
AIM = 0.85
CORES = len(os.sched_getaffinity(0))
_KEPT = 2**33  # bytes: enough for the graph, whatever else runs


def _mlp(rank: int) -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    r = torch.Generator().manual_seed(rank)
    return model, MeanSquaredError(), (torch.randn(ROWS, WIDTH, generator=r), torch.randn(ROWS, WIDTH, generator=r))


def _gpt2(rank: int) -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    r = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, model.config.vocab_size, (SEQUENCES, LENGTH), generator=r)
    return model, None, {"input_ids": tokens, "labels": tokens}


def _measured(rank: int, ranks: int, kind: str) -> dict[str, object]:
    """Seconds of a product of one process, of independent ones and of the group, and whether they agree."""
    torch.manual_seed(0)
    model, loss, batch = {"mlp": _mlp, "gpt2": _gpt2}[kind](rank)
    repeats = PRODUCTS[kind]
    H = hessian(model, loss, [batch], method="autodiff", memory_limit=_KEPT)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    expected = H @ v / ranks  # all ranks have as many terms
    dist.all_reduce(expected)
    alone = timed(lambda: H @ v if rank == 0 else None, repeats)
    independent = timed(lambda: H @ v, repeats)
    H = hessian(model, loss, [batch], method="autodiff", process_group="world", memory_limit=_KEPT)
    difference = float((H @ v - expected).norm() / expected.norm())
    group = timed(lambda: H @ v, repeats)
    return {
        "ranks": ranks,
        "parameters": len(v),
        "alone_seconds": alone["seconds"],
        "independent_seconds": independent["seconds"],
        "seconds": group["seconds"],
        "all_reduce_seconds": timed(lambda: dist.all_reduce(expected), repeats)["seconds"],
        **efficiencies(alone, independent, group),
        "relative_difference": difference,
    }


def _row(kind: str, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = in_own_process("benchmarks.distributed", kind, str(ranks))
    return {**found, "of_cores": found["efficiency"] * ranks / min(ranks, CORES)}


def _table(kind: str) -> dict[str, object]:
    """One row for each number of ranks."""
    rows = [_row(kind, ranks) for ranks in RANKS[kind]]
    return {"parameters": rows[0]["parameters"], "cores": CORES, "ranks": rows}


def run() -> dict[str, object]:
    """Both models."""
    return {"aim": AIM, **_table("mlp"), "gpt2": _table("gpt2")}


if __name__ == "__main__":
    print(json.dumps(together(_measured, int(sys.argv[2]), sys.argv[1])[0] if sys.argv[1:] else run()))
