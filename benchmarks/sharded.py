"""The Hessian of a model sharded with `fully_shard` over 1, 2 and 4 processes: memory of each, seconds, agreement.

Memory is the growth of the resident set of the process with the largest one, from before the model is made: parameters,
their copy, and the Lanczos vectors are spread, activations are not. Every process has one thread and the same batch, so
that its activations are those of any number of ranks. `expected_gib` is a + b / ranks with a and b from the first two.

Times are of a product with 16 rows in the batch of each rank, where parameters are moved as much as computed with, and
with 256. They are taken in the same processes: of the model unsharded, by one while the others wait and by all at once,
and of the sharded one. `over_unsharded` is a ratio of processor times; `efficiency` is the time of the unsharded model
alone over that of the sharded one, and `of_independent` that of all at once. Both need an idle core for each rank.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.measure import in_own_process, peak_gib
from benchmarks.ranks import efficiencies, timed, together
from curvoscope.curvature import MeanSquaredError, ModelHessian, hessian
from curvoscope.distributed.sharded_operators import ShardedMatrix

RANKS = (1, 2, 4)
WIDTH, LAYERS, ROWS, STEPS, PRODUCTS = 384, 8, (16, 256), 8, 9
AIMS = {"over_unsharded": 1.5, "efficiency": 0.7}  # on one rank, and on two with the larger batch


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
    return {
        "largest": float(H.total.eigenvalues(k=1, matvecs=STEPS)[0]),
        "norm": float(H.total.frobenius_norm(matvecs=2)),
    }


def _ones(H: ModelHessian) -> Tensor:
    """A vector, or this rank's part of it."""
    return torch.ones(H.total.spaces[1].length if isinstance(H.total, ShardedMatrix) else H.shape[0])


def _times(model: nn.Module, whole: nn.Module, rows: int, rank: int) -> dict[str, float]:
    """Median seconds of a product, after two of them."""
    own, H = _hessian(whole, rows), _hessian(model, rows)
    given, v = _ones(own), _ones(H)
    for _ in range(2):
        own @ given, H @ v
    alone = timed(lambda: own @ given if rank == 0 else None, PRODUCTS)
    independent = timed(lambda: own @ given, PRODUCTS)
    group = timed(lambda: H @ v, PRODUCTS)
    return {
        "unsharded_seconds": alone["seconds"],
        "seconds": group["seconds"],
        **efficiencies(alone, independent, group),
        "over_unsharded": group["processor_seconds"] / alone["processor_seconds"],
    }


def _measured(rank: int, ranks: int, sharded: bool) -> dict[str, object]:
    """The answers, how much the memory of this process has grown, and the times if there is something to compare."""
    before = peak_gib()
    model = _model(ranks if sharded else 0)
    found: dict[str, object] = {**_answers(_hessian(model, ROWS[0])), "gib": peak_gib() - before}
    return found | {"times": {rows: _times(model, _model(0), rows, rank) for rows in ROWS}} if sharded else found


def _largest(ranks: int) -> dict[str, object]:
    """The estimates, and the largest memory of a process; 0 is the model without shards."""
    found = together(_measured, max(ranks, 1), ranks > 0)
    return {"ranks": ranks, **found[0], "gib": max(float(str(one["gib"])) for one in found)}


def _row(row: dict[str, Any], whole: dict[str, Any], expected: float) -> dict[str, object]:
    differences = {f"{name}_difference": abs(row[name] / whole[name] - 1) for name in ("largest", "norm")}
    return {**row, "expected_gib": expected, **differences}


def run() -> dict[str, object]:
    """The table, one row for each number of ranks."""
    rows: list[dict[str, Any]] = [in_own_process("benchmarks.sharded", str(ranks)) for ranks in (0, *RANKS)]
    whole, one, two = rows[:3]
    spread = 2 * (one["gib"] - two["gib"])  # a + b / ranks
    parameters = LAYERS * (8 * WIDTH**2 + 5 * WIDTH)
    return {
        "aims": AIMS,
        "parameters": parameters,
        "float32_vector_gib": 4 * parameters / 2**30,
        "unsharded_gib": whole["gib"],
        "ranks": [whole, *(_row(row, whole, one["gib"] - spread + spread / row["ranks"]) for row in rows[1:])],
    }


if __name__ == "__main__":
    print(json.dumps(_largest(int(sys.argv[1]))))
