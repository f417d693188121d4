"""The same measurement in several processes of one gloo group, one thread each."""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist


def together(measured: Callable[[int, int], Mapping[str, object]], ranks: int) -> list[dict[str, object]]:
    """What `measured(rank, ranks)`, a function of a module, returns in each of so many processes, by rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_process, args=(measured, rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _process(measured: Callable[[int, int], Mapping[str, object]], rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(measured(rank, ranks)))
    dist.destroy_process_group()
