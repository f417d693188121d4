"""How cost grows: processor seconds and peak memory along one size at a time, and the exponents.

Two subjects. Products with the Hessian of a small GPT-2 (float32, one batch; the graph is kept between products), in
its parameters, tokens, length, depth and vectors. The exact norms of all blocks of one attention layer (float64), in
sequences, length, width and heads. Each size runs in a process of its own.
"""

import json
import sys
import time

import torch

from benchmarks.measure import exponent, in_own_process, in_turns, peak_gib, resident_peak_starts_anew
from curvoscope import exact, losses
from curvoscope.curvature import CrossEntropy, hessian
from curvoscope.families.configs import transformers

PRODUCT = {"layers": 4, "width": 128, "length": 128, "rows": 4, "vectors": 1}
LAYER = {"sequences": 8, "length": 32, "width": 64, "heads": 4}
AXES: dict[str, dict[str, tuple[int, ...]]] = {
    "product": {
        "layers": (2, 4, 8, 16),
        "width": (128, 256, 512),
        "length": (64, 128, 256, 512),
        "rows": (2, 4, 8, 16),
        "vectors": (1, 2, 4, 8),
    },
    "layer": {
        "sequences": (8, 16, 32, 64),
        "length": (16, 32, 64, 128),
        "width": (32, 64, 128, 256),
        "heads": (1, 2, 4, 8),
    },
}


def product(layers: int, width: int, length: int, rows: int, vectors: int) -> dict[str, float]:
    """One product with the Hessian of a GPT-2, with so many vectors at once; a gradient beside it."""
    package = transformers()
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 32, "n_positions": length, "vocab_size": 512}
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = package.GPT2LMHeadModel(package.GPT2Config(**sizes, **ends)).eval()
    tokens = torch.randint(512, (rows, length + 1))
    batch = (tokens[:, :-1], tokens[:, 1:])
    before = resident_peak_starts_anew()
    H = hessian(model, CrossEntropy(), [batch], method="autodiff")
    V = torch.randn(H.shape[0], vectors).squeeze(1)

    def gradient() -> None:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]).logits.flatten(0, 1), batch[1].flatten()).backward()

    seconds = in_turns(5, time.process_time, product=lambda: H @ V)
    peak = peak_gib() - before
    gradients = in_turns(5, time.process_time, gradient=gradient)
    return {**seconds, **gradients, "peak_mib": peak * 1024, "parameters": float(H.shape[0])}


def layer(sequences: int, length: int, width: int, heads: int) -> dict[str, float]:
    """The exact Frobenius norms of outer and functional part of Q, K, V and O."""
    r = torch.Generator().manual_seed(0)
    weights = [torch.randn(width, width, generator=r, dtype=torch.float64) / width**0.5 for _ in range(4)]
    X, Y = (torch.randn(sequences, length, width, generator=r, dtype=torch.float64) for _ in range(2))
    before = resident_peak_starts_anew()

    def norms() -> None:
        H = exact.SelfAttention(*weights[:3], W_O=weights[3], heads=heads).hessian(X, losses.MSE(Y))
        for name in H.names:
            H.outer[name].frobenius_norm()
            H.functional[name].frobenius_norm()

    seconds = in_turns(3, time.process_time, norms=norms)
    return {**seconds, "peak_mib": (peak_gib() - before) * 1024}


SUBJECTS = {"product": (product, PRODUCT), "layer": (layer, LAYER)}


def along(subject: str, axis: str) -> dict[str, object]:
    """One row for each size of the axis, and the exponents of the seconds and of the memory."""
    rows = {}
    for size in AXES[subject][axis]:
        sizes = SUBJECTS[subject][1] | {axis: size}
        rows[size] = in_own_process("benchmarks.growth", subject, json.dumps(sizes))
    timed = "product" if subject == "product" else "norms"
    seconds = {size: float(str(row[timed])) for size, row in rows.items()}
    memory = {size: max(float(str(row["peak_mib"])), 0.1) for size, row in rows.items()}
    return {"rows": rows, "time_exponent": exponent(seconds), "memory_exponent": exponent(memory)}


def run() -> dict[str, object]:
    """All axes."""
    return {subject: {axis: along(subject, axis) for axis in axes} for subject, axes in AXES.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure, _ = SUBJECTS[sys.argv[1]]
    print(json.dumps(measure(**json.loads(sys.argv[2]))))
