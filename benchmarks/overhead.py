"""What estimates cost beside their products: time of an answer over that of as many bare products, in one run.

The GPT-2 of `matrix_free`: 4 layers, d = 256, L = 128, batch 4, vocabulary 5000, float32, one thread. Answers and bare
products are taken in turns and timed by the processor's clock, so that a busy machine moves the ratios little. Beside
them, the products that all parts of a block take together, in units of those of the total.
"""

import json
import time

import torch

from benchmarks.matrix_free import BLOCK, PROBES, PlainGPT2, ours
from benchmarks.measure import in_turns
from curvoscope import estimate
from curvoscope.operators import LinearOperator

LIMIT = 1.1
REPEATS = 2


def ratios(operator: LinearOperator) -> dict[str, float]:
    """Seconds of each answer from 16 products, over those of 16 products with one vector."""
    vector = torch.randn(operator.shape[1], generator=torch.Generator().manual_seed(0))

    def bare() -> None:
        for _ in range(PROBES):
            operator @ vector

    seconds = in_turns(
        REPEATS,
        time.process_time,
        bare=bare,
        trace=lambda: operator.trace(matvecs=PROBES),
        frobenius_norm=lambda: operator.frobenius_norm(matvecs=PROBES),
        diagonal=lambda: operator.diagonal(matvecs=PROBES),
        eigenvalue=lambda: operator.eigenvalues(1, matvecs=PROBES),
    )
    unit = seconds.pop("bare")
    return {name: value / unit for name, value in seconds.items()}


def run() -> dict[str, object]:
    """All measurements: of the whole Hessian, of one block, and of all parts of it at once."""
    H = ours(PlainGPT2)
    torch.set_num_threads(1)
    stack, parts = H.stacked(BLOCK), {"outer": (0,), "functional": (1,), "total": (0, 1)}

    def apart() -> None:
        for matrix in (H.outer, H.functional, H.total):
            matrix[BLOCK].frobenius_norm(matvecs=PROBES)
            matrix[BLOCK].trace(matvecs=PROBES)

    joint = in_turns(
        REPEATS, time.process_time, together=lambda: estimate.measure(stack, parts, matvecs=PROBES), apart=apart
    )
    return {
        "limit": LIMIT,
        "answers over bare products, whole Hessian": ratios(H.total),
        f"answers over bare products, {BLOCK}": ratios(H.total[BLOCK]),
        "norm and trace of three parts: times faster together": joint["apart"] / joint["together"],
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
