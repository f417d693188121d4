"""Products of `cv.hessian(..., compile=True)` beside eager ones: processor time, time to compile, when it pays.

GPT-2s of Hugging Face and of torch's own layers in float32, one thread, in turns; the least of several. The time to
compile is that of this process and of the C++ compilers that it starts, with torch's cache of compiled kernels empty,
and `products_to_pay` is that time in what each product saves; None if it saves nothing.
"""

import json
import os
import sys
import tempfile
import warnings
from functools import partial

import torch
from torch import nn

import curvoscope as cv
from benchmarks.measure import in_own_process
from benchmarks.several_vectors import processor_seconds
from curvoscope.errors import CompileWarning

VOCABULARY, TURNS = 200, 8
SIZES = {"tiny": (2, 32, 4, 16), "medium": (4, 256, 4, 128)}  # layers, d, N, L
KINDS = ("GPT-2", "encoder")


def model_of(kind: str, layers: int, width: int, length: int) -> nn.Module:
    """Of Hugging Face, or of torch's own layers."""
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(VOCABULARY, width), encoder, nn.Linear(width, VOCABULARY))
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": length, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


def measured(kind: str, size: str) -> dict[str, object]:
    """One model."""
    layers, width, rows, length = SIZES[size]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = model_of(kind, layers, width, length).eval()
    tokens, targets = torch.randint(0, VOCABULARY, (2, rows, length))
    data = [(tokens, targets)]
    found: dict[str, object] = {"model": kind, "size": size, "tokens": rows * length}
    for part in ("total", "outer"):
        eager, compiled = (
            getattr(cv.hessian(model, cv.losses.CrossEntropy(), data, method="autodiff", compile=on), part)
            for on in (False, True)
        )
        vector = torch.randn(eager.shape[0])
        expected = eager @ vector
        start = sum(os.times()[:4])
        with warnings.catch_warnings():
            warnings.simplefilter("error", CompileWarning)
            compiled @ vector
        seconds = sum(os.times()[:4]) - start
        operators = {"eager": eager, "compiled": compiled}
        least = dict.fromkeys(operators, float("inf"))
        for _ in range(TURNS):
            for name, operator in operators.items():
                least[name] = min(least[name], processor_seconds(partial(operator.__matmul__, vector)))
        saved = least["eager"] - least["compiled"]
        found["parameters"] = eager.shape[0]
        found[part] = {
            "compile_seconds": seconds,
            "eager_milliseconds": 1e3 * least["eager"],
            "compiled_over_eager": least["compiled"] / least["eager"],
            "products_to_pay": round(seconds / saved) if saved > 0 else None,
            "difference": float((compiled @ vector - expected).norm() / expected.norm()),
        }
    return found


def run() -> dict[str, object]:
    """All models, each in a process of its own with an empty cache."""
    return {"models": [in_own_process("benchmarks.compiled", kind, size) for kind in KINDS for size in SIZES]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        print(json.dumps(measured(*sys.argv[1:]) if sys.argv[1:] else run(), indent=1))
