"""Audits of the addition model, of a GPT through its training and of two trained models, for docs/audit.md.

`python -m benchmarks.audit_study [PART ...]` writes benchmarks/audit_study.json: all parts, or those named. The trained
models are those of the gallery (`make audit` installs them). `benchmarks.audit_page` makes the page of it.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import curvoscope as cv
from curvoscope.analysis.audit_table import AuditTable
from curvoscope.approximations import GradientSource
from curvoscope.blocks import layer_and_role
from curvoscope.papers import tasks
from curvoscope.papers.networks import GPT2

RESULTS = Path(__file__).with_name("audit_study.json")
LINEAR = ("attn.Q", "attn.K", "attn.V", "attn.O", "mlp.up", "mlp.gate", "mlp.down")
STEPS = (0, 30, 100, 300, 600)  # of training
SHOWN = ("diagonal", "input", "kfac", "ekfac", "shampoo", "kronecker:1")
PER_HEAD = ("kfac/heads", "kronecker:1/heads", "heads")
SAMPLES = 64
LAYERS = {"smollm2": (0, 15, 29), "minilm": (0, 3, 5)}
SEED = 0
Facts = dict[str, Any]


def addition() -> Facts:
    """The paper's network at initialisation, as `curvoscope audit` takes it: one block, d = 16, 64 additions."""
    return _exact(GPT2(16).eval(), 64)


def training() -> Facts:
    """Two blocks of width 32 with norms, trained on addition with AdamW; audited on additions that it has not seen."""
    torch.manual_seed(SEED)
    model = GPT2(32, depth=2, norm="pre", seed=SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    found = {}
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            found[str(step)] = _exact(model, 4)
        tokens = tasks.addition(64, seed=step + 1)
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tasks.answer_targets(tokens)).backward()
        optimizer.step()
    return found


def _exact(model: GPT2, sequences: int) -> Facts:
    tokens = tasks.addition(sequences)
    blocks = linear(cv.blocks_of(model))
    H = cv.hessian(model, cv.losses.CrossEntropy(), [(tokens[:, :-1], tasks.answer_targets(tokens))], blocks)
    return _facts(cv.analysis.audit(H, approximations=SHOWN), H, blocks) | {"loss": H.loss}


def smollm2() -> Facts:
    """Three of the 30 layers; what lies outside of diagonal blocks is of all layers."""
    return _sampled("smollm2")


def minilm() -> Facts:
    """Three of the six layers; what lies outside of diagonal blocks is of all layers."""
    return _sampled("minilm")


def _sampled(name: str) -> Facts:
    from gallery.models import MODELS

    exhibit = MODELS[name].trained()
    blocks = linear(exhibit.blocks)
    observer = cv.analysis.SampledAudit((*SHOWN, *PER_HEAD))

    def observe(chunk: int, source: GradientSource) -> None:
        where = layer_and_role(source.name)
        if where is not None and int(where[0].removeprefix("h.")) in LAYERS[name]:
            observer(chunk, source)

    start = time.perf_counter()
    sweep = cv.sweep(
        *(exhibit.model, exhibit.loss, [exhibit.batch], blocks),
        samples=SAMPLES,
        seed=SEED,
        micro_batch=1,
        observe=observe,
    )
    found = _facts(observer.table(), sweep, blocks)
    return found | {"loss": sweep.loss, "samples": SAMPLES, "seconds": round(time.perf_counter() - start)}


def linear(blocks: cv.Blocks) -> cv.Blocks:
    """The weights of the linear layers."""
    return cv.Blocks(block for name, block in blocks.items() if name.endswith(tuple(f".{role}" for role in LINEAR)))


def _facts(table: AuditTable, H: Any, blocks: cv.Blocks) -> Facts:
    """Rows: error, error at the best scale, each with its standard error, and floats; what is outside of blocks."""
    layers: dict[str, list[str]] = {}
    for name in blocks.names:
        where = layer_and_role(name)
        layers.setdefault(name if where is None else where[0], []).append(name)
    outside = {"weights": _estimate(cv.analysis.block_diagonal_error(H, blocks.names))}
    if len(layers) > 1:
        outside["layers"] = _estimate(cv.analysis.block_diagonal_error(H, list(layers.values())))
    rows = [
        [row.block, row.approximation, *_estimate(row.error), *_estimate(row.best_scale_error), row.floats]
        for row in table
    ]
    return {"outside": outside, "sizes": {name: blocks.sizes[name] for name in table.blocks}, "rows": rows}


def _estimate(found: cv.Estimate) -> list[float]:
    """Value and standard error."""
    return [float(f"{number:.4g}") for number in (found.value, found.stderr)]


PARTS: dict[str, Callable[[], Facts]] = {
    "addition": addition,
    "training": training,
    "minilm": minilm,
    "smollm2": smollm2,
}


def main() -> None:
    """Run parts and store each when it is done."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or PARTS:
        known[name] = PARTS[name]()
        text = json.dumps(known, indent=1) + "\n"
        RESULTS.write_text(re.sub(r"\[[^][]*\]", lambda found: " ".join(found[0].split()), text))  # a line per row


if __name__ == "__main__":
    main()
