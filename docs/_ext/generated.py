"""What pages take from the package itself: `{commands}`, the command line, and `{results}`, the sources' results."""

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective
from typer.models import ArgumentInfo

from curvoscope.cli import app as command_line
from curvoscope.papers.theorems import Result, verify


class Commands(SphinxDirective):
    """Every command with its arguments and options, from the declarations that make its `--help`."""

    def run(self) -> list[nodes.Node]:
        """Markdown, parsed in place."""
        text = "\n".join(command_page(command.callback) for command in command_line.registered_commands)
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def command_page(command: Callable[..., Any] | None) -> str:
    """A section of Markdown on one command."""
    assert command is not None
    rows, places = [], ["curvoscope", command.__name__, "[OPTIONS]"]
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, about = get_args(hints[name])[:2]
        silent = parameter.default in (None, inspect.Parameter.empty) or isinstance(parameter.default, bool)
        default = "" if silent else f"`{parameter.default}`"
        if isinstance(about, ArgumentInfo):
            shown = about.metavar or name.upper()
            places.append(shown if parameter.default is inspect.Parameter.empty else f"[{shown}]")
        else:
            # Typer keeps the first of an option's names where its default would be
            declared = [one for one in (about.default, *(about.param_decls or ())) if isinstance(one, str)]
            shown = ", ".join(declared or [f"--{name.replace('_', '-')}"]) + _values(kind)
        bar = "\\|"
        rows.append(f"| `{shown.replace('|', bar)}` | {_cell(about.help or '')} | {default} |")
    table = ["| | | default |", "| --- | --- | --- |", *rows]
    return "\n".join(
        [f"## {command.__name__}", "", inspect.getdoc(command) or "", "", f"    {' '.join(places)}", "", *table, ""]
    )


def _values(kind: Any) -> str:
    """What an option takes, after its name: its choices, or the kind of value; nothing for a switch."""
    kinds = (
        [kind] if get_origin(kind) is Literal else [one for one in get_args(kind) or (kind,) if one is not type(None)]
    )
    choices = next((get_args(one) for one in kinds if get_origin(one) is Literal), None)
    if choices is not None:
        return " " + "|".join(choices)
    found = next((one for one in kinds if isinstance(one, type)), None)
    if found is bool:
        return ""
    if found is not None and issubclass(found, Enum):
        return " " + "|".join(choice.value for choice in found)
    names: dict[Any, str] = {int: "INTEGER", float: "NUMBER", Path: "PATH"}
    return " " + names.get(found, "TEXT")


@functools.cache
def _results() -> list[Result]:
    return verify()


class Results(SphinxDirective):
    """The results of the sources as `curvoscope verify` finds them now, those with one of the verdicts given."""

    option_spec: ClassVar = {"source": directives.unchanged_required}
    required_arguments, final_argument_whitespace = 1, True

    def run(self) -> list[nodes.Node]:
        """Markdown, parsed in place; a result that does not stand stops the build."""
        verdicts = [verdict.strip() for verdict in self.arguments[0].split(",")]
        chosen = [r for r in _results() if r.source == self.options["source"] and r.verdict in verdicts]
        failed = [result.name for result in chosen if not result.holds]
        if failed or not chosen:
            raise self.error(f"results that do not stand: {failed}" if failed else "no such results")
        rows = [f"| {_cell(r.name)} | {r.verdict} | {_error(r.error)} | {_cell(r.note)} |" for r in chosen]
        text = "\n".join(
            ["| result | verdict | error | what is wrong, and by how much |", "| --- | --- | --- | --- |", *rows]
        )
        return self.parse_text_to_nodes(text)


def _error(error: float) -> str:
    return f"{error:.1e}" if error else "0"


def _cell(text: str) -> str:
    """Text in a cell of a table: bars end a cell, stars and dollars would be markup."""
    for character in "|*$<":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("commands", Commands)
    app.add_directive("results", Results)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
