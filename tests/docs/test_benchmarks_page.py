"""The benchmark page is what the stored results of one run say."""

import json
import pkgutil

import benchmarks
from benchmarks.__main__ import NOT_BENCHMARKS
from benchmarks.page import page
from benchmarks.tables import faster

from fences import ROOT

RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text())


def test_it_is_the_page_of_the_results():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page(RESULTS)


def test_every_benchmark_was_run_and_none_failed():
    known = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - NOT_BENCHMARKS
    assert known == set(RESULTS) - {"versions", "cores"}
    assert not [name for name in known if "fails" in RESULTS[name]]


def test_a_benchmark_that_fails_is_named_and_the_others_are_shown():
    text = page(RESULTS | {"growth": {"fails": "RuntimeError"}})
    assert "not shown: growth." in text and "How cost grows" not in text and "Long sequences" in text


def test_where_a_peer_is_faster_it_is_said():
    assert faster(3.0) == "3 times faster" and faster(1.0) == "1 times faster"
    assert faster(0.25) == "**4 times slower**"
