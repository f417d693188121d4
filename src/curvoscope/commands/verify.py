"""`curvoscope verify`: every theorem against automatic differentiation, as a table or as JSON."""

import json
import math
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from curvoscope.commands.progress import counted
from curvoscope.papers.theorems import Result
from curvoscope.papers.theorems.registry import TheoremStatus
from curvoscope.papers.theorems.verify import examine, names
from curvoscope.versions import versions

_TABLE_WIDTH = 160
"""Columns of the table if there is no terminal to ask."""


def run(seed: int, as_json: bool) -> int:
    """Check all results and show them; return the exit code, 1 if any verdict does not hold.

    The progress bar goes to stderr, and only to a terminal. With `as_json` one JSON document goes to stdout and
    nothing else does.
    """
    torch.set_num_threads(1)  # the problems are tiny: threads cost more than they save
    results = _examine(seed)
    if as_json:
        print(json.dumps(_document(results, seed), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        _show(results, seed)
    return 0 if all(result.holds for result in results) else 1


def _examine(seed: int) -> list[Result]:
    results, expected = [], names()
    with counted() as progress:
        task = progress.add_task(expected[0], total=len(expected))
        for following, result in zip([*expected[1:], "done"], examine(seed), strict=True):
            results.append(result)
            progress.update(task, advance=1, description=following)
    return results


def _document(results: list[Result], seed: int) -> dict[str, Any]:
    return {
        "results": [
            {
                "name": result.name,
                "source": result.source,
                "verdict": result.verdict,
                "holds": result.holds,
                # JSON has no NaN and no infinity; `holds` is false there.
                "error": result.error if math.isfinite(result.error) else None,
                "tolerance": result.tolerance,
                "note": result.note,
            }
            for result in results
        ],
        "holds": all(result.holds for result in results),
        "seed": seed,
        "versions": versions(),
    }


def _show(results: list[Result], seed: int) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    table = Table(title=f"Theorems against automatic differentiation in float64, seed {seed}")
    table.add_column("result", min_width=24)
    table.add_column("source", no_wrap=True)
    table.add_column("verdict", min_width=16)
    table.add_column("largest relative error", justify="right", max_width=14)
    table.add_column("note", overflow="fold")
    for result in results:
        verdict = result.verdict if result.holds else f"FAILS (expected: {result.verdict})"
        style = "" if result.holds else "bold red"
        cells = (result.name, result.source, verdict, f"{result.error:.1e}", result.note)
        # As Text: in a plain string rich would take the brackets of an index for markup, and drop them.
        table.add_row(*map(Text, cells), style=style)
    console.print(table)
    console.print(Text(_summary(results)))


def _summary(results: list[Result]) -> str:
    failed = [result.name for result in results if not result.holds]
    wording: dict[TheoremStatus, str] = {
        "holds as printed": "hold as printed",
        "holds corrected": "hold corrected",
        "false": "are false",
    }
    tally = Counter(result.verdict for result in results if result.holds)
    counts = ", ".join(f"{tally[verdict]} {words}" for verdict, words in wording.items() if tally[verdict])
    if failed:
        return f"{len(results)} results: {counts}; {len(failed)} FAIL: {'; '.join(failed)}"
    return f"{len(results)} results: {counts}"
