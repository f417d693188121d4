"""`curvoscope analyze` of a large model: the Gauss-Newton part of all blocks by a sweep, shown as it is found."""

import io
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from curvoscope import commands
from curvoscope.blocks import Blocks, layer_and_role
from curvoscope.commands.document import as_estimate, common_facts, pictures, show_files, write_run
from curvoscope.commands.live_table import LiveTable
from curvoscope.commands.progress import duration
from curvoscope.commands.subject import Request, Subject, select
from curvoscope.curvature import hessian
from curvoscope.errors import RangeError
from curvoscope.estimate import Estimate
from curvoscope.report import answers
from curvoscope.report.sweep_figures import depth_profile, head_map, norm_map
from curvoscope.settings import current, settings
from curvoscope.sweep import Sweep, SweepPlan, sweep
from curvoscope.sweep.result import Grams

SWEPT = 2_000_000  # parameters, above which a sweep of the Gauss-Newton part takes the place of products
_SAMPLES = "samples.pt"
_ROWS = 1  # sequences of a micro-batch: each sample passes through one
_TOLERANCE = (
    0.1  # of half of the norms; a trained model has blocks with one dominant direction, which need many samples
)
_INTERRUPTED = "The run was interrupted: the same command continues it."
_PRODUCTS = 16  # for the largest eigenvalue of the whole Hessian
_GRADIENTS = 1.5  # time of a product, in gradients of one row each: rows that run together take less


def run(subject: Subject, request: Request, options: Any, out: Path, as_json: bool) -> None:
    """Print the model at once and each block when it is known; write figures, reports and table.json into `out`.

    Ctrl-C writes what is known by then. Samples of a run that ended early are kept in `out`, and continued.
    """
    chosen = select(subject.blocks, options.blocks)
    if options.matvecs is not None:
        raise RangeError(
            "matvecs",
            f"got {options.matvecs}, which applies to products only, and --parts outer is a sweep; give --tolerance, "
            "or --parts all",
        )
    for name, known in (("split", "model"), ("method", "auto")):
        if getattr(options, name) != known:
            raise RangeError(
                name, f"got {getattr(options, name)}, which --parts outer does not have: it is a sweep; use --parts all"
            )
    commands.make_directory(out)
    console = Console(quiet=True) if as_json else commands.console()
    for line in subject.about:
        console.print(Text(line), soft_wrap=True)
    number = "1 block" if len(chosen) == 1 else f"{len(chosen)} blocks"
    console.print(f"{number}; Gauss-Newton part by sampled backward passes, one row of the batch each.")
    kept = _Kept(out, chosen, [*subject.about, str(request.seed)])
    tolerance, largest, ended = options.tolerance or _TOLERANCE, None, True
    try:
        products = 0 if options.fast else _PRODUCTS
        found: Sweep | None = shown_sweep(subject, chosen, tolerance, request.seed, console, kept, products)
        if not options.fast:
            largest = _largest(subject, request)
    except KeyboardInterrupt:
        found, ended = kept.last, False
        if found is None or not found.names:
            raise
    assert found is not None
    missing = [
        "The functional part and the total: --parts all measures them, by products with the Hessian.",
    ]
    if not ended:
        missing.append(_INTERRUPTED)
    if largest is None:
        missing.append("The largest eigenvalue of the whole Hessian: left out.")
    figures = _draw(found)
    facts = common_facts("sweep", subject, request, options, found.loss) | _facts(request.name, found, largest, missing)
    facts["command"] = facts["command"].replace("curvoscope sweep", "curvoscope analyze", 1)
    document = write_run(out, "table.json", facts, figures)
    if ended:
        kept.remove()
    if as_json:
        print(document, end="")
        return
    console.print(found.table(largest_first=True))
    console.print(facts["answer"] + "\n", soft_wrap=True)
    show_files(out, figures, "table.json")
    if not ended:
        console.print(_INTERRUPTED)


def shown_sweep(
    subject: Subject,
    chosen: Blocks,
    tolerance: float,
    seed: int,
    console: Console,
    kept: "_Kept | None" = None,
    products: int = 0,
) -> Sweep:
    """A sweep that is shown as it proceeds, with its plan first, and whose complete chunks are kept.

    `products`: with the whole Hessian, which will follow.
    """
    with LiveTable(console, len(chosen.per_head()), tolerance) as live:

        def tell(so_far: Sweep) -> None:
            if kept is not None:
                kept.keep(so_far, so_far.chunks[:-1])
            live.take(so_far)

        with settings(progress=current().progress and not live.draws):  # the table has a bar of its own
            found = sweep(
                subject.model,
                subject.loss,
                [subject.batch],
                chosen,
                tolerance=tolerance,
                seed=seed,
                micro_batch=_ROWS,
                earlier=None if kept is None else kept.last,
                tell=tell,
                keep=(),
                plan=lambda plan: console.print(_prediction(plan, products), soft_wrap=True),
            )
    if kept is not None:
        kept.keep(found, found.chunks)
    return found


def _prediction(plan: SweepPlan, products: int) -> str:
    """How long the samples of a sweep will take, and the products after it."""
    samples = str(plan.most) if plan.fewest == plan.most else f"{plan.fewest} to {plan.most}"
    said = f"Plan: {samples} samples, about {duration(*plan.seconds)}" if plan.most else "Plan: no more samples"
    if products:
        seconds = products * _GRADIENTS * plan.gradient * plan.batches
        said += f"; then the largest eigenvalue of the whole Hessian, about {duration(seconds)}"
    return f"{said}. (Predicted from one gradient of one row, which took {plan.gradient:.2g} s.)\n"


class _Kept:
    """The samples of a run that has not ended, in a file of its directory."""

    def __init__(self, out: Path, blocks: Blocks, about: list[str]) -> None:
        self._path, self._blocks, self._about = out / _SAMPLES, blocks, about
        self._chunks = 0
        self.last = self._read()

    def _read(self) -> Sweep | None:
        if not self._path.exists():
            return None
        try:
            held = torch.load(self._path, weights_only=True)
            about, loss, chunks = held["about"], held["loss"], held["chunks"]
        except Exception:  # torch raises a dozen kinds for a file that is not whole; then there is nothing to continue
            return None
        if about != self._about or not chunks or set(self._blocks.per_head()) != set(chunks[0]):
            return None
        self._chunks = len(chunks)
        return Sweep(self._blocks, chunks, loss)

    def keep(self, so_far: Sweep, complete: list[Grams]) -> None:
        """Write the chunks that are complete, if there are new ones."""
        self.last = so_far
        if len(complete) > self._chunks:
            held = io.BytesIO()
            kept = [dict(chunk) for chunk in complete]
            torch.save({"about": self._about, "loss": so_far.loss, "chunks": kept}, held)
            commands.write(self._path, held.getvalue())
            self._chunks = len(complete)

    def remove(self) -> None:
        """The run has ended."""
        self._path.unlink(missing_ok=True)


def _largest(subject: Subject, request: Request) -> Estimate:
    """The largest eigenvalue of the whole Hessian, by a few products."""
    whole = hessian(subject.model, subject.loss, [subject.batch], method="autodiff")
    return whole.total.eigenvalues(1, "LA", matvecs=_PRODUCTS, seed=request.seed)[0]


def _heads(found: Sweep) -> list[tuple[str, str]]:
    """The heads of all blocks, with their blocks."""
    return [(name, head) for name in found.names if len(found.heads(name)) > 1 for head in found.heads(name)]


def _draw(found: Sweep) -> dict[str, bytes]:
    title = answers.largest_block([(name, float(found.frobenius_norm(name))) for name in found.names])
    figures = {"sweep_pairs": norm_map(found, title)}
    if len({where[0] for name in found.names if (where := layer_and_role(name)) is not None}) > 1:
        figures["sweep_depth"] = depth_profile(found)
    if _heads(found):
        figures["sweep_heads"] = head_map(found)
    return {name: content for key, figure in figures.items() for name, content in pictures(key, figure).items()}


def row_facts(found: Sweep) -> list[dict[str, Any]]:
    """The table for JSON, in the order of the model."""
    return [{"block": key, "shape": list(found.blocks[key].shape)} | _numbers(found, key) for key in found.names]


def _numbers(found: Sweep, key: str) -> dict[str, Any]:
    bracket = found.largest_eigenvalue(key)
    return {
        "frobenius_norm": as_estimate(found.frobenius_norm(key)),
        "trace": as_estimate(found.trace(key)),
        "effective_rank": as_estimate(found.effective_rank(key)),
        "largest_eigenvalue": {"lower": as_estimate(bracket.lower), "upper": as_estimate(bracket.upper)},
    }


def _facts(name: str, found: Sweep, largest: Estimate | None, missing: list[str]) -> dict[str, Any]:
    """table.json: what was measured, and what it shows."""

    norms = found.norms()
    return {
        **answers.of_sweep(name, found, largest),
        "samples": found.samples,
        "rows": row_facts(found),
        "heads": [{"block": key, "head": head} | _numbers(found, head) for key, head in _heads(found)],
        "pairs": {"names": norms.names, "frobenius_norm": norms.value.tolist(), "stderr": norms.stderr.tolist()},
        "hessian": None if largest is None else {"largest_eigenvalue": as_estimate(largest)},
        "missing": missing,
    }
