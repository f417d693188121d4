"""The audit of all linear blocks of a GPT-2 with random weights, float32, by a sweep.

All approximations but sums of several Kronecker products, in units of the sweep that they watch; and the exact audit of
the addition network at d = 64. `python -m benchmarks.audit` takes six layers of width 256 and one sequence of 128
tokens, `python -m benchmarks.audit 12 768 6 1024 32` GPT-2 small, 6 sequences of 1,024 tokens and 32 samples. Seconds
are those of the processor.
"""

import json
import sys
import time
from typing import Any

import torch

import curvoscope as cv
from benchmarks.measure import in_own_process, peak_gib
from curvoscope.analysis.audit import DEFAULT

ROWS, LENGTH, SAMPLES = 1, 128, 64
ROOM = 26 * 2**30  # bytes, so that all samples are audited at once
LIMITS = {"audit_over_sweep": 2.0}


def gpt2(layers: int, width: int, rows: int, length: int) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The model and its batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, use_cache=False)
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, config.vocab_size, (rows, length))
    return model, [{"input_ids": tokens, "labels": tokens}]


class TimedAudit(cv.analysis.SampledAudit):
    """An audit that knows how long it took."""

    seconds = 0.0

    def __call__(self, chunk: int, source: Any) -> None:
        """Audit the samples of one block."""
        start = time.process_time()  # others may use the cores
        super().__call__(chunk, source)
        self.seconds += time.process_time() - start


def sampled(
    layers: int, width: int, rows: int = ROWS, length: int = LENGTH, samples: int = SAMPLES
) -> dict[str, object]:
    """The time of a sweep, and of the audit of all linear blocks that watches it."""
    model, batches = gpt2(layers, width, rows, length)
    blocks = cv.blocks_of(model).select("*.attn.[QKVO]", "*.mlp.up", "*.mlp.down")
    cv.sweep(model, None, [{name: some[:1, :LENGTH] for name, some in batches[0].items()}], blocks, samples=8)
    watch = TimedAudit(DEFAULT)
    start = time.process_time()
    with cv.settings(memory_limit=ROOM):
        cv.sweep(model, None, batches, blocks, samples=samples, observe=watch)
    sweep = time.process_time() - start - watch.seconds
    table = watch.table()
    return {
        "limits": LIMITS,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "blocks": len(table.blocks),
        "approximations": len(table.approximations),
        "tokens": rows * length,
        "samples": samples,
        "sweep_seconds": sweep,
        "audit_over_sweep": watch.seconds / sweep,
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


def measured(*sizes: int) -> dict[str, object]:
    """In a process of its own; with sizes, of that model alone."""
    if sizes:
        return {"sampled": sampled(*sizes)}
    torch.set_num_threads(1)
    return {"sampled": sampled(6, 256), "exact, d = 64": exact()}


def run() -> dict[str, object]:
    """All measurements."""
    return in_own_process("benchmarks.audit")


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:])), indent=1))
