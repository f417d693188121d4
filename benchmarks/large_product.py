"""One product with the Hessian of a Llama of 1.1 billion parameters at 512 tokens, layers recomputed: memory, seconds.

The whole model needs some 16 GiB, so it runs on request, `python -m benchmarks.large_product 22`. Otherwise the memory
of 22 layers follows from models of one and two: each layer takes as much as the one before. Weights are float32. The
peak counts the whole process: the weights, the vector, the product, and what is computed on the way. The product is the
first one, which also makes the graph and the gradient.
"""

import json
import sys

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


def run(layers: tuple[int, ...] = FEW) -> dict[str, object]:
    """Each in a process of its own."""
    runs = [in_own_process("benchmarks.large_product", "one", str(count)) for count in layers]
    found: dict[str, object] = {"limit_gib": LIMIT_GIB, "tokens": LENGTH, "runs": runs}
    if len(runs) > 1 and layers[-1] != LAYERS:
        (few, less), (many, more) = ((int(str(r["layers"])), float(str(r["peak_gib"]))) for r in runs[-2:])
        found["peak_gib_of_22_layers"] = more + (LAYERS - many) * (more - less) / (many - few)
    return found


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["one", count]:
            result: dict[str, object] = dict(product(int(count)))
        case counts:
            result = run(tuple(map(int, counts)) or FEW)
    print(json.dumps(result, indent=1))
