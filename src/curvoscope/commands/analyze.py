"""`curvoscope analyze`: the exact Hessian of the paper's single-block GPT-2, all of its layers."""

import dataclasses
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from curvoscope import __version__, checks, commands, data
from curvoscope.analysis import PARTS, BlockRow, block_rows, headline, verdict
from curvoscope.commands.document import REPORTS, write_run
from curvoscope.models import GPT2
from curvoscope.operators import BlockHessian
from curvoscope.report import answers, figures, tables
from curvoscope.report.heat_figures import pair_map

_DTYPES = {"float64": torch.float64, "float32": torch.float32}
_FIGURES = {
    "heat_map.png": lambda H, rows: pair_map(rows, "Norms of the Hessian's blocks"),
    "hessian.png": lambda H, rows: figures.hessian_figure(H, headline(rows)),
    "histograms.png": lambda H, rows: figures.histogram_figure(H, headline(rows)),
}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What decides the numbers. The names are those of the options."""

    seed: int
    d: int
    sequences: int
    norm: str
    attention: str
    dtype: str


def run(configuration: Configuration, out: Path, as_json: bool) -> None:
    """Measure every block, print the table and what it shows; write figures, reports and table.json into `out`."""
    size = 12 * configuration.d**2
    # The picture of the Hessian and what Matplotlib makes of it; the rest is done a block at a time.
    checks.fits(16 * size**2, None, f"the picture of a {size} x {size} Hessian", "take a smaller --d")
    commands.make_directory(out)
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("the exact Hessian", total=None)
        H = _hessian(configuration)
        blocks = len(H.names)
        steps = len(PARTS) * blocks * (blocks + 1) // 2 + len(_FIGURES)
        progress.update(task, description="its blocks", total=steps)
        rows = []
        for row in block_rows(H):
            rows.append(row)
            progress.advance(task)
        progress.update(task, description="the figures")
        drawn = {}
        for name, draw in _FIGURES.items():
            drawn[name] = commands.png(draw(H, rows))
            progress.advance(task)
    document = write_run(out, "table.json", _facts(rows, configuration), drawn)
    if as_json:
        print(document, end="")
    else:
        _show(rows, configuration)
        for name in (*_FIGURES, *REPORTS, "table.json"):
            print(f"wrote {out / name}")


def _hessian(configuration: Configuration) -> BlockHessian:
    """The exact Hessian of the loss on one batch of additions, over the block's weights (attention's biases apart) and
    the final norm."""
    tokens = data.addition(configuration.sequences, seed=configuration.seed)
    inputs, targets = tokens[:, :-1], data.answer_targets(tokens)
    model = GPT2(
        configuration.d,
        norm=configuration.norm,
        activation=configuration.attention,
        seed=configuration.seed,
        dtype=_DTYPES[configuration.dtype],
    )
    with torch.no_grad():
        X = model.residual_stream(inputs, 0)
    return model.stack().hessian(X, model.exact_loss(targets))


def _facts(rows: list[BlockRow], configuration: Configuration) -> dict[str, Any]:
    """table.json: what was measured, on what, what it shows, and how to measure it again."""
    options = dataclasses.asdict(configuration)
    return {
        "kind": "analyze",
        "title": "Curvature of a GPT-2 of one block",
        "about": [_about(configuration)],
        "configuration": options,
        "command": " ".join(["curvoscope analyze", *(f"--{name} {value}" for name, value in options.items())]),
        "versions": {
            "curvoscope": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "seed": configuration.seed,
        "verdict": verdict(rows),
        **answers.of_pairs(rows),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _about(configuration: Configuration) -> str:
    return (
        f"Exact Hessian of the Transformer block in a GPT-2 of one block: d = {configuration.d}, norm "
        f"{configuration.norm}, {configuration.attention} attention, {configuration.sequences} five-digit "
        f"additions, seed {configuration.seed}, {configuration.dtype}. Outer and functional part are split "
        "at the model's output."
    )


def _show(rows: list[BlockRow], configuration: Configuration) -> None:
    console = Console(highlight=False)
    console.print(_about(configuration) + "\n")
    console.print(tables.diagonal_table(rows))
    console.print(tables.off_diagonal_table(rows))
    console.print(verdict(rows) + "\n")
