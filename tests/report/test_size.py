"""A model of twelve layers: every page stays below 5 MB."""

import dataclasses
import json

import pytest
import torch

from curvoscope.analysis.attention_heads import HeadMoments
from curvoscope.analysis.heterogeneity import PARTS
from curvoscope.analysis.measurements import Measurement
from curvoscope.analysis.pair_norms import PairNorm
from curvoscope.analysis.spectra import BlockSpectrum, distances
from curvoscope.commands.document import pictures
from curvoscope.estimate import Density, Estimate
from curvoscope.report import density_figures, head_figures
from curvoscope.report.block_figures import norm_figure
from curvoscope.report.contents import report_of
from curvoscope.report.heat_figures import pair_map

ROLES = ("norm1", "attn.Q", "attn.K", "attn.V", "attn.O", "norm2", "mlp.up", "mlp.down")
BLOCKS = [*(f"h.{layer}.{role}" for layer in range(12) for role in ROLES), "embed", "positions", "final_norm", "head"]
GENERATOR = torch.Generator().manual_seed(0)


def estimate():
    return Estimate(float(10 ** torch.randn((), generator=GENERATOR)), 0.1, 16, "random signs")


def facts(one):
    """A dataclass for JSON, its estimates with the keys that documents have."""
    plain = dataclasses.asdict(one)
    for key, value in plain.items():
        if isinstance(value, Estimate):
            plain[key] = {name: value.facts()[name] for name in ("value", "stderr", "matvecs", "method")}
    return plain


def common(kind):
    return {
        **{key: key for key in ("title", "question", "answer", "command")},
        **{"kind": kind, "about": [], "advice": [], "versions": {}, "seed": 0},
        "hessian": {
            "parameters": 124_000_000,
            **dict.fromkeys(("largest_eigenvalue", "smallest_eigenvalue"), facts_of_estimate()),
            "critical_learning_rate": None,
        },
    }


def facts_of_estimate():
    return {"value": 1.0, "stderr": 0.0, "matvecs": 1, "method": "exact"}


def size(document, files):
    page = report_of(json.dumps(document), files).html()
    assert page.count("<svg role") == len(files) // 2
    return len(page.encode())


@pytest.mark.slow
def test_blocks():
    rows = [
        Measurement(name, part, (2, 2), "autodiff", *(estimate() for _ in range(3)))
        for name in BLOCKS
        for part in PARTS
    ]
    pairs = [
        PairNorm(row, column, part, estimate())
        for place, column in enumerate(BLOCKS)
        for row in BLOCKS[:place]
        for part in PARTS
    ]
    heads = [HeadMoments(f"h.{i}.attn", j, *(estimate() for _ in range(4))) for i in range(12) for j in range(12)]
    files = pictures("norms", norm_figure(rows, "title")) | pictures("pairs", pair_map(rows, pairs, "title"))
    files |= pictures("heads", head_figures.head_figure(heads, head_figures.headline_of(heads)))
    document = common("analyze") | {
        "rounding": 0.0,
        "rows": [facts(one) for one in rows],
        "pairs": [facts(one) for one in pairs],
        "attention": [facts(one) for one in heads],
    }
    assert size(document, files) < 5e6


@pytest.mark.slow
def test_spectra():
    names = [name for name in BLOCKS if ".attn." in name or ".mlp." in name]
    found = []
    for name in names:
        density = Density.exact(torch.randn(64, generator=GENERATOR, dtype=torch.float64) ** 3)
        found.append(BlockSpectrum(name, 64, "exact", density, density.log_spectrum()))
    apart = distances(found)
    files = pictures("densities", density_figures.density_figure(found, "title"))
    files |= pictures("distances", density_figures.distance_figure(apart))
    one = facts_of_estimate()
    spectra = [
        {"block": name, "size": 64, "quantiles": {}, "near_zero": 0.0}
        | {f"{key}_eigenvalue": one for key in ("largest", "smallest")}
        | {f"{key}_share": one for key in ("negative", "near_zero")}
        for name in names
    ]
    known = {"names": names, "distance": apart.values.tolist(), "threshold": apart.threshold.tolist()}
    assert size(common("spectrum") | {"blocks": spectra, "jensen_shannon": known}, files) < 5e6
