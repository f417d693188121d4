"""The reference has every public name, and its two generators read docstrings and commands as they are meant."""

import pydoc
import sys

import pytest

import curvoscope as cv
from curvoscope.papers import experiments
from fences import DOCS
from public_names import DOCUMENTED, MODULES, PACKAGES

sys.path.insert(0, str(DOCS / "_ext"))

SHOWN = {id(pydoc.locate(name)) for name in DOCUMENTED}  # also under another name
PUBLIC = {id(getattr(cv, name)) for name in cv.__all__}


@pytest.mark.parametrize("module", [one for one in PACKAGES if hasattr(one, "__all__")], ids=lambda m: m.__name__)
def test_every_public_name(module):
    if module.__name__ in MODULES:
        return
    for name in module.__all__:
        full = f"{module.__name__}.{name}"
        thing = getattr(module, name)
        origin = getattr(thing, "__module__", "")
        homes = {origin, origin.rpartition(".")[0]}  # curvoscope.estimate.result and curvoscope.estimate, say
        shown = id(thing) in SHOWN or is_page(full) or homes & MODULES
        assert shown or (module is not cv and id(thing) in PUBLIC), full


def is_page(module):
    """A module is documented by its own page, name by name."""
    return module in MODULES or any(name.startswith(f"{module}.") for name in DOCUMENTED | MODULES)


def test_every_figure_has_its_page():
    index = (DOCS / "figures/index.md").read_text()
    there = {page.stem for page in (DOCS / "figures").glob("*.md")} - {"index"}
    assert there == set(experiments.NAMES)
    for name in experiments.NAMES:
        text = (DOCS / f"figures/{name}.md").read_text()
        assert f"]({name}.md)" in index and (DOCS / f"figures/{name}.png").is_file() and f"({name}.png)" in text
        assert f"curvoscope reproduce {name}" in text and "**Verdict.**" in text


def test_docstrings_become_markup():
    pytest.importorskip("sphinx")
    from docstrings import convert, inline

    assert inline("|x|^2 of `W_Q`, a * b_") == r"\|x\|^2 of \ ``W_Q``\ , a \* b\_"
    assert inline("see `hessian`") == r"see \ :py:obj:`hessian <curvoscope.hessian>`\ "
    text = ["One line.", "", "    x = 1", "", "More.", "", "Args:", "    a, b: first", "        and more.", "", "End."]
    lines = [line for line in convert(text) if line]
    assert lines[:4] == ["One line.", "::", "    x = 1", "More."]
    assert lines[4:] == [".. rubric:: Arguments", "``a, b``", "    first", "    and more.", "End."]


def test_sections_become_markup():
    pytest.importorskip("sphinx")
    from docstrings import convert

    text = "Args:\n    x: a\n\nReturns:\n    |x| of\n    `x`.\n\nExample:\n    >>> 1 | 2\n    3\n\nEnd."
    lines = [line for line in convert(text.split("\n")) if line]
    assert lines[:3] == [".. rubric:: Arguments", "``x``", "    a"]
    assert lines[3:6] == [".. rubric:: Returns", r"\|x\| of", r"\ ``x``\ ."]
    assert lines[6:] == [".. rubric:: Example", ".. code-block:: pycon", "    >>> 1 | 2", "    3", "End."]


def test_commands_become_tables():
    pytest.importorskip("sphinx")
    from generated import command_line, command_page

    for command in command_line.registered_commands:
        page = command_page(command.callback)
        assert page.startswith(f"## {command.callback.__name__}\n") and "| --- |" in page
    page = command_page(next(c.callback for c in command_line.registered_commands if c.callback.__name__ == "analyze"))
    assert r"| `--norm none\|pre` |" in page and "| `--json` |" in page and "| `--seed INTEGER` | Seed" in page
