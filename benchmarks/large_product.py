"""One product with the Hessian of a Llama of 1.1 billion parameters at 512 tokens, layers recomputed: memory, seconds.

The whole model takes about 16 GiB. If the limit of 20 GiB is not free, the memory of 22 layers follows from models of
one and two: each layer takes as much as the one before. Weights are float32. The peak counts the whole process: the
weights, the vector, the product, and what is computed on the way. The product is the first one, which also makes the
graph and the gradient.
"""

import json
import sys

import psutil
import torch

import curvoscope as cv
from benchmarks.measure import in_own_process, once, peak_gib
from benchmarks.sweep import llama_of_a_billion

LAYERS, LENGTH, LIMIT_GIB = 22, 512, 20
FEW = (1, 2)


def product(layers: int) -> dict[str, float]:
    """Of a model with so many layers."""
    model, tokens = llama_of_a_billion(layers, LENGTH, torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    data = [{"input_ids": tokens, "labels": tokens}]
    H = cv.hessian(model, None, data, method="autodiff", recompute="layer")
    vector = torch.randn(H.shape[0])
    return {
        "layers": layers,
        "parameters": parameters,
        "seconds": once(lambda: H @ vector),
        "weights_gib": 4 * parameters / 2**30,
        "peak_gib": peak_gib(),
    }


def run() -> dict[str, object]:
    """Of the whole model or, if memory is short, of its first layers; each in a process of its own."""
    counts = (LAYERS,) if psutil.virtual_memory().available >= LIMIT_GIB * 2**30 else FEW
    runs = [in_own_process("benchmarks.large_product", str(count)) for count in counts]
    found: dict[str, object] = {"limit_gib": LIMIT_GIB, "tokens": LENGTH, "runs": runs}
    if counts == FEW:
        (few, less), (many, more) = ((int(str(r["layers"])), float(str(r["peak_gib"]))) for r in runs)
        found["peak_gib_of_22_layers"] = more + (LAYERS - many) * (more - less) / (many - few)
    return found


if __name__ == "__main__":
    print(json.dumps(product(int(sys.argv[1])), indent=1))
