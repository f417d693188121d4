"""The Hessian of a model sharded with `fully_shard` over 1, 2 and 4 processes: memory of each, seconds, agreement.

Memory is the growth of the resident set of the process with the largest one, from before the model is made: parameters,
their copy, and the Lanczos vectors are spread, activations are not. Every process has one thread and the same batch, so
that its activations are those of any number of ranks. `expected_gib` is a + b / ranks with a and b from the first two.

Times are of a product with 16 rows in the batch of each rank, where parameters are moved as much as computed with, and
with 256. Each rank has as much to do however many there are: `efficiency` is the time of one rank over that of all.
`seconds` needs as many idle cores as ranks; `over_unsharded` is a ratio of processor times.
"""

import json
import os
import statistics
import sys
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.measure import in_own_process, once, peak_gib
from benchmarks.ranks import together
from curvoscope.curvature import MeanSquaredError, ModelHessian, hessian
from curvoscope.distributed.sharded_operators import ShardedMatrix

RANKS = (1, 2, 4)
WIDTH, LAYERS, ROWS, MORE_ROWS, STEPS, PRODUCTS = 384, 8, 16, 256, 8, 9
AIMS = {"over_unsharded": 1.5, "efficiency": 0.7}


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(self.act(self.up(x)))
        return found


def _model(ranks: int) -> nn.Module:
    """Layer by layer, so that no rank ever has it whole; unsharded for 0 ranks."""
    torch.manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        layers.append(_Layer())
        if ranks:
            fully_shard(layers[-1], mesh=init_device_mesh("cpu", (ranks,)))
    return nn.Sequential(*layers)


def _hessian(model: nn.Module, rows: int) -> ModelHessian:
    r = torch.Generator().manual_seed(1)
    batch = torch.randn(rows, WIDTH, generator=r), torch.randn(rows, WIDTH, generator=r)
    return hessian(model, MeanSquaredError(), [batch], method="autodiff")


def _answers(H: ModelHessian) -> dict[str, float]:
    largest = H.total.eigenvalues(k=1, matvecs=STEPS)
    assert not isinstance(largest, torch.Tensor)
    return {"largest": float(largest[0]), "norm": float(H.total.frobenius_norm(matvecs=2))}


def _times(H: ModelHessian) -> dict[str, float]:
    """Median seconds and processor seconds of a product, after two of them."""
    held = H.total.spaces[1].length if isinstance(H.total, ShardedMatrix) else H.shape[0]
    vector = torch.ones(held)
    for _ in range(2):
        H @ vector
    seconds, processor = [], []
    for _ in range(PRODUCTS):
        start = time.process_time()
        seconds.append(once(lambda: H @ vector))
        processor.append(time.process_time() - start)
    return {"seconds": statistics.median(seconds), "processor_seconds": statistics.median(processor)}


def _measured(rank: int, ranks: int) -> dict[str, float]:
    """The answers, and how much the memory of this process has grown."""
    before = peak_gib()
    model = _model(ranks)
    H = _hessian(model, ROWS)
    found = {**_answers(H), "gib": peak_gib() - before, **_times(H)}
    more = _times(_hessian(model, MORE_ROWS))
    return {**found, **{f"{name}_of_more_rows": value for name, value in more.items()}}


def _largest(ranks: int) -> dict[str, object]:
    """The estimates, and the largest memory of a process."""
    if not ranks:
        torch.set_num_threads(1)
        return dict(_measured(0, 0))
    found = together(_measured, ranks)
    return {**found[0], "gib": max(float(str(one["gib"])) for one in found)}


def run() -> dict[str, object]:
    """The table, one row for each number of ranks; 0 is the model without shards."""
    rows: list[dict[str, object]] = []
    for ranks in (0, *RANKS):
        rows.append({"ranks": ranks, **in_own_process("benchmarks.sharded", str(ranks))})
    whole, one, two = (float(str(row["gib"])) for row in rows[:3])
    spread = 2 * (one - two)  # a + b / ranks
    for row in rows[1:]:
        for more in ("", "_of_more_rows"):
            own, unsharded = (float(str(one[f"processor_seconds{more}"])) for one in (row, rows[0]))
            row[f"over_unsharded{more}"] = own / unsharded
            row[f"efficiency{more}"] = float(str(rows[1][f"seconds{more}"])) / float(str(row[f"seconds{more}"]))
        row["expected_gib"] = one - spread + spread / int(str(row["ranks"]))
        for name in ("largest", "norm"):
            expected = float(str(rows[0][name]))
            row[f"{name}_difference"] = abs(float(str(row[name])) - expected) / abs(expected)
    parameters = LAYERS * (8 * WIDTH**2 + 5 * WIDTH)
    vector_gib = 4 * parameters / 2**30
    sizes = {"parameters": parameters, "float32_vector_gib": vector_gib, "rows": ROWS, "more_rows": MORE_ROWS}
    return {"aims": AIMS, **sizes, "unsharded_gib": whole, "ranks": rows}


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    print(json.dumps(_largest(int(sys.argv[1]))))
