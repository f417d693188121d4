"""The Hessian of a model sharded with `fully_shard` over 1, 2 and 4 processes: memory of each, seconds, agreement.

Memory is the growth of the resident set of the process with the largest one, from before the model is made: parameters,
their copy, and the Lanczos vectors are spread, activations are not. Every process has one thread and the same batch, so
that its activations are those of any number of ranks. `expected_gib` is a + b / ranks with a and b from the first two.
"""

import json
import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.measure import in_own_process, once, peak_gib
from benchmarks.ranks import together
from curvoscope.curvature import MeanSquaredError, hessian
from curvoscope.distributed.sharded_operators import ShardedMatrix

RANKS = (1, 2, 4)
WIDTH, LAYERS, ROWS, STEPS = 384, 8, 16, 8


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


def _answers(model: nn.Module) -> dict[str, float]:
    r = torch.Generator().manual_seed(1)
    batch = torch.randn(ROWS, WIDTH, generator=r), torch.randn(ROWS, WIDTH, generator=r)
    H = hessian(model, MeanSquaredError(), [batch], method="autodiff")
    largest = H.total.eigenvalues(k=1, matvecs=STEPS)
    assert not isinstance(largest, torch.Tensor)
    found = {"largest": float(largest[0]), "norm": float(H.total.frobenius_norm(matvecs=2))}
    held = H.total.spaces[1].length if isinstance(H.total, ShardedMatrix) else H.shape[0]
    found["seconds"] = once(lambda: H @ torch.ones(held))
    return found


def _measured(rank: int, ranks: int) -> dict[str, float]:
    """The answers, and how much the memory of this process has grown."""
    before = peak_gib()
    found = _answers(_model(ranks))
    return {**found, "gib": peak_gib() - before}


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
        row["expected_gib"] = one - spread + spread / int(str(row["ranks"]))
        for name in ("largest", "norm"):
            expected = float(str(rows[0][name]))
            row[f"{name}_difference"] = abs(float(str(row[name])) - expected) / abs(expected)
    parameters = LAYERS * (8 * WIDTH**2 + 5 * WIDTH)
    vector_gib = 4 * parameters / 2**30
    return {"parameters": parameters, "float32_vector_gib": vector_gib, "unsharded_gib": whole, "ranks": rows}


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    print(json.dumps(_largest(int(sys.argv[1]))))
