"""What is measured of every model of the gallery: the Gauss-Newton part by a sweep, functional parts in closed form."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import curvoscope as cv
from curvoscope.analysis import Ledger, recipes, sensitivity
from curvoscope.analysis.audit_table import AuditTable
from curvoscope.analysis.spectra import BlockSpectrum, spectra
from curvoscope.blocks import layer_and_role
from curvoscope.sweep import Sweep
from gallery.exhibit import SEED, Exhibit

TOLERANCE = 0.1  # of half of the norms, as `curvoscope analyze` has it
ROWS = 1  # sequences of a micro-batch: each sample passes through one
SPECTRUM_ROWS = 4  # of a micro-batch: products take less memory
BARE_SAMPLES = 64  # of a model without norms
PRODUCTS = 16  # for a functional part without a closed form
GROUP = 32  # weights that share a scale in int4
ATTENTION, STATE_SPACE = ("attn.Q", "attn.K", "attn.V"), ("mixer.C", "mixer.B", "mixer.in")
LINEAR = (
    *("attn.Q", "attn.K", "attn.V", "attn.O", "mlp.up", "mlp.gate", "mlp.down"),
    *("mixer.in", "mixer.gate", "mixer.B", "mixer.C", "mixer.out"),
)
APPROXIMATIONS = ("diagonal", "kfac", "ekfac", "shampoo", "kronecker:1")
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
            head: estimate(sweep.frobenius_norm(head))
            for name in mixing_blocks(sweep.names)
            for head in sweep.heads(name)
        },
        **parts_of(exhibit),
    }


def bare_facts(exhibit: Exhibit) -> Facts:
    """Norms of the blocks that mix tokens, of a model without norms."""
    sweep = _some_swept(exhibit, mixing_blocks(exhibit.blocks.names), BARE_SAMPLES)
    norms = {name: {"norm": estimate(sweep.frobenius_norm(name))} for name in sweep.names}
    return {"loss": sweep.loss, "samples": sweep.samples, "blocks": norms}


def mixing_blocks(names: Sequence[str]) -> list[str]:
    """The query, key and value weights of all layers, or what a state space has in their place."""
    return [name for name in names if (at := layer_and_role(name)) is not None and at[1] in (*ATTENTION, *STATE_SPACE)]


def parts_of(exhibit: Exhibit) -> Facts:
    """|H_f|_F of these blocks: exact and split at the output of their layer if there is a closed form, otherwise (and
    not for `in`) estimated and split at the model's output. |H_o|_F at the layer's split as well, if it is exact."""
    names = mixing_blocks(exhibit.blocks.names)
    chosen = cv.Blocks(exhibit.blocks[name] for name in names)
    H = cv.hessian(exhibit.model, exhibit.loss, [exhibit.batch], chosen, split="layer")
    if any(H.method_of(name, "outer") == "exact" for name in names):  # a small model: exact also if it takes longer
        H = cv.hessian(exhibit.model, exhibit.loss, [exhibit.batch], chosen, split="layer", method="exact")
    functional, outer = (
        {name: estimate(part[name].frobenius_norm()) for name in names if H.method_of(name, kind) == "exact"}
        for kind, part in (("functional", H.functional), ("outer", H.outer))
    )
    if functional:
        return {"split": "layer", "functional": functional, "outer": outer}
    H = cv.hessian(exhibit.model, exhibit.loss, [exhibit.batch], chosen, method="autodiff")
    mixing = [name for name in names if not name.endswith(STATE_SPACE[-1])]
    found = {name: estimate(H.functional[name].frobenius_norm(matvecs=PRODUCTS, seed=SEED)) for name in mixing}
    return {"split": "model", "functional": found, "outer": {}}


# ---- of the trained weights alone


def found_spectra(exhibit: Exhibit, chosen: Sequence[str], matvecs: int) -> list[BlockSpectrum]:
    """Of the total of some blocks."""
    blocks = exhibit.blocks.select(*chosen)
    H = cv.hessian(exhibit.model, exhibit.loss, [exhibit.batch], blocks, micro_batch=SPECTRUM_ROWS)
    return list(spectra(H, matvecs, SEED))


def spectrum_facts(found: Sequence[BlockSpectrum]) -> Facts:
    """Of each block: its ends, and how many eigenvalues are negative or not told from zero."""
    return {
        one.block: {
            "size": one.size,
            "products": one.density.matvecs,
            "largest": estimate(one.largest),
            "smallest": estimate(one.smallest),
            "negative": estimate(one.negative),
            "near_zero": estimate(one.near_zero),
            "below": one.log.reach,
        }
        for one in found
    }


def audited(exhibit: Exhibit, chosen: Sequence[str], samples: int) -> AuditTable:
    """Approximations of some blocks, from samples of a sweep that keeps them."""
    return cv.analysis.audit(_some_swept(exhibit, chosen, samples, keep=chosen), list(chosen), APPROXIMATIONS)


def _some_swept(exhibit: Exhibit, names: Sequence[str], samples: int, keep: Sequence[str] = ()) -> Sweep:
    """Some blocks alone, with a fixed number of samples."""
    blocks = cv.Blocks(exhibit.blocks[name] for name in names)
    data = [exhibit.batch]
    return cv.sweep(exhibit.model, exhibit.loss, data, blocks, samples=samples, seed=SEED, micro_batch=ROWS, keep=keep)


def audit_facts(table: AuditTable) -> Facts:
    """The error at the best scale of each approximation of each block."""
    return {
        block: {row.approximation: estimate(row.best_scale_error) for row in table if row.block == block}
        for block in table.blocks
    }


def ledger_of(exhibit: Exhibit) -> Ledger:
    """What int4 costs in the linear weights of the layers."""
    names = [name for name in exhibit.blocks if (at := layer_and_role(name)) is not None and at[1] in LINEAR]
    change = partial(recipes.int4, group=GROUP, names=names)
    blocks = cv.Blocks(exhibit.blocks[name] for name in names)
    return sensitivity(exhibit.model, exhibit.loss, [exhibit.batch], change, pairs=False, blocks=blocks)


def ledger_facts(ledger: Ledger) -> Facts:
    """The whole, and each tensor."""
    whole = {key: estimate(getattr(ledger, key)) for key in ("predicted", "measured", "remainder")}
    return whole | {
        "group": GROUP,
        "tensors": {
            row.block: {"relative": row.relative}
            | {key: estimate(getattr(row, key)) for key in ("first", "outer", "functional", "second")}
            for row in ledger.rows
        },
    }


def _numbers(sweep: Sweep, name: str) -> Facts:
    return {
        "shape": list(sweep.blocks[name].shape),
        "norm": estimate(sweep.frobenius_norm(name)),
        "trace": estimate(sweep.trace(name)),
        "effective_rank": estimate(sweep.effective_rank(name)),
    }


def estimate(found: cv.Estimate) -> Facts:
    """Value, standard error and the ends of the 95 % interval."""
    low, high = found.interval()
    return {"value": float(found), "stderr": found.stderr, "low": low, "high": high}


def parameters(model: torch.nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters())
