"""`python -m benchmarks.audit_page`: write docs/audit.md and its figures, from benchmarks/audit_study.json."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import curvoscope as cv
from benchmarks.audit_study import LAYERS, RESULTS, SHOWN, Facts
from curvoscope.analysis.audit_table import AuditRow, AuditTable
from curvoscope.report.audit_figures import depth_figure, error_figure, panels, role_of
from curvoscope.report.style import COLOURS, open_box

DOCS = Path(__file__).parents[1] / "docs"
_MODELS = {"smollm2": "SmolLM2-135M", "minilm": "MiniLM-L6"}
_SPLIT = ("kfac", "kronecker:1")
_BAD = 0.5  # of the block's norm
_INTRODUCTION = """# How good approximations of curvature are, measured

[The how-to page](howto/approximations.md) explains how to measure these numbers on your own model. `make audit` runs
`benchmarks/audit_study.py` and writes this page from its results, `benchmarks/audit_study.json`. Every error is
|H - sA| / |H| in the Frobenius norm for the best number s, where H is the Gauss-Newton part of a block and A its
approximation. ± is a standard error; numbers without it are exact.

- **Addition**: the paper's network at initialisation, one block of width 16, 64 additions; exact.
- **Training**: a GPT of two blocks of width 32 with norms, trained on addition with AdamW; exact, on four additions.
- **SmolLM2-135M-Instruct** (layers {smollm2} of 30; next token of two sequences of 64 tokens) and
  **all-MiniLM-L6-v2** (layers {minilm} of 6; halves of paragraphs matched): models with trained weights, from {samples}
  samples of a sweep. An approximation is computed from half of the samples and measured on the other half: its error
  includes the sampling error of {half} samples. The diagonal and heads kept whole are measured as if computed from H.
"""
_ROLES = """
## Which blocks does KFAC get wrong?

Medians over the layers; ± is the median standard error of one block.
"""
_DEPTH = """
![The error of each approximation by layer, one line per role, with standard errors: {title}.](audit/{name}-depth.png)
![The error against stored floats, one panel per role: {title}.](audit/{name}-errors.png)
"""
_HEADS = """
## Does splitting heads help?

One approximation per head against one per weight, medians over the blocks that have heads; *better* counts the blocks
whose error is lower with the split by more than two standard errors of the difference (as of independent estimates),
*worse* the blocks whose error is higher. The last row keeps the exact block of every head and drops the coupling of
heads: no approximation per head can be better.
"""
_OUTSIDE = """
## How much of H lies outside the diagonal blocks?

|H - blockdiag(H)| / |H| over all linear weights of the model: with one block per weight, and with one per layer. No
approximation that treats the blocks one by one can have a smaller error.
"""
_TRAINING = """
## Through training

Medians over the twelve blocks of the GPT, and the share of the norm outside its diagonal blocks:
"""


def table_of(facts: Facts) -> AuditTable:
    """The stored rows."""
    rows = []
    nothing = cv.Estimate(float("nan"))
    for block, name, error, its_error, best, of_best, floats in facts["rows"]:
        method = "sweep" if of_best else "exact"
        found = (cv.Estimate(*pair, method=method) for pair in ((error, its_error), (best, of_best)))
        rows.append(AuditRow(block, name, *found, nothing, nothing, None, None, None, floats, facts["sizes"][block]))
    return AuditTable(rows)


def page(results: Mapping[str, Facts]) -> str:
    """The text of docs/audit.md."""
    tables = {name: table_of(results[name]) for name in ("addition", *_MODELS)}
    samples = results["smollm2"]["samples"]
    layers = {name: ", ".join(map(str, some)) for name, some in LAYERS.items()}
    parts = [_INTRODUCTION.format(samples=samples, half=samples // 2, **layers), _ROLES]
    parts += [_table(("model", "block", *SHOWN), _by_role(tables)), *_wrong(tables)]
    parts += [_DEPTH.format(title=title, name=name) for name, title in _MODELS.items()]
    columns = ("model", "approximation", "per weight", "per head", "better", "worse", "blocks")
    parts += [_HEADS, _table(columns, list(_by_head(tables)))]
    parts += [_OUTSIDE, _table(("model", "one block per weight", "one block per layer"), _outside(results))]
    parts += [_claim(results), _TRAINING, _table(*_steps(results["training"]))]
    parts += ["![Errors through training, one panel per approximation, one line per role.](audit/training.png)"]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _median(rows: Sequence[AuditRow]) -> str:
    """Of the errors and of their standard errors."""
    value, stderr = (
        statistics.median(numbers)
        for numbers in zip(*((row.best_scale_error.value, row.best_scale_error.stderr) for row in rows), strict=True)
    )
    return f"{value:.2f} ± {stderr:.2f}" if stderr else f"{value:.2f}"


def _of_role(table: AuditTable, role: str, name: str) -> list[AuditRow]:
    return [row for row in table if role_of(row.block) == role and row.approximation == name]


def _roles(table: AuditTable) -> list[str]:
    order = ("attn.Q", "attn.K", "attn.V", "attn.O", "mlp.gate", "mlp.up", "mlp.down")
    return sorted({role_of(block) for block in table.blocks}, key=order.index)


def _title(name: str) -> str:
    return _MODELS.get(name, name)


def _by_role(tables: Mapping[str, AuditTable]) -> list[list[str]]:
    return [
        [_title(model), role, *(_median(_of_role(table, role, name)) for name in SHOWN)]
        for model, table in tables.items()
        for role in _roles(table)
    ]


def _wrong(tables: Mapping[str, AuditTable]) -> Iterator[str]:
    """The blocks that KFAC gets wrong, in words."""
    for model, table in tables.items():
        rows = [row for row in table if row.approximation == "kfac"]
        bad = [row for row in rows if row.best_scale_error.value - 2 * row.best_scale_error.stderr > _BAD]
        worst = max(rows, key=lambda row: row.best_scale_error)
        best = min(rows, key=lambda row: row.best_scale_error)
        yield (
            f"{_title(model).capitalize() if model == 'addition' else _title(model)}: KFAC misses more than half of the"
            f" norm in {len(bad)} of {len(rows)} blocks (by more than two standard errors), most in `{worst.block}`"
            f" ({_median([worst])}), least in `{best.block}` ({_median([best])})."
        )


def _by_head(tables: Mapping[str, AuditTable]) -> Iterator[list[str]]:
    for model in _MODELS:
        table = tables[model]
        for name in _SPLIT:
            pairs = [
                (whole, split)
                for block in table.blocks
                if (split := table.row(block, f"{name}/heads")) and (whole := table.row(block, name))
            ]
            gains = [_gain(whole.best_scale_error, split.best_scale_error) for whole, split in pairs]
            counts = sum(gain > 2 for gain in gains), sum(gain < -2 for gain in gains)
            sides = (_median(rows) for rows in zip(*pairs, strict=True))
            yield [_title(model), name, *sides, *map(str, counts), str(len(pairs))]
        kept = [row for row in table if row.approximation == "heads"]
        yield [_title(model), "heads kept whole", "", _median(kept), "", "", str(len(kept))]


def _gain(whole: cv.Estimate, split: cv.Estimate) -> float:
    """In standard errors of the difference."""
    return (whole.value - split.value) / ((whole.stderr**2 + split.stderr**2) ** 0.5 or 1.0)


def _number(found: Sequence[float]) -> str:
    value, stderr = found
    return f"{value:.2f} ± {stderr:.2f}" if stderr else f"{value:.2f}"


def _outside(results: Mapping[str, Facts]) -> list[list[str]]:
    last = list(results["training"])[-1]
    models = {"addition": results["addition"]} | {_title(name): results[name] for name in _MODELS}
    models[f"the GPT after {last} steps"] = results["training"][last]
    return [
        [title, *(_number(one["outside"][key]) if key in one["outside"] else "" for key in ("weights", "layers"))]
        for title, one in models.items()
    ]


def _claim(results: Mapping[str, Facts]) -> str:
    shares = [results[name]["outside"]["weights"][0] for name in ("addition", *_MODELS)]
    answer = "They do" if min(shares) > _BAD else "Some do"
    return (
        "arXiv 2602.00816 claims that block-diagonal approximations have an error of order one. "
        f"{answer} on these models: with one exact block per weight, {min(shares):.2f} to {max(shares):.2f} of the "
        "norm is already lost."
    )


def _steps(checkpoints: Mapping[str, Facts]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for step, one in checkpoints.items():
        table = table_of(one)
        errors = (_median([row for row in table if row.approximation == name]) for name in table.approximations)
        outside = (_number(one["outside"][key]) for key in ("weights", "layers"))
        rows.append([step, f"{one['loss']:.2f}", *errors, *outside])
    names = table_of(next(iter(checkpoints.values()))).approximations
    return ["step", "loss", *names, "outside, per weight", "outside, per layer"], rows


def training_figure(checkpoints: Mapping[str, Facts]) -> Any:
    """The error at the best scale by step, one panel per approximation, one line per role: medians over the layers."""
    tables = {int(step): table_of(one) for step, one in checkpoints.items()}
    names, roles = next(iter(tables.values())).approximations, _roles(next(iter(tables.values())))
    figure, grid = panels(len(names))
    for axes, name in zip(grid, names, strict=False):
        for colour, role, marker in zip(COLOURS, roles, "os^DvPX", strict=False):
            values = [
                statistics.median(row.best_scale_error for row in _of_role(table, role, name))
                for table in tables.values()
            ]
            axes.plot(
                range(len(tables)), values, color=colour, marker=marker, markersize=3.5, linewidth=1.0, label=role
            )
        axes.set_xticks(range(len(tables)), map(str, tables), fontsize=8)
        axes.set_title(name, size=11, loc="left")
        axes.set_xlabel("step", size=8)
        axes.set_ylim(0, 1.05)
        axes.tick_params(labelsize=8)
        open_box(axes, grid=True)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return figure


def write() -> None:
    """The page and its figures."""
    results = json.loads(RESULTS.read_text())
    (DOCS / "audit").mkdir(exist_ok=True)
    figures = {"training": training_figure(results["training"])}
    for name, title in _MODELS.items():
        table = table_of(results[name])
        figures[f"{name}-depth"] = depth_figure(table)
        figures[f"{name}-errors"] = error_figure(table, title)
    for name, figure in figures.items():
        figure.savefig(DOCS / "audit" / f"{name}.png", dpi=110, metadata={"Software": None})
    (DOCS / "audit.md").write_text(page(results))


if __name__ == "__main__":
    write()
