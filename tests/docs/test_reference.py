"""The reference has every public name, and its two generators read docstrings and commands as they are meant."""

import re
import sys

import pytest

import curvoscope as cv
from curvoscope import estimate
from fences import DOCS

sys.path.insert(0, str(DOCS / "_ext"))

REFERENCE = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
DOCUMENTED = set(re.findall(r"auto(?:class|function):: ([\w.]+)", REFERENCE))
MODULES = set(re.findall(r"automodule:: ([\w.]+)", REFERENCE))
ELSEWHERE = {"curvoscope.Estimate": "curvoscope.estimate", "curvoscope.CurvoscopeError": "curvoscope.errors"}


@pytest.mark.parametrize(
    "module", [cv, cv.exact, cv.analysis, cv.training, cv.attention, estimate], ids=lambda m: m.__name__
)
def test_every_public_name(module):
    if module.__name__ in MODULES:
        return
    for name in module.__all__:
        full = f"{module.__name__}.{name}"
        assert full in DOCUMENTED or full in MODULES or ELSEWHERE.get(full) in MODULES or is_page(full), full


def is_page(module):
    """A module is documented by its own page, name by name."""
    return any(name.startswith(f"{module}.") for name in DOCUMENTED | MODULES)


def test_docstrings_become_markup():
    pytest.importorskip("sphinx")
    from docstrings import convert, inline

    assert inline("|x|^2 of `W_Q`, a * b_") == r"\|x\|^2 of \ ``W_Q``\ , a \* b\_"
    assert inline("see `hessian`") == r"see \ :py:obj:`hessian <curvoscope.hessian>`\ "
    text = ["One line.", "", "    x = 1", "", "More.", "", "Args:", "    a, b: first", "        and more.", "", "End."]
    lines = [line for line in convert(text) if line]
    assert lines[:4] == ["One line.", "::", "    x = 1", "More."]
    assert lines[4:] == [".. rubric:: Arguments", "``a, b``", "    first", "    and more.", "End."]


def test_commands_become_tables():
    pytest.importorskip("sphinx")
    from generated import command_line, command_page

    for command in command_line.registered_commands:
        page = command_page(command.callback)
        assert page.startswith(f"## {command.callback.__name__}\n") and "| --- |" in page
    page = command_page(next(c.callback for c in command_line.registered_commands if c.callback.__name__ == "analyze"))
    assert r"| `--norm none\|pre` |" in page and "| `--json` |" in page and "| `--seed INTEGER` | Seed" in page
