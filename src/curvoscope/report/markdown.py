"""The report as Markdown, with the figures as files next to it."""

import re

from curvoscope.analysis.advice import Advice
from curvoscope.report.cells import amount
from curvoscope.report.contents import Report, Section, Table


def page(report: Report) -> str:
    """Headings, tables and figures in the order of the HTML page."""
    parts = [f"# {_text(report.title)}", f"**{_text(report.question)}**", _text(report.answer)]
    parts += ["## What was measured", *map(_text, report.about)]
    if report.advice:
        parts += ["## Advice", *map(_advice, report.advice)]
    for section in report.sections:
        parts += _section(section)
    if report.missing:
        parts += ["## Not measured here", "\n".join(f"- {_text(line)}" for line in report.missing)]
    versions = ", ".join(f"{_text(name)} {_text(version)}" for name, version in report.versions.items())
    command = "The files of this run do not contain its command." if report.command is None else _code(report.command)
    parts += ["## To repeat it", command, f"Versions: {versions}"]
    if report.seed is not None:
        parts.append(f"Seed: {report.seed}")
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    parts = [f"## {_text(section.title)}"]
    if section.text:
        parts.append(_text(section.text))
    parts += map(_table, section.tables)
    for one in section.figures:
        parts += [f"![{_text(one.alt)}]({one.file})", _text(one.caption)]
    return parts


def _advice(one: Advice) -> str:
    """A list item; its evidence and its settings belong to it."""
    lines = [f"- **{_text(one.subject)}**: {_text(one.recommendation)}."]
    lines.append(f"  Evidence: {_text(one.quantity)}: {amount(one.value)}; the threshold is {amount(one.threshold)}.")
    if one.settings:
        settings = ", ".join(f"{_text(name)} {amount(value)}" for name, value in one.settings.items())
        lines.append(f"  Set: {settings}.")
    return "\n".join(lines)


def _table(table: Table) -> str:
    rules = ["---"] * table.words + ["---:"] * (len(table.columns) - table.words)
    lines = [[_text(name) for name in table.columns], rules]
    lines += [[_text(cell.text) for cell in row] for row in table.rows]
    return "\n".join([f"### {_text(table.caption)}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _text(text: str) -> str:
    """Text that stays text: on one line, without markup of Markdown or HTML."""
    text = re.sub(r"([\\`*_{}\[\]|#~$])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(text: str) -> str:
    """A fence longer than any in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"
