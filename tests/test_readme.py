"""The README's example runs and prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_prints_what_the_readme_shows():
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == shown


def test_the_two_commands_are_there():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in README and f"\n{target}:" in makefile


def test_the_number_of_theorems_is_right():
    from curvoscope.papers.theorems.verify import names

    assert f"{len(names())} theorems" in README
