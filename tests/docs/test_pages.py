"""All code of the pages runs, and prints what the pages show."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from fences import DOCS, ROOT, SET_UP, Runner, difference, fences, pages

# The Trainer, Lightning, processes, commands. tests/test_readme.py has a quick test of the README.
SLOW = {"README.md", *(f"howto/{name}.md" for name in ("training", "loggers", "cluster", "sensitivity", "report"))}


def identity(page):
    return str(page.relative_to(DOCS)) if page.is_relative_to(DOCS) else page.name


WITH_CODE = [page for page in pages() if fences(page.read_text())]
MARKED = [
    pytest.param(page, id=identity(page), marks=[pytest.mark.slow] * (identity(page) in SLOW)) for page in WITH_CODE
]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty directory, and the random state as it was before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    state = torch.get_rng_state()
    yield tmp_path
    torch.set_rng_state(state)


@pytest.mark.parametrize("page", MARKED)
def test_the_code_of_a_page(page, call, elsewhere):
    text = page.read_text()
    runner = Runner(call)
    for fence in fences(text):
        printed = runner.run(fence)
        if fence.shown is not None:
            assert (found := difference(text[slice(*fence.shown)], printed)) is None, found


def test_every_page_with_code_is_among_them():
    named = {identity(page) for page in WITH_CODE}
    assert {"README.md", "tutorial.md", "migrating.md", "bounds.md", "howto/cluster.md", "theory/growth.md"} <= named


def test_commands_that_install_name_what_exists():
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in pages():
        text = page.read_text()
        for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
            assert f"\n{target}:" in makefile, f"{page}: make {target}"
        for names in re.findall(r'-e "?\.\[([\w,]+)\]', text):
            assert set(names.split(",")) <= set(extras), f"{page}: {names}"


def test_links_lead_somewhere():
    for page in pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, heading = target.partition("#")
            folder = Path(path).parent.name
            if "://" in target or folder == "examples" or path.endswith("notebooks/index.md"):
                continue  # elsewhere, or written by `make docs`
            file = (page.parent / path).resolve() if path else page
            if folder == "notebooks":
                file = ROOT / "notebooks" / f"{file.stem}.ipynb"  # its page is made of it
            assert file.is_file(), f"{page}: {target}"
            if heading:
                titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in anchors, f"{page}: {target}"


def test_the_extras_are_listed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = re.findall(r"^\| `(\w+)` \|", (DOCS / "tutorial.md").read_text(), re.MULTILINE)
    assert set(listed) == set(extras) - {"dev", "docs"}


def test_text_without_code_and_unknown_languages_are_refused():
    with pytest.raises(ValueError, match="no code"):
        fences("```text\nhello\n```\n")
    with pytest.raises(ValueError, match="no code"):
        fences("```python\n1\n```\nwords between\n```text\nhello\n```\n")
    with pytest.raises(ValueError, match="ruby"):
        fences("```ruby\n1\n```\n")
    with pytest.raises(ValueError, match="do not know"):
        Runner(None)._shell("rm -rf /")
    assert Runner(None)._shell("\n".join(f"{command}x" for command in SET_UP)) == ""


def test_a_difference_is_seen():
    assert difference("a  \n...\nc\n", "a\nb\nc\n") is None
    assert "but this is printed" in difference("a\n", "b\n")
