"""Every public function and class says what it takes and what it returns, and shows an example that runs."""

import doctest
import inspect
import re
from dataclasses import is_dataclass

import pytest
import torch

from public_names import public_names

PUBLIC = public_names()
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
NEEDS = {
    "curvoscope.training.callback": "transformers",
    "curvoscope.training.trainer_callback": "transformers",
    "curvoscope.training.lightning_callback": "lightning",
}
SLOW = {*NEEDS, "curvoscope.papers.theorems.verify"}  # many seconds: the imports, all theorems
NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty directory, and the random state as it was before."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        yield


def is_error(thing):
    return inspect.isclass(thing) and issubclass(thing, BaseException)


def docstring(thing):
    """The docstring of a name itself, not one that a class inherits or that dataclasses put in its place."""
    found = inspect.cleandoc(thing.__doc__ or "")
    if inspect.isclass(thing):
        assert not found.startswith(f"{thing.__name__}("), "the docstring is the one that dataclasses make"
        found += "\n\n" + inspect.cleandoc(getattr(vars(thing).get("__init__"), "__doc__", None) or "")
    return found


def has(text, section):
    return re.search(rf"^{section}:$", text, re.MULTILINE) is not None


@pytest.mark.parametrize("name", PUBLIC)
def test_sections(name):
    thing = PUBLIC[name]
    text = docstring(thing)
    assert text.strip(), "has no docstring"
    if is_error(thing):
        return
    signature = inspect.signature(thing)
    if any(parameter.kind in NAMED for parameter in signature.parameters.values()):
        fields = is_dataclass(thing) and has(text, "Attributes")
        assert has(text, "Args") or fields, "has parameters, but no section Args"
    if inspect.isfunction(thing) and signature.return_annotation not in (None, "None"):
        assert has(text, "Returns") or has(text, "Yields"), "returns something, but has no section Returns"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, thing in PUBLIC.items()
        if not is_error(thing)
    ],
)
def test_example(name):
    thing = PUBLIC[name]
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    text = docstring(thing)
    assert has(text, "Examples?"), "has no section Example"
    example = doctest.DocTestParser().get_doctest(text, {}, name, inspect.getsourcefile(thing), 0)
    assert example.examples, "its Example has no >>> line"
    printed = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=printed.append)
    assert not printed, "".join(printed)
