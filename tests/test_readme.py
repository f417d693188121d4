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


def test_the_numbers_of_theorems_are_right():
    from curvoscope.commands.verify import _summary
    from curvoscope.papers.theorems import Result
    from curvoscope.papers.theorems.registry import EXACT, REFUTED
    from curvoscope.papers.theorems.verify import THEOREMS

    expected = [
        Result(name, one.source, one.verdict, 2 * REFUTED if one.verdict == "false" else 0.0, EXACT, "")
        for name, one in THEOREMS.items()
    ]
    assert f"{len(THEOREMS)} theorems" in README and f"\n    {_summary(expected)}\n" in README


def test_the_five_questions_have_commands_that_exist():
    from curvoscope.cli import app

    commands = {command.callback.__name__ for command in app.registered_commands}
    asked = re.findall(r"^\*\*(\d)\. .*?^(?:    )?curvoscope (\w+)", README, re.MULTILINE | re.DOTALL)
    assert [number for number, _ in asked] == list("12345") and {name for _, name in asked} <= commands
    named = set(re.findall(r"`(?:curvoscope )?(\w+)`", README.partition("Further commands:")[2].partition("\n\n")[0]))
    assert {name for _, name in asked} | named == commands
