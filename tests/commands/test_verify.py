"""`curvoscope verify`: one JSON document or a table, and an exit code that scripts can rely on."""

import json
import math
from collections.abc import Iterator

import pytest

from curvoscope.commands import verify as command
from curvoscope.papers.theorems import Result

GOOD = Result("Lemma 1", "paper", "holds as printed", 1e-15, 1e-10, "H[ab, cd] = 0")
CORRECTED = Result("Lemma 2", "paper", "holds corrected", 2e-15, 1e-10, "printed form off by 1.8 (E9)", 1.8)
WRONG = Result("Lemma 3", "slides", "holds as printed", 0.3, 1e-10, "")
UNDEFINED = Result("Lemma 4", "slides", "holds as printed", math.nan, 1e-10, "")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """What the theorems will turn out to be."""
    results = [GOOD, CORRECTED]

    def examine(seed: int) -> Iterator[Result]:
        return iter(results)

    monkeypatch.setattr(command, "examine", examine)
    monkeypatch.setattr(command, "names", lambda: [result.name for result in results])
    return results


def test_json_is_one_document_and_nothing_else(found: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(seed=7, as_json=True) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert set(document) == {"results", "holds", "seed", "versions"}
    assert document["holds"] is True
    assert document["seed"] == 7
    assert {"curvoscope", "torch", "python"} <= set(document["versions"])
    assert document["results"][1] == {
        "name": "Lemma 2",
        "source": "paper",
        "verdict": "holds corrected",
        "holds": True,
        "error": 2e-15,
        "tolerance": 1e-10,
        "note": "printed form off by 1.8 (E9)",
    }


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("failure", [WRONG, UNDEFINED])
def test_exit_code_tells_of_a_failure(found: list[Result], failure: Result, as_json: bool) -> None:
    assert command.run(seed=0, as_json=as_json) == 0
    found.append(failure)
    assert command.run(seed=0, as_json=as_json) == 1


def test_nan_is_null_in_json_and_fails(found: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    found.append(UNDEFINED)
    command.run(seed=0, as_json=True)
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert document["holds"] is False
    assert document["results"][2]["error"] is None
    assert document["results"][2]["holds"] is False


def test_table_shows_every_result_and_sums_up(found: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    found.append(WRONG)
    command.run(seed=3, as_json=False)
    out, err = capsys.readouterr()
    assert err == ""
    assert "seed 3" in out
    for words in ("Lemma 1", "H[ab, cd] = 0", "1.0e-15", "holds corrected", "off by 1.8 (E9)", "slides", "3.0e-01"):
        assert words in out
    assert "FAILS (expected:" in out
    assert "3 results: 1 hold as printed, 1 hold corrected; 1 FAIL: Lemma 3" in out


@pytest.mark.slow
def test_all_theorems(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(seed=0, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["results"]) > 90
    assert max(result["error"] for result in document["results"] if result["tolerance"] <= 1e-10) < 1e-11
