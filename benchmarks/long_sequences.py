"""A product with the Hessian of one attention layer at growing length: ours against torch's mathematical kernel.

The layer has 8 heads, d = 512 and batch 1; the product is with the whole Hessian of W_Q, W_K, W_V, W_O under the mean
squared error: forward pass, gradient and second derivative.
"""

import json
import math
import resource
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import exponent, in_own_process, in_turns, once, peak_gib, resident_peak_starts_anew
from curvoscope.attention import sdpa

LENGTHS = (1024, 2048, 4096, 8192, 16384)
LONGEST_MATH = 4096  # past it the mathematical kernel is not run, but under the limit
LIMIT_GIB = 8  # of address space, for ours at every length and for the mathematical kernel at the greatest
HEADS, WIDTH = 8, 512

torch.set_num_threads(2)


def mathematical(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Torch's kernel that has a second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


KERNELS: dict[str, Callable[..., Tensor]] = {"ours": sdpa, "math": mathematical}


class Layer:
    """One attention layer with a loss, and a direction of its weights."""

    def __init__(self, L: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        r = lambda *s: torch.randn(*s, generator=generator, dtype=dtype)  # noqa: E731
        self.X, self.Y = r(1, L, WIDTH), r(1, L, WIDTH)
        self.weights = [(r(WIDTH, WIDTH) / math.sqrt(WIDTH)).requires_grad_() for _ in range(4)]
        self.direction = [r(WIDTH, WIDTH) for _ in range(4)]

    def gradient(self, kernel: str, causal: bool = False) -> tuple[Tensor, ...]:
        """The gradient, with the graph that its derivatives need."""
        *projections, W_O = self.weights
        q, k, v = ((self.X @ W).unflatten(-1, (HEADS, -1)).transpose(1, 2) for W in projections)
        F = KERNELS[kernel](q, k, v, is_causal=causal).transpose(1, 2).flatten(2) @ W_O
        return torch.autograd.grad((F - self.Y).square().mean(), self.weights, create_graph=True)

    def product(self, kernel: str, causal: bool = False) -> tuple[Tensor, ...]:
        """The Hessian times the direction."""
        return torch.autograd.grad(self.gradient(kernel, causal), self.weights, self.direction)


def one_length(kernel: str, L: int, limit_gib: float) -> dict[str, object]:
    """Seconds and peak memory of one product, in this process, which must be a fresh one."""
    Layer(64).product(kernel)  # what is loaded at the first call does not belong to the product
    if limit_gib:
        resource.setrlimit(resource.RLIMIT_AS, (int(limit_gib * 2**30),) * 2)
    before = resident_peak_starts_anew()
    try:
        seconds = once(lambda: Layer(L).product(kernel))
    except RuntimeError as error:
        return {"fails": str(error).split("\n")[0], "limit_gib": limit_gib}
    return {"seconds": seconds, "peak_mib": (peak_gib() - before) * 1024}


def growth() -> dict[str, object]:
    """Peak memory and time by length, each length in a fresh process, and the exponents of their growth."""
    own = lambda *arguments: in_own_process("benchmarks.long_sequences", *map(str, arguments))  # noqa: E731
    ours = {L: own("ours", L, LIMIT_GIB) for L in LENGTHS}
    theirs = {L: own("math", L, 0) for L in LENGTHS if L <= LONGEST_MATH}
    measured = {name: _column(rows, "peak_mib") for name, rows in (("ours", ours), ("math", theirs))}
    last = measured["math"][LONGEST_MATH]
    return {
        "ours": ours,
        "math": theirs,
        "memory_exponent_ours": exponent(measured["ours"]),
        "memory_exponent_math": exponent(measured["math"]),
        "time_exponent_ours": exponent(_column(ours, "seconds")),
        "math_predicted_gib": {L: last * (L / LONGEST_MATH) ** 2 / 1024 for L in LENGTHS if L > LONGEST_MATH},
        f"math, L={LENGTHS[-1]} within {LIMIT_GIB} GiB": own("math", LENGTHS[-1], LIMIT_GIB),
    }


def _column(rows: dict[int, dict[str, object]], field: str) -> dict[int, float]:
    return {L: float(str(row[field])) for L, row in rows.items()}


def speed(L: int = 1024) -> dict[str, object]:
    """How many times faster than the mathematical kernel: the whole, and a product when the graph is kept."""
    layer = Layer(L)
    found: dict[str, object] = {}
    for causal in (False, True):
        name = "causal" if causal else "all keys"
        seconds = in_turns(
            5, ours=lambda c=causal: layer.product("ours", c), math=lambda c=causal: layer.product("math", c)
        )
        kept = {kernel: layer.gradient(kernel, causal) for kernel in KERNELS}
        again = {
            kernel: lambda g=g: torch.autograd.grad(g, layer.weights, layer.direction, retain_graph=True)
            for kernel, g in kept.items()
        }
        products = in_turns(5, **again)
        found[name] = {
            "seconds_ours": seconds["ours"],
            "times_faster_than_math": seconds["math"] / seconds["ours"],
            "times_faster_than_math_on_a_kept_graph": products["math"] / products["ours"],
        }
    return found


def agreement(L: int = 1024) -> float:
    """Largest relative difference of the products in float64."""
    layer = Layer(L, torch.float64)
    pairs = zip(layer.product("ours"), layer.product("math"), strict=True)
    return max(float((ours - math).abs().max() / math.abs().max()) for ours, math in pairs)


def run() -> dict[str, object]:
    """All measurements."""
    return {
        "layer": {"heads": HEADS, "d": WIDTH, "batch": 1, "dtype": "float32"},
        "relative_difference_in_float64, L=1024": agreement(),
        "L=1024": speed(),
        "growth": growth(),
    }


if __name__ == "__main__":
    found = one_length(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])) if len(sys.argv) == 4 else run()
    print(json.dumps(found, indent=1))
