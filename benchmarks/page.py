"""`python -m benchmarks.page RESULTS.json`: the results of one run as a page, docs/benchmarks.md, on stdout.

Every number of the page is taken from the results. What a run did not measure, or failed to, has no row.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INTRODUCTION = """# Benchmarks

One run of `make bench`, which also writes this page: {versions}.
What is compared is measured in turns in one process, with one thread or two, on two cores; ratios travel, seconds
belong to the machine. Where a peer or the limit is better than ours, the number is **bold**.
"""

Row = tuple[str, str, str]


def faster(ratio: float) -> str:
    """A ratio of their time to ours."""
    return f"{ratio:.3g} times faster" if ratio >= 1 else f"**{1 / ratio:.3g} times slower**"


def closed_forms(found: dict[str, Any]) -> Iterator[Row]:
    """One attention layer, and one block."""
    attention, block = found.get("exact_attention", {}), found.get("full_block", {})
    if dense := attention.get("dense, N=64 L=17 d=16"):
        what = "nine dense blocks of an attention layer, N = 64, L = 17, d = 16"
        yield what, "torch.func.hessian", faster(dense["times_faster_than_torch_func_hessian"])
        if "times_faster_than_curvlinops" in dense:
            yield what, "curvlinops", faster(dense["times_faster_than_curvlinops"])
    if dense := attention.get("dense, N=4 L=32 d=32"):
        written = f"{dense['times_a_memory_write']:.3g} times its time"
        yield "nine dense blocks, N = 4, L = 32, d = 32", "a write of the result to memory", written
    for key, inputs in (("norms, N=64 L=17 d=128", "addition model"), ("norms, Gaussian inputs", "Gaussian inputs")):
        if norms := attention.get(key):
            products = f"Hutchinson to 1 %, {norms['hutchinson_products']} products"
            yield (
                f"six exact norms, N = 64, L = 17, d = 128, {inputs}",
                products,
                faster(norms["times_faster_than_hutchinson"]),
            )
    for key, value in block.items():
        if "times_faster_than_torch_func_hessian" in value:
            yield f"dense Hessian, {key}", "torch.func.hessian", faster(value["times_faster_than_torch_func_hessian"])
    if reach := block.get("largest in 16 GiB"):
        widths = {name: one["largest_d_in_16_gib_extrapolated"] for name, one in reach.items()}
        what, peer = "largest d of a block, N = 16, L = 17, in 16 GiB (extrapolated)", "torch.func.hessian"
        yield what, f"{peer}: {widths[peer]}", str(widths["ours"])
    for key, layer in attention.get("one GPT-2 layer, float32", {}).items():
        seconds = layer["seconds"]
        traces, norms = (seconds[f"{name}, whole"] for name in ("traces of Q, K, V, O", "norms of Q, V, O"))
        unit = seconds["one product, Q, K, V, O"]
        cost = f"traces {traces / unit:.3g}, norms {norms / unit:.3g} products; peak {layer['peak_gib']:.3g} GiB"
        yield f"exact traces and norms of a GPT-2 layer, {key}", f"a closed-form product, {unit:.2g} s", cost


def products(found: dict[str, Any]) -> Iterator[Row]:
    """Any model, matrix-free."""
    names = {"HuggingFaceGPT2": "Hugging Face's GPT-2", "PlainGPT2": "GPT-2 of torch's layers"}
    matrix_free = found.get("matrix_free", {})
    limits = matrix_free.get("limits_gradients_a_vector", {})
    for kind, name in names.items():
        one = matrix_free.get(kind, {})
        for what, gradients in one.get("gradients_a_vector", {}).items():
            limit = limits.get(what)
            against = "a gradient" if limit is None else f"a gradient (aim: {limit})"
            text = f"{gradients:.3g} gradients"
            yield f"{name}: {what}, a vector", against, f"**{text}**" if limit and gradients > limit else text
        for pair, ratio in one.get("times_faster", {}).items():
            what, peer = pair.split(" than ")
            yield f"{name}: {what}", peer, faster(ratio)
        memory = {what: row["above_the_model_gib"] for what, row in one.get("memory", {}).items() if row}
        for what in ("hessian", "ggn"):
            for peer, gib in memory.items():
                if peer.endswith(what) and peer != what and what in memory:
                    text = f"{memory[what]:.2f} GiB"
                    text = f"**{text}**" if memory[what] > gib else text
                    yield f"{name}: {what}, memory above the model", f"{peer}: {gib:.2f} GiB", text
    small = found.get("gpt2_small", {})
    if "lambda_max" in small:
        largest = small["lambda_max"]
        error = 100 * largest["stderr"] / largest["value"]
        yield (
            f"GPT-2 small, λ_max to {error:.2g} %, {largest['products']} products",
            f"{small['limit_gib']} GiB",
            f"{small['lambda_max_seconds']:.0f} s, peak {small['peak_gib']:.3g} GiB",
        )
        yield (
            f"GPT-2 small, {small['blocks']} block norms to {100 * small['largest_relative_error_of_a_norm']:.2g} %",
            f"{small['products_for_the_norms']} products",
            f"{small['norms_seconds'] / 60:.2g} minutes",
        )


def beyond(found: dict[str, Any]) -> Iterator[Row]:
    """Long sequences and several ranks."""
    long = found.get("long_sequences", {})
    for name, one in long.get("L=1024", {}).items():
        yield (
            f"product through attention, L = 1,024, {name}",
            "torch's mathematical kernel",
            faster(one["times_faster_than_math"]),
        )
    if growth := long.get("growth"):
        lengths = [int(L) for L in growth["ours"]]
        theirs = f"torch's mathematical kernel: L^{growth['memory_exponent_math']:.2f}"
        what = f"memory of that product, L = {lengths[0]:,} to {lengths[-1]:,}"
        yield what, theirs, f"L^{growth['memory_exponent_ours']:.2f}, {_mib(growth, lengths[-1])} at the end"
    for row in found.get("distributed", {}).get("ranks", [])[1:]:
        cores = found["distributed"]["cores"]
        text = f"efficiency {row['efficiency']:.2f}, {row['of_cores']:.2f} of the cores"
        yield f"data-parallel product, {row['ranks']} ranks on {cores} cores", "one rank", text
    shards = found.get("sharded", {})
    for row in shards.get("ranks", [])[1:]:
        unsharded = f"not sharded: {shards['unsharded_gib']:.2f} GiB"
        yield f"FSDP2, {row['ranks']} ranks, memory of a rank", unsharded, f"{row['gib']:.2f} GiB"


def _mib(growth: dict[str, Any], length: int) -> str:
    return f"{growth['ours'][str(length)]['peak_mib']:.0f} MiB"


def people(found: dict[str, Any]) -> Iterator[Row]:
    """What is used by hand: the monitor, the explorer, the figures."""
    for budget, one in found.get("monitor", {}).items():
        share = f"{100 * one['share_by_comparison']:.1f} % of the training time, {one['measurements']} measurements"
        yield "the monitor in a minute of training", budget, share
    explorer = found.get("explorer", {})
    if "median_ms" in explorer:
        for which, key in (("first", "first_figure_"), ("last", "")):
            text = f"median {explorer[f'{key}median_ms']:.0f} ms, 95th percentile {explorer[f'{key}p95_ms']:.0f} ms"
            yield f"the explorer, a slider's move at d = 16, L = 17, to the {which} figure drawn", "200 ms", text
        requests = (
            f"{explorer['storm_requests']} requests, settled {explorer['storm_settled_ms']:.0f} ms after the last"
        )
        yield f"a storm of {explorer['storm_moves']} moves", "one state at a time", requests
    for point, one in found.get("reproduce", {}).items():
        yield f"fig3a, {point}", "20 samples through curvlinops", faster(one["ratio"])


def growths(found: dict[str, Any]) -> Iterator[Row]:
    """Exponents along each size."""
    titles = {"product": "a product with the Hessian of a GPT-2", "layer": "exact norms of an attention layer"}
    for subject, axes in found.get("growth", {}).items():
        for axis, one in axes.items():
            sizes = list(one["rows"])
            yield (
                f"{titles[subject]}: {axis} {sizes[0]} to {sizes[-1]}",
                f"n^{one['time_exponent']:.2f}",
                f"n^{one['memory_exponent']:.2f}",
            )


SECTIONS = (
    ("Closed forms", ("what", "against", "ours"), closed_forms),
    ("Products and estimates of any model", ("what", "against", "ours"), products),
    ("Long sequences and several ranks", ("what", "against", "ours"), beyond),
    ("The monitor, the explorer, the figures", ("what", "against", "ours"), people),
    ("How cost grows", ("what", "time", "memory"), growths),
)
_SIZES = """Models of the second table have 4 layers, d = 256, L = 128 and batch 4 in float32; a run has 50 products and
shares the cost of its set-up among them. How cost grows is discussed in [a page of its own](scaling.md)."""


def page(found: dict[str, Any]) -> str:
    """Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    parts = [_INTRODUCTION.format(versions=versions)]
    for title, head, rows in SECTIONS:
        if lines := [f"| {' | '.join(row)} |" for row in rows(found)]:
            parts.append("\n".join([f"## {title}\n", f"| {' | '.join(head)} |", "| --- | --- | --- |", *lines, ""]))
    return "\n".join([*parts, _SIZES, ""])


if __name__ == "__main__":
    print(page(json.loads(Path(sys.argv[1]).read_text())), end="")
