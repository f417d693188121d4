"""The functional part of every attention and feed-forward layer of GPT-2 small, exactly, with the split at the layers.

124 million parameters with random weights, one sequence. Time in gradients of the same model, float32, two threads: the
passes that find the gradient at all layers, then norms, traces and diagonals of all blocks, and products with them.
Spot checks in float64 against products by autodiff: products, entries of the diagonal, and norms within their error.
"""

import json
import sys
import time
from typing import Any

import torch

import curvoscope as cv
from benchmarks.measure import in_own_process, in_turns, peak_gib

LENGTHS = (256, 1024)
CHECKED_LENGTH = 128
LAYERS = ("*.attn.*", "*.mlp.*")
CHECKED = ("h.0.attn.Q", "h.5.attn.K", "h.11.attn.Q", "h.11.attn.K", "h.0.mlp.up", "h.11.mlp.up")
PAIRS = (("h.5.attn.Q", "h.5.attn.K"), ("h.5.attn.V", "h.5.attn.Q"), ("h.11.attn.K", "h.11.attn.O"))
ENTRIES = 4  # of a diagonal
AIM = 1e-9


def _model(dtype: torch.dtype, length: int) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval().to(dtype)
    tokens = torch.randint(0, model.config.vocab_size, (1, length))
    return model, [{"input_ids": tokens, "labels": tokens}]


def timed(length: int, repeats: int) -> dict[str, object]:
    """Seconds, and gradients, for all blocks of all layers."""
    model, batches = _model(torch.float32, length)

    def gradient() -> None:
        model.zero_grad()
        model(**batches[0]).loss.backward()

    gradient_seconds = in_turns(repeats, gradient=gradient)["gradient"]
    model.zero_grad()
    H = cv.hessian(model, None, batches, cv.blocks_of(model).select(*LAYERS), split="layer")
    seconds, sizes = {}, {}
    before = time.perf_counter()

    def done(what: str) -> None:
        nonlocal before
        now = time.perf_counter()
        seconds[what], before = now - before, now
        print(f"L = {length}, {what}: {seconds[what]:.1f} s, {peak_gib():.2f} GiB", file=sys.stderr)

    methods = {H.method_of(name, "functional") for name in H.names}
    done("passes, verified")
    for name in H.names:
        sizes[name] = H.functional[name].frobenius_norm()
    done("norms")
    traces = [H.functional[name].trace() for name in H.names]
    done("traces")
    for name in H.names:
        H.functional[name].diagonal()
    done("diagonals")
    for name in H.names:
        H.functional[name] @ torch.ones(H.functional[name].shape[1])
    done("a product with each")
    first, last = H.names[0], H.names[-1]
    return {
        "gradient_seconds": gradient_seconds,
        "blocks": len(H.names),
        "methods": sorted(methods),
        "method_of_the_outer_part": sorted({H.plan[name, "outer"].method for name in (first, last)}),
        "all_exact": all(number.exact for number in (*sizes.values(), *traces)),
        "seconds": seconds,
        "gradients": {what: value / gradient_seconds for what, value in seconds.items()},
        "peak_gib": peak_gib(),
        "norms": {name: norm.value for name, norm in sizes.items()},
    }


def checked() -> dict[str, object]:
    """Closed forms against products by autodiff, in float64: the largest errors, relative."""
    model, batches = _model(torch.float64, CHECKED_LENGTH)
    names = sorted({*CHECKED, *(name for pair in PAIRS for name in pair)})
    chosen = cv.blocks_of(model).select(*names)
    exact, autodiff = (
        cv.hessian(model, None, batches, chosen, split="layer", method=method).functional
        for method in ("auto", "autodiff")
    )
    generator = torch.Generator().manual_seed(0)
    errors: dict[str, float] = {}
    deviations: dict[str, float] = {}
    for row, column in (*((name, name) for name in CHECKED), *PAIRS):
        v = torch.randn(exact[row, column].shape[1], generator=generator, dtype=torch.float64)
        expected = autodiff[row, column] @ v
        errors[f"{row} x {column}"] = float((exact[row, column] @ v - expected).norm() / expected.norm())
    for name in CHECKED:
        diagonal = torch.as_tensor(exact[name].diagonal())
        largest = diagonal.abs().topk(ENTRIES).indices
        for i in largest.tolist():
            unit = torch.zeros(len(diagonal), dtype=torch.float64)
            unit[i] = 1
            error = abs(float((autodiff[name] @ unit)[i] / diagonal[i]) - 1)
            errors[f"diagonal of {name}"] = max(errors.get(f"diagonal of {name}", 0.0), error)
        estimate = autodiff[name].frobenius_norm(matvecs=8)
        deviations[name] = (float(exact[name].frobenius_norm()) - estimate.value) / estimate.stderr
        print(f"{name}: {errors[f'{name} x {name}']:.1e}, norm off by {deviations[name]:.2f} sd", file=sys.stderr)
    return {
        "length": CHECKED_LENGTH,
        "errors": errors,
        "largest_error": max(errors.values()),
        "aim": AIM,
        "norms_off_by_standard_errors_of_8_products": deviations,
        "peak_gib": peak_gib(),
    }


def run() -> dict[str, object]:
    """All measurements."""
    timings = {str(length): in_own_process("benchmarks.functional", str(length)) for length in LENGTHS}
    return {"lengths": timings, "against products": in_own_process("benchmarks.functional", "checked")}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    print(json.dumps(checked() if what == "checked" else timed(int(what), int(rest[0]) if rest else 3), indent=1))
