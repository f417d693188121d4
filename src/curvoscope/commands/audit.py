"""`curvoscope audit [MODEL]`: approximations of the blocks of a model against the blocks themselves."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from curvoscope import commands
from curvoscope.analysis.audit import DEFAULT, audit
from curvoscope.analysis.audit_samples import FEWEST, SampledAudit
from curvoscope.analysis.audit_table import SPLIT, AuditTable
from curvoscope.analysis.block_diagonal import block_diagonal_error
from curvoscope.approximations import GradientSource
from curvoscope.blocks import Blocks
from curvoscope.commands.document import as_estimate, common_facts, pictures, show_files, show_subject, write_run
from curvoscope.commands.progress import work
from curvoscope.commands.subject import DTYPES, Request, Subject, is_in_layer, select, subject_of
from curvoscope.curvature import hessian
from curvoscope.errors import EmptyError, RangeError
from curvoscope.estimate import Estimate
from curvoscope.losses.objectives import logits_of
from curvoscope.report.audit_figures import depth_figure, error_figure, layers_of_blocks
from curvoscope.sweep import sweep

DOCUMENT = "audit.json"
_SAMPLES = 128
_EPSILONS = 100  # up to so many, a relative error that is computed exactly is rounding
_DIRECTIONS = 1024  # outputs of a sequence up to which all directions of the loss Hessian are enumerated
_NOT_OF_A_LAYER = ("embed", "positions", "unembed")


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """What to audit. The names are those of the options."""

    blocks: tuple[str, ...] = ()
    approximations: tuple[str, ...] = ()
    samples: int | None = None


@dataclasses.dataclass(frozen=True)
class _Audited:
    """`groups`: Q, K and V of each layer as one weight, if all three are audited."""

    table: AuditTable
    groups: AuditTable | None
    outside: Estimate | None
    loss: float
    samples: int | None


def run(request: Request, options: AuditOptions, out: Path, as_json: bool) -> None:
    """Audit, print the table and what it shows; write figures, reports and audit.json into `out`."""
    if options.samples is not None and options.samples < FEWEST:
        raise RangeError("samples", f"got {options.samples}, expected at least {FEWEST}: two halves with error bars")
    subject = subject_of(request)
    chosen = _weights(subject.blocks, options.blocks)
    wanted = options.approximations or DEFAULT
    commands.make_directory(out)
    with work(2) as step:
        step("the audit")
        exact = options.samples is None and _directions(subject) <= _DIRECTIONS
        found = (_exact if exact else _sampled)(subject, chosen, wanted, request, options)
        step("the figures")
        answer = _answer(found)
        figures = pictures("audit_errors", error_figure(found.table, answer.partition(". ")[0] + "."))
        if len(layers_of_blocks(found.table.blocks)) > 1:
            figures |= pictures("audit_depth", depth_figure(found.table))
    facts = common_facts("audit", subject, request, options, found.loss) | {
        "title": f"Approximations of the curvature of {request.name}",
        "question": f"Which approximation is closest to the curvature of {request.name}?",
        "answer": answer,
        "advice": [],
        "samples": found.samples,
        "rounding": 0.0 if found.samples else _EPSILONS * torch.finfo(DTYPES[subject.facts["dtype"]]).eps,
        "rows": [_facts(row._asdict()) for row in found.table],
        "groups": [_facts(row._asdict()) for row in found.groups or ()],
        "outside_diagonal_blocks": as_estimate(found.outside),
        "missing": _missing(found),
    }
    document = write_run(out, DOCUMENT, facts, figures)
    if as_json:
        print(document, end="")
        return
    console = commands.console()
    show_subject(console, subject, found.loss)
    console.print(found.table)
    if found.groups is not None:
        console.print(found.groups)
    console.print(answer + "\n", soft_wrap=True)
    show_files(out, figures, DOCUMENT)


def _weights(blocks: Blocks, patterns: tuple[str, ...]) -> Blocks:
    """The blocks of the patterns; without any, the matrices of the layers, or all of a model without known layers."""
    if patterns:
        return select(blocks, patterns)
    matrices = [name for name, (a, p) in blocks.shapes.items() if min(a, p) > 2 and name not in _NOT_OF_A_LAYER]
    inside = [name for name in matrices if is_in_layer(name)] or matrices
    if not inside:
        raise EmptyError("blocks", "the model has no weight matrices of linear layers")
    return Blocks(blocks[name] for name in inside)


def _directions(subject: Subject) -> int:
    """Outputs of one sequence."""
    batch = subject.batch
    with torch.no_grad():
        if isinstance(batch, dict):
            outputs = subject.model(**{key: value[:1] for key, value in batch.items() if key != "labels"})
        else:
            outputs = subject.model(batch[0][:1])
    return logits_of(outputs).numel()


def _exact(subject: Subject, chosen: Blocks, wanted: Any, request: Request, options: AuditOptions) -> _Audited:
    H = hessian(subject.model, subject.loss, [subject.batch], chosen)
    table = audit(H, chosen.names if options.blocks else None, wanted if options.approximations else None)
    groups, split = _groups(chosen), _split(wanted)
    together = audit(H, groups, split) if groups and split else None
    outside = block_diagonal_error(H, table.blocks) if len(table.blocks) > 1 else None
    return _Audited(table, together, outside, H.loss, None)


def _sampled(subject: Subject, chosen: Blocks, wanted: Any, request: Request, options: AuditOptions) -> _Audited:
    strict = bool(options.blocks and options.approximations)
    observer, groups, split = SampledAudit(wanted, strict=strict), _groups(chosen), _split(wanted)
    together = SampledAudit(split, groups=groups) if groups and split else None

    def observe(chunk: int, source: GradientSource) -> None:
        observer(chunk, source)
        if together is not None:
            together(chunk, source)

    samples = options.samples or _SAMPLES
    batches = [subject.batch]
    found = sweep(
        subject.model,
        subject.loss,
        batches,
        chosen,
        samples=samples,
        seed=request.seed,
        micro_batch=1,
        observe=observe,
    )

    def in_order(rows: AuditTable) -> AuditTable:  # the sweep begins with the last layer
        return AuditTable(sorted(rows, key=lambda row: chosen.names.index(row.block.partition(" + ")[0])))

    table, joint = in_order(observer.table()), None if together is None else in_order(together.table())
    outside = block_diagonal_error(found, table.blocks) if len(table.blocks) > 1 else None
    return _Audited(table, joint, outside, found.loss, found.samples)


def _groups(chosen: Blocks) -> list[tuple[str, ...]]:
    """Q, K and V of each layer."""
    several = [tuple(f"{name[:-1]}{role}" for role in "QKV") for name in chosen.names if name.endswith(".attn.Q")]
    return [group for group in several if all(name in chosen.names for name in group)]


def _split(wanted: Sequence[str]) -> list[str]:
    """What groups are audited with: structures for all of the group, and for each of its weights."""
    found = [f"{name}{part}" for name in SPLIT if name in wanted for part in ("", "/layers")]
    return [*found, "layers"] if found else []


def _answer(found: _Audited) -> str:
    said = " ".join([found.table.recommendation(), *(found.groups.splitting() if found.groups else ())])
    if found.outside is None:
        return said
    error = (
        f"{found.outside.value:.2f}"
        if found.outside.exact
        else f"{found.outside.value:.2f} ± {found.outside.stderr:.1g}"
    )
    return f"{said} The {len(found.table.blocks)} diagonal blocks together, kept whole, miss {error} of the norm of H."


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    return {key: as_estimate(value) if isinstance(value, Estimate) else value for key, value in row.items()}


def _missing(found: _Audited) -> list[str]:
    if found.samples is None:
        return []
    return ["Errors of damped steps and of the largest eigenvalue: they need whole blocks, and these are sampled."]
