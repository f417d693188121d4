"""`python -m benchmarks.page RESULTS.json`: the results of one run as a page, docs/benchmarks.md, on stdout.

Every number of the page is taken from the results. What a run did not measure, or failed to, has no row.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.tables import MODELS, Row

_INTRODUCTION = """# Benchmarks

One run of `make bench`, which also writes this page, on {cores} cores: {versions}.
What is compared is measured in turns in one process, with one thread or two; ratios travel, seconds belong to the
machine. Where a peer is faster or takes less memory, or an aim of ours is missed, the number is **bold**.
"""
_CLOSED_FORMS = """Float64; the result is the same matrix, to rounding. The cost of exact norms hardly depends on the
data. Hutchinson's estimate needs few products where the blocks are near multiples of the identity, as with Gaussian
inputs: there the two cost about the same, and less accuracy is cheaper by the estimate."""
_ONE_LAYER = """One causal attention layer in float32 with heads of width 64, N = 1. The first column is the time of a
product in closed form with Q, K, V and O together; the next ones are in such products: exact traces of Q, K, V and O,
exact norms of Q, V and O, both for whole weights and head by head, and the norm of K estimated from 32 products. The
peak is that of the whole process."""
_PRODUCTS = """4 layers, d = 256, L = 128, batch 4, 5,000 words, float32, two threads. A run has 50 products and
shares the cost of its set-up among them. The limit is one gradient: a product with the Hessian differentiates it once
more. Memory is the peak above the model, in a process of its own. *Recomputed*: no graph is kept between products.
*One block* is a query weight, which curvlinops has within a fused one only."""
_ESTIMATES = """Trace and eigenvalue are timed once, set-up included. PyHessian's power iteration stops where two
steps agree, ours where the residual is small."""
_LONG = "One attention layer, 8 heads, d = 512, float32, two threads: forward pass, gradient and product."
_RANKS = """Processes of gloo, one thread each. Efficiency is the time of one rank over that of all ranks times their
number; *of the cores* counts no more ranks than there are cores. Of FSDP2 the first two rows give a and b, the third
tests them."""
_BY_HAND = """The monitor's time is that of the processor, beside the same training without it. The explorer's browser
and server share the cores."""
_GROWTH = """One size moves in each row, with one thread. *Product*: with the Hessian of a GPT-2 in float32, depth 4,
d = 128 in heads of 32, N = 4 sequences of L = 128 tokens, one vector; beside it, its cost in gradients of the same
model. *Exact norms*: of both parts of Q, K, V and O of an attention layer in float64, N = 8, L = 32, d = 64, 4 heads.
Memory is the peak above the model or layer. [Scaling](scaling.md) says what follows for larger models."""


class Section(NamedTuple):
    """A table: its title, what its rows have in common, its head, and its rows in a run."""

    title: str
    about: str
    head: Row
    rows: Callable[[dict[str, Any]], Iterator[Row]]


_AGAINST = ("what", "against", "ours")
_BY = ("product", "by", "gradients a vector", "memory, GiB", "ours against it")
_LAYER = ("size", "product, s", "traces", "norms", "traces by head", "norms by head", "norm of K", "peak, GiB")
SECTIONS = (
    Section("Closed forms", _CLOSED_FORMS, _AGAINST, tables.closed_forms),
    Section("One GPT-2 layer", _ONE_LAYER, _LAYER, tables.one_layer),
    *(
        Section(f"Products: {name}", "" if i else _PRODUCTS, _BY, partial(tables.products, kind=kind))
        for i, (kind, name) in enumerate(MODELS.items())
    ),
    Section("Estimates", _ESTIMATES, _AGAINST, tables.estimates),
    Section("Long sequences", _LONG, _AGAINST, tables.long_sequences),
    Section("Several ranks", _RANKS, _AGAINST, tables.ranks),
    Section("The monitor, the explorer, the figures", _BY_HAND, _AGAINST, tables.by_hand),
    Section("How cost grows", _GROWTH, ("what", "time", "memory", "beside it"), tables.growths),
)


def page(found: dict[str, Any]) -> str:
    """Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    parts = [_INTRODUCTION.format(versions=versions, cores=found["cores"])]
    runs = {name: one for name, one in found.items() if name not in ("versions", "cores")}
    if failed := [name for name, one in runs.items() if "fails" in one]:
        parts.append(f"Failed in this run, and not shown: {', '.join(failed)}.\n")
    measured = {name: one for name, one in runs.items() if name not in failed}
    for section in SECTIONS:
        if lines := [f"| {' | '.join(row)} |" for row in section.rows(measured)]:
            about = f"{section.about}\n\n" if section.about else ""
            head = [f"| {' | '.join(section.head)} |", f"|{' --- |' * len(section.head)}"]
            parts.append("\n".join([f"## {section.title}\n\n{about}{head[0]}", head[1], *lines, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(json.loads(Path(sys.argv[1]).read_text())), end="")
