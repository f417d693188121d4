"""`python -m benchmarks.page RESULTS.json`: print the results as a page, docs/benchmarks.md.

Every number of the page is taken from the results. Benchmarks that did not run or failed have no row.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.reasons import reason
from benchmarks.tables import MODELS, Row

_INTRODUCTION = """# Benchmarks

`make bench` runs the benchmarks and writes this page. A section says so if it comes from a later run of its benchmark
alone (`python -m benchmarks NAME`). Measured on {cores} cores with {versions}.
Compared programs run alternately in one process, with one or two threads. Ratios carry over to other machines, but
seconds do not. A number is **bold** if another package is faster or takes less memory, or if we miss our own aim; the
reason is below the table.
"""
_CLOSED_FORMS = """All methods use float64 and give the same matrix, up to rounding. The cost of exact norms hardly
depends on the data. Hutchinson's estimate needs few products if the blocks are close to multiples of the identity, as
with Gaussian inputs; then an estimate to 1 % can be faster than the exact norms, and a less accurate one is. If the
tokens are few, the time of dense blocks consists of their products (0.9 of the time of a write), the copies to both
sides of the diagonal (0.55), the symmetric halves (0.15) and the check for finite entries (0.1). The times of dense
blocks, dense Hessians and keys are processor times of one thread. Behind rotary positions no two keys share a rotated
query: the exact norm takes 2 L³ d_k multiplications per head instead of L³, and 32 products take only L², so the
advantage of the exact norm shrinks as the length grows."""
_ONE_LAYER = """One causal attention layer in float32 with heads of width 64, N = 1. The first column is the time of a
closed-form product with Q, K, V and O together. The next columns are in units of this product: exact traces of Q, K, V
and O, exact norms of Q, V and O, both for whole weights and per head, and the norm of K estimated from 32 products. The
peak is that of the whole process."""
_FUNCTIONAL = """The functional part of every attention and feed-forward block of GPT-2 small (124 million parameters,
random weights, one sequence), exact, with `split="layer"`, in float32 with two threads. Times are in units of a
gradient of the same model; the second column has its seconds. *Passes*: the gradient at all layers, and the check that
the rebuilt layers give the model's outputs. The last row compares products and diagonal entries with autodiff in
float64."""
_SWEPT = """The Gauss-Newton part of every block of GPT-2 small (124 million parameters, random weights, one sequence of
128 tokens, float32, two threads) by `cv.sweep`. Products are timed on five blocks of different depths."""
_AUDITED = """Processor time of the audit of all linear blocks of two GPT-2s during their sweeps, random weights,
float32: a model with 6 layers of width 256, one sequence of 128 tokens, on one thread, and GPT-2 small, 6 sequences of
1,024 tokens, on two. The aim is twice the sweep. A sample's backward pass through a layer of width d takes 24 d²
operations per token. A product of its cotangents with a matrix as wide as the output of `mlp.up` takes 32 d² per token,
but at most 32 d³: with more tokens than inputs the gradients are formed first. Every approximation takes several such
products, and EKFAC and Shampoo with the power 1/4 also compute all eigenvectors. The aim is therefore met with
thousands of tokens, and missed with 128."""
_SOLVED = """Damped solves with Gauss-Newton blocks of GPT-2 small (124 million parameters, 128 tokens) and of a GPT-2
with 4 layers of width 256 and 5,000 words, random weights, float32, to a true relative residual of 1e-3. The damping is
a hundredth of the largest eigenvalue of the block. Times are processor times of one thread and cover everything: the
loss, the graph, the preconditioner and the certificate. The matrices of both packages agree to 1e-6 in float64. On the
smaller model curvlinops' CG runs to the same residual. On GPT-2 small, eight of its iterations are timed, and their
number is that of textbook CG with the same matrix. Ours returns the iterate with the smallest residual, which takes two
or three steps fewer; its times are those of the default, `auto`. An inverse of KFAC needs no product with the matrix,
leaves a residual of 0.39 or more, and costs 0.6 to 3.1 gradients of the model. If it costs less than three gradients,
nothing that needs a gradient can be three times faster. To reach the residual of the table, curvlinops' CG is run with
its KFAC inverse as preconditioner. `cv.hessian` runs the loss twice, to count its terms and to check that it is
deterministic; the same check of curvlinops is switched off."""
_INFLUENCE = """A Transformer block of width 16 learns to add numbers of one digit from 64 rows, in float64, and is
retrained on 32 random halves of them. The linear datamodeling score is Spearman's correlation between predicted and
measured losses over these halves, averaged over 24 test rows."""
_SEVERAL = """Processor time of one thread, small GPT-2s in float32. In small models the vectors share the overhead of
the calls. In larger ones each vector takes its own passes: once the graph is kept, every operation of a product depends
on the vector."""
_OVERHEADS = """The overhead of an estimate over its bare products, in processor time of one thread, in a separate run.
The model is that of the next section."""
_PRODUCTS = """The model has 4 layers, d = 256, L = 128, batch 4, 5,000 words, float32; two threads. The cost of the
set-up is spread over 50 products, of which 15 are timed. The natural limit is 2 gradients for the Hessian, because its
product computes each matrix product of a gradient twice, and 4/3 for its Gauss-Newton part. Memory is the peak above
the model, in a separate process. *Recomputed*: no graph is kept between products. *One block* is a query weight, which
curvlinops has only as part of a fused weight."""
_COMPILED = """`cv.hessian(..., compile=True)`, float32, one thread; processor times; compiled with an empty cache. The
last column is the number of products after which compiling pays off. curvlinops has compiled products on its main
branch since version 3.0.1; no release contains them, so they are not measured here."""
_PROFILED = """Operations of the model of the section above, by `torch.profiler` with two threads, in units of a
gradient profiled in the same way; 0.1.0 was measured in a separate run. The natural limit of a product is twice the
matrix products and the attention of a gradient (Hessian), or 4/3 of them (Gauss-Newton); matrix products reach about
that limit. The rest are operations on single entries, copies, views and Python: most are too short for two threads, and
count for less with one. The aims are 2.05 (Hessian) and 1.40 (Gauss-Newton). In the last row the process keeps freed
memory (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`). Otherwise the C library returns it to the system after a
product and requests it again, page by page, for the next one, which costs more on some machines than on others."""
_OTHER_CPU = """Ratios of other sections, each measured in two processes: with all instructions of this CPU, and with
those of AVX2 only (`ATEN_CPU_CAPABILITY=avx2`, and the same for MKL and oneDNN). Products with two threads."""
_LARGE = """A Llama in float32 with `recompute="layer"`, two threads; the peak is that of the whole process: weights,
vector, product and intermediate results."""
_ESTIMATES = """The packages are timed in turns, set-up included, after one untimed run of each, because the first use
of memory can take longer than the products. *Error* is the true error relative to a reference value, not the one that a
package reports. For traces it is the root mean square of 10 runs with 16 products each, known to 22 %; the mean of all
runs is the reference. For eigenvalues our answer to 1e-4 is the reference: PyHessian's power iteration stops when two
steps agree to 1e-3; ours is asked for the error that PyHessian turns out to have. Models without this measurement have
no such rows."""
_LONG = "One attention layer, 8 heads, d = 512, float32, two threads: forward pass, gradient and product."
_RANKS = """Gloo processes, one thread each. Every rank has its own batch, whose size does not depend on the number of
ranks: 1,024 rows, or two sequences of 128 tokens for GPT-2 small (random weights). Efficiency is the time of a product
in a single process divided by that in the group. Two processes on two cores also share the memory bandwidth, whatever
our code does: *of independent processes* compares with the same number of processes that compute the same products at
the same time without a group. The aims, for two ranks on two cores: 0.85 for GPT-2 small, and 0.7 for FSDP2, where one
rank may take 1.5 times as long as the model without shards. With 16 rows FSDP2 moves as many parameters as it computes
with. The first two rows of its memory determine a and b, the third tests them."""
_BY_HAND = """The monitor's share is processor time, compared with the same training without it. The explorer's browser
and server share the cores: a move of the sink takes the server 16 ms for the matrices, 27 ms for the eigenvalues of 768
rows and 18 ms for the growth curves, and the browser 10 to 25 ms per figure that it redraws."""
_GROWTH = """Each row varies one size; processor time of one thread. *Product*: with the Hessian of a GPT-2 in float32,
depth 4, d = 128 in heads of 32, N = 4 sequences of L = 128 tokens, one vector; the last column is its cost in gradients
of the same model. *Exact norms*: of both parts of Q, K, V and O of an attention layer in float64, N = 8, L = 32,
d = 64, 4 heads. Memory is the peak above the model or layer. [Scaling](scaling.md) extrapolates to larger models."""


FACTS = {"versions", "cores", "run_seconds"}  # of the run, not of a benchmark
ALONE = "in_a_run_of_its_own"


class Section(NamedTuple):
    """A table: its title, its introduction, its head, its rows in a run, and the benchmarks that they come from."""

    title: str
    about: str
    head: Row
    rows: Callable[[dict[str, Any]], Iterator[Row]]
    benchmarks: tuple[str, ...]


_SCORED = ("scores", "datamodeling score", "correlation with the exact scores")
_AGAINST = ("task", "compared with", "ours")
_BY = ("product", "by", "gradients per vector", "memory, GiB", "ours compared")
_PARTS = ("size", "gradient, s", "passes", "norms", "traces", "diagonals", "a product each", "peak, GiB")
_SPENT = ("operations", "gradient", "Hessian, 0.1.0", "Hessian", "Gauss-Newton, 0.1.0", "Gauss-Newton")
_FUSED = ("model", "eager", "compiled over eager", "compile time", "pays after")
_LAYER = ("size", "product, s", "traces", "norms", "traces per head", "norms per head", "norm of K", "peak, GiB")
_INSTRUCTIONS = ("task", "compared with", "all instructions", "AVX2 only")
_START_UP = "Processor time, user and system, of processes in turns; medians of seven."
SECTIONS = (
    Section("Closed forms", _CLOSED_FORMS, _AGAINST, tables.closed_forms, ("exact_attention", "full_block")),
    Section("One GPT-2 layer", _ONE_LAYER, _LAYER, tables.one_layer, ("exact_attention",)),
    Section("Functional parts of a whole GPT-2", _FUNCTIONAL, _PARTS, tables.functional, ("functional",)),
    Section("The whole model at once", _SWEPT, _AGAINST, tables.swept, ("sweep",)),
    Section("Approximations against the curvature", _AUDITED, _AGAINST, tables.audited, ("audit", "audit_large")),
    Section("Solving", _SOLVED, _AGAINST, tables.solved, ("solve",)),
    Section("Influence against retraining", _INFLUENCE, _SCORED, tables.influenced, ("influence",)),
    Section("The overhead of estimates", _OVERHEADS, _AGAINST, tables.overheads, ("overhead",)),
    Section("Several vectors", _SEVERAL, _AGAINST, tables.vectors_at_once, ("several_vectors",)),
    *(
        Section(f"Products: {name}", "" if i else _PRODUCTS, _BY, partial(tables.products, kind=kind), ("matrix_free",))
        for i, (kind, name) in enumerate(MODELS.items())
    ),
    Section("Where the time of a product goes", _PROFILED, _SPENT, tables.profiled, ("profile",)),
    Section("Compiled products", _COMPILED, _FUSED, tables.compiled, ("compiled",)),
    Section("A model of a billion parameters", _LARGE, _AGAINST, tables.large_product, ("large_product",)),
    Section("Estimates", _ESTIMATES, _AGAINST, tables.estimates, ("matrix_free", "gpt2_small")),
    Section("Long sequences", _LONG, _AGAINST, tables.long_sequences, ("long_sequences",)),
    Section("Several ranks", _RANKS, _AGAINST, tables.ranks, ("distributed", "sharded")),
    Section(
        "The monitor, the explorer, the figures",
        _BY_HAND,
        _AGAINST,
        tables.by_hand,
        ("monitor", "explorer", "reproduce"),
    ),
    Section("Start-up", _START_UP, _AGAINST, tables.started, ("start_up",)),
    Section("Without AVX-512", _OTHER_CPU, _INSTRUCTIONS, tables.other_cpu, ("other_cpu",)),
    Section("How cost grows", _GROWTH, ("task", "time", "memory", "cost"), tables.growths, ("growth",)),
)


def page(found: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    parts = [_INTRODUCTION.format(versions=versions, cores=found["cores"])]
    if failed := [name for name, one in found.items() if name not in FACTS and "fails" in one]:
        parts.append(f"Failed in this run, and not shown: {', '.join(failed)}.\n")
    parts += [_text(section, found) for section in SECTIONS]
    return "\n".join(part for part in parts if part)


def measured(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the benchmarks that did not fail."""
    runs = {name: one for name, one in found.items() if name not in FACTS and "fails" not in one}
    return {name: {key: value for key, value in one.items() if key != ALONE} for name, one in runs.items()}


def bold_rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """The title of the section, the row and its reason, for every row with a bold number."""
    for section in SECTIONS:
        for row in section.rows(measured(found)):
            if "**" in (line := " | ".join(row)):
                yield section.title, line, reason(section.title, line)


def _text(section: Section, found: dict[str, Any]) -> str:
    """A section as Markdown; empty if it has no row."""
    lines = [" | ".join(row) for row in section.rows(measured(found))]
    if not lines:
        return ""
    apart = [f"`{name}`" for name in section.benchmarks if found.get(name, {}).get(ALONE)]
    alone = f"Measured in a separate run: {', '.join(apart)}." if apart else ""
    paragraphs = [f"## {section.title}", *filter(None, (section.about, alone))]
    table = [" | ".join(section.head), " | ".join("---" for _ in section.head), *lines]
    paragraphs.append("\n".join(f"| {line} |" for line in table))
    reasons = dict.fromkeys(reason(section.title, line) for line in lines if "**" in line)
    if said := [f"- {sentence}" for sentence in reasons if sentence]:
        paragraphs.append("\n".join(["Reasons for the bold numbers:\n", *said]))
    return "\n\n".join(paragraphs) + "\n"


if __name__ == "__main__":
    results = json.loads(Path(sys.argv[1]).read_text())
    for title, line, why in bold_rows(results):
        if why is None:
            print(f"no reason in benchmarks/reasons.py for: {title}: {line}", file=sys.stderr)
    print(page(results), end="")
