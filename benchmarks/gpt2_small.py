"""GPT-2 small, 124 million parameters with random weights, one sequence of 256 tokens, float32, two threads.

Its largest eigenvalue and the Frobenius norm of every third block to 5 %: how many products, how long, how much memory.
"""

import json
import sys
import time
from typing import Any

import torch

import curvoscope as cv
from benchmarks.measure import in_own_process, peak_gib

LENGTH, TOLERANCE = 256, 0.05
FEW = 6  # products that mostly do
EVERY = 3  # blocks
LIMIT_GIB = 12
GRAPHS, BASIS = 3 * 2**30, 11 * 2**29  # bytes for what is kept between products, and for Lanczos' vectors


def measured() -> dict[str, object]:
    """In a process of its own: lambda_max, all norms, and the peak memory of all that."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    tokens = torch.randint(0, model.config.vocab_size, (1, LENGTH))
    H = cv.hessian(model, None, [{"input_ids": tokens, "labels": tokens}], method="autodiff", memory_limit=GRAPHS)
    start = time.perf_counter()
    with cv.settings(memory_limit=BASIS):
        largest: Any = H.total.eigenvalues(1, "LA", tolerance=TOLERANCE)[0]
    seconds = time.perf_counter() - start
    print(f"lambda_max {largest}: {seconds:.0f} s, {peak_gib():.2f} GiB", file=sys.stderr)
    norms = {}
    start = time.perf_counter()
    products = 0
    for name in H.names[::EVERY]:
        norms[name] = H.total[name].frobenius_norm(matvecs=FEW)
        products += norms[name].matvecs
        if norms[name].stderr > TOLERANCE * norms[name].value:
            norms[name] = H.total[name].frobenius_norm(tolerance=TOLERANCE)
            products += norms[name].matvecs
        print(f"{name} {norms[name]}: {peak_gib():.2f} GiB", file=sys.stderr)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "lambda_max": {"value": largest.value, "stderr": largest.stderr, "products": largest.matvecs},
        "lambda_max_seconds": seconds,
        "blocks": len(norms),
        "of_blocks": len(H.names),
        "largest_relative_error_of_a_norm": max(norm.stderr / norm.value for norm in norms.values() if norm.value),
        "products_for_the_norms": products,
        "norms_seconds": time.perf_counter() - start,
        "peak_gib": peak_gib(),
        "limit_gib": LIMIT_GIB,
        "norms": {name: norm.value for name, norm in norms.items()},
    }


def run() -> dict[str, object]:
    """All measurements."""
    return in_own_process("benchmarks.gpt2_small")


if __name__ == "__main__":
    print(json.dumps(measured(), indent=1))
