"""What is measured of every model of the gallery: the Gauss-Newton part by a sweep, functional parts in closed form."""

from typing import Any

import torch

import curvoscope as cv
from curvoscope.blocks import layer_and_role
from curvoscope.sweep import Sweep
from gallery.models import SEED, Exhibit

TOLERANCE = 0.1  # of half of the norms, as `curvoscope analyze` has it
ROWS = 1  # sequences of a micro-batch: each sample passes through one
ROLES = ("Q", "K", "V")
Facts = dict[str, Any]


def swept(exhibit: Exhibit) -> Sweep:
    """The Gauss-Newton part of all blocks."""
    return cv.sweep(
        exhibit.model, exhibit.loss, [exhibit.batch], exhibit.blocks, TOLERANCE, seed=SEED, micro_batch=ROWS
    )


def facts_of(exhibit: Exhibit, sweep: Sweep) -> Facts:
    """Numbers of one set of weights for JSON."""
    return {
        "loss": sweep.loss,
        "samples": sweep.samples,
        "blocks": {name: _numbers(sweep, name) for name in sweep.names},
        "heads": {
            head: _estimate(sweep.frobenius_norm(head))
            for name in attention_blocks(sweep.names)
            if len(sweep.heads(name)) > 1
            for head in sweep.heads(name)
        },
        "functional": functional_norms(exhibit),
    }


def attention_blocks(names: list[str]) -> list[str]:
    """The query, key and value weights of all layers."""
    ends = tuple(f".attn.{role}" for role in ROLES)
    return [name for name in names if layer_and_role(name) is not None and name.endswith(ends)]


def functional_norms(exhibit: Exhibit) -> Facts:
    """|H_f|_F of the query, key and value blocks, split at the output of their layer, exact."""
    names = attention_blocks(exhibit.blocks.names)
    chosen = cv.Blocks(exhibit.blocks[name] for name in names)
    H = cv.hessian(exhibit.model, exhibit.loss, [exhibit.batch], chosen, split="layer")
    found = {}
    for name in names:
        if H.method_of(name, "functional") == "exact":
            found[name] = _estimate(H.functional[name].frobenius_norm())
    return found


def _numbers(sweep: Sweep, name: str) -> Facts:
    return {
        "shape": list(sweep.blocks[name].shape),
        "norm": _estimate(sweep.frobenius_norm(name)),
        "trace": _estimate(sweep.trace(name)),
        "effective_rank": _estimate(sweep.effective_rank(name)),
    }


def _estimate(found: cv.Estimate) -> Facts:
    low, high = found.interval()
    return {"value": float(found), "stderr": found.stderr, "low": low, "high": high}


def parameters(model: torch.nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters())
