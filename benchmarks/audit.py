"""The audit of all linear blocks of a GPT-2 with random weights, 128 tokens, float32, by a sweep.

All approximations but sums of several Kronecker products, in units of the sweep itself; and the exact audit of the
addition network at d = 64. Six layers of width 256; `python -m benchmarks.audit 12 768` takes GPT-2 small. Seconds are
those of the processor, on one thread.
"""

import json
import sys
import time
from typing import Any

import torch

import curvoscope as cv
from benchmarks.measure import in_own_process, peak_gib
from curvoscope.analysis.audit import DEFAULT

LENGTH, SAMPLES = 128, 64
LIMITS = {"audit_over_sweep": 2.0}  # of a sweep with the audit, to the sweep alone


def gpt2(layers: int, width: int) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The model and its batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, use_cache=False)
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, config.vocab_size, (1, LENGTH))
    return model, [{"input_ids": tokens, "labels": tokens}]


def sampled(layers: int, width: int) -> dict[str, object]:
    """The time of the sweep alone, and of the sweep with an audit of all linear blocks that watches it."""
    model, batches = gpt2(layers, width)
    blocks = cv.blocks_of(model).select("*.attn.[QKVO]", "*.mlp.up", "*.mlp.down")
    cv.sweep(model, None, batches, blocks, samples=8)  # the first is slower
    seconds: dict[str, float] = {}
    watch = cv.analysis.SampledAudit(DEFAULT)
    for name, observe in (("sweep", None), ("audited", watch)):
        start = time.process_time()  # others may use the cores
        cv.sweep(model, None, batches, blocks, samples=SAMPLES, observe=observe)
        seconds[name] = time.process_time() - start
    table = watch.table()
    return {
        "limits": LIMITS,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "blocks": len(table.blocks),
        "approximations": len(table.approximations),
        "samples": SAMPLES,
        "sweep_seconds": seconds["sweep"],
        "audit_over_sweep": seconds["audited"] / seconds["sweep"],
        "peak_gib": peak_gib(),
        "median_errors": {name: table.median_error(name) for name in table.approximations},
    }


def exact() -> dict[str, object]:
    """All linear blocks of the addition network at d = 64, 16 sequences."""
    from curvoscope.papers import tasks
    from curvoscope.papers.networks import GPT2

    model, tokens = GPT2(64).eval(), tasks.addition(16)
    batch = tokens[:, :-1], tasks.answer_targets(tokens)
    blocks = cv.blocks_of(model).select("*.attn.[QKVO]", "*.mlp.up", "*.mlp.down")
    H = cv.hessian(model, cv.losses.CrossEntropy(), [batch], blocks)
    start = time.process_time()
    wanted = [name for name in DEFAULT if name not in ("neurons", "heads")]  # as many floats as there are pairs
    table = cv.analysis.audit(H, approximations=wanted)
    return {
        "blocks": len(table.blocks),
        "approximations": len(table.approximations),
        "seconds": time.process_time() - start,
        "median_errors": {name: table.median_error(name) for name in table.approximations},
    }


def measured(layers: int = 0, width: int = 0) -> dict[str, object]:
    """In a process of its own; with sizes, of that model alone."""
    torch.set_num_threads(1)
    if layers:
        return {"sampled": sampled(layers, width)}
    return {"sampled": sampled(6, 256), "exact, d = 64": exact()}


def run() -> dict[str, object]:
    """All measurements."""
    return in_own_process("benchmarks.audit")


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:])), indent=1))
