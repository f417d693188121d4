"""The benchmark page is what the stored results of one run say."""

import json
import pkgutil

import benchmarks
import benchmarks.__main__
import pytest
from benchmarks.__main__ import NOT_BENCHMARKS, main
from benchmarks.page import FACTS, bold_rows, page
from benchmarks.tables import faster

from fences import ROOT

RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text())


def test_it_is_the_page_of_the_results():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page(RESULTS)


def test_every_benchmark_was_run_and_none_failed():
    known = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - NOT_BENCHMARKS
    assert known == set(RESULTS) - FACTS
    assert not [name for name in known if "fails" in RESULTS[name]]


def test_a_benchmark_that_fails_is_named_and_the_others_are_shown():
    text = page(RESULTS | {"growth": {"fails": "RuntimeError"}})
    assert "not shown: growth." in text and "How cost grows" not in text and "Long sequences" in text


def test_where_a_peer_is_faster_it_is_said():
    assert faster(3.0) == "3 times faster" and faster(1.0) == "1 times faster"
    assert faster(0.25) == "**4 times slower**"


def test_every_bold_row_has_a_reason():
    assert not [(title, row) for title, row, why in bold_rows(RESULTS) if why is None]


def test_a_bold_row_without_a_reason_is_found():
    slow = RESULTS | {"start_up": RESULTS["start_up"] | {"limits_seconds": {"help": 0.0, "import": 0.2}}}
    assert [title for title, _, why in bold_rows(slow) if why is None] == ["Start-up"]


def test_a_section_says_that_its_benchmark_was_run_on_its_own():
    alone, together = (RESULTS | {"growth": RESULTS["growth"] | {"in_a_run_of_its_own": own}} for own in (True, False))
    assert "Measured in a separate run: `growth`." in page(alone)
    assert "Measured in a separate run: `growth`." not in page(together)


def run_benchmarks(monkeypatch, out, *arguments, broken=()):
    """The names that `python -m benchmarks` ran, each giving its own name as result."""
    ran = []

    def measured(name):
        ran.append(name)
        return {"fails": "exit status 1"} if name in broken else {"of": name}

    monkeypatch.setattr(benchmarks.__main__, "measured", measured)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--out", str(out), *arguments])
    if broken:
        with pytest.raises(SystemExit, match="failed: growth"):
            main()
    else:
        main()
    return ran


def test_a_run_can_be_resumed_and_single_benchmarks_run_again(monkeypatch, tmp_path):
    out = tmp_path / "results.json"
    everything = set(run_benchmarks(monkeypatch, out, broken=("growth",)))
    assert everything | FACTS == set(json.loads(out.read_text()))
    assert run_benchmarks(monkeypatch, out, "--resume") == ["growth"]
    results = json.loads(out.read_text())
    assert results["growth"] == {"of": "growth"} and set(results["run_seconds"]) == everything
    assert run_benchmarks(monkeypatch, out, "sweep", "solve") == ["solve", "sweep"]
    alone = {name for name in everything if "in_a_run_of_its_own" in json.loads(out.read_text())[name]}
    assert alone == {"sweep", "solve"}
