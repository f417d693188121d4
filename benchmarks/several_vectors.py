"""Products with eight vectors at once in units of eight single ones: Hessian of small GPT-2s, float32, one thread.

Processor time, the least of several turns. Up to some size the calls cost more than the arithmetic, and the vectors
share them. Above it each vector takes passes of its own: with the graph kept, all of a product depends on the vector.
"""

import json
import time
from collections.abc import Callable

import torch

import curvoscope as cv

VECTORS, TURNS, VOCABULARY = 8, 4, 200
SIZES = ((16, 4, 16), (32, 4, 32), (64, 1, 16), (64, 4, 32), (128, 1, 16), (128, 4, 64), (256, 4, 128))  # d, N, L
AIM = 0.8


def processor_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measured(width: int, rows: int, length: int) -> dict[str, float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": width, "n_head": 4, "n_positions": length, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)).eval()
    tokens = torch.randint(0, VOCABULARY, (rows, length))
    H = cv.hessian(model, None, [{"input_ids": tokens, "labels": tokens}], method="autodiff")
    vectors = torch.randn(VECTORS, H.shape[0]).T
    calls = {"one": lambda: H @ vectors[:, 0], "eight": lambda: H @ vectors}
    H @ vectors[:, 0]
    seconds = {name: min(processor_seconds(call) for _ in range(TURNS)) for name, call in calls.items()}
    return {
        "parameters": H.shape[0],
        "tokens": rows * length,
        "milliseconds_of_one": 1e3 * seconds["one"],
        "eight_over_eight_single": seconds["eight"] / (VECTORS * seconds["one"]),
    }


def run() -> dict[str, object]:
    """All sizes."""
    torch.set_num_threads(1)
    return {"aim": AIM, "sizes": [measured(*size) for size in SIZES]}


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
