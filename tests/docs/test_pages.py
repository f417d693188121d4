"""All code of the pages runs, and prints what the pages show."""

import importlib
import re
import tomllib

import pytest
import torch

from fences import DOCS, PEERS, ROOT, SET_UP, Runner, difference, fences, pages

SLOW = {"howto/training.md", "howto/cluster.md"}  # the Trainer, Lightning, processes of their own


def identity(page):
    return str(page.relative_to(DOCS)) if page.is_relative_to(DOCS) else page.name


WITH_CODE = [page for page in pages() if fences(page.read_text())]
MARKED = [
    pytest.param(page, id=identity(page), marks=[pytest.mark.slow] * (identity(page) in SLOW)) for page in WITH_CODE
]


def run(page, call, peer=None):
    text = page.read_text()
    runner = Runner(call)
    count = 0
    for fence in fences(text):
        if fence.peer not in (None, peer):
            continue
        printed = runner.run(fence)
        if fence.shown is not None:
            assert (found := difference(text[slice(*fence.shown)], printed)) is None, found
        count += 1
    return count


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
    assert run(page, call)


@pytest.mark.parametrize("peer", PEERS)
def test_the_code_beside_a_peer(peer, call, elsewhere):
    try:
        importlib.import_module(peer)
    except ImportError:
        pytest.skip(f"{PEERS[peer]} is not installed: the calls of docs/migrating.md beside it were not run")
    run(DOCS / "migrating.md", call, peer)


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
