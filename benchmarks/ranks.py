"""The same measurement in several processes of one gloo group, one thread each."""

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measure import once

Measured = Callable[..., Mapping[str, object]]  # of a rank, the number of ranks, and more


def together(measured: Measured, ranks: int, *more: object) -> list[dict[str, object]]:
    """What `measured(rank, ranks, *more)`, a function of a module, returns in each of so many processes, by rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(measured, folder, rank, ranks, *more) for rank in range(ranks)]
        processes = [context.Process(target=_process, args=one) for one in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def timed(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median seconds, and processor seconds, of a call that all ranks begin together."""
    seconds, processor = [], []
    for _ in range(repeats):
        dist.barrier()
        start = time.process_time()
        seconds.append(once(call))
        processor.append(time.process_time() - start)
    return {"seconds": statistics.median(seconds), "processor_seconds": statistics.median(processor)}


def efficiencies(alone: dict[str, float], independent: dict[str, float], group: dict[str, float]) -> dict[str, float]:
    """How the time of a group compares with that of one process alone and of independent ones with as much to do."""
    return {
        "efficiency": alone["seconds"] / group["seconds"],
        "processor_efficiency": alone["processor_seconds"] / group["processor_seconds"],
        "of_independent": independent["seconds"] / group["seconds"],
    }


def _process(measured: Measured, folder: str, rank: int, ranks: int, *more: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(measured(rank, ranks, *more)))
    dist.destroy_process_group()
