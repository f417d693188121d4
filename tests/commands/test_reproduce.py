import csv
import io
import json

import pytest

from curvoscope.commands import export, reproduce
from curvoscope.commands.reproduce import run as reproduced
from curvoscope.errors import RangeError
from curvoscope.papers import experiments
from curvoscope.papers.experiments import figures
from curvoscope.papers.experiments.setting import Setting
from curvoscope.versions import versions


@pytest.fixture
def small(monkeypatch):
    """fig3a with a network of width 4 and five points."""
    original = figures.load("fig3a")
    options = {name: getattr(original, name) for name in original.__dataclass_fields__ if name != "hash"}
    options["configuration"] = Setting(d=4, sequences=2)
    options["quick_points"] = original.points[:10:2]
    options["quick_seeds"] = 2
    changed = experiments.Figure(**options)
    monkeypatch.setattr(figures, "load", lambda name: changed)
    return changed


def run(out, **options):
    given = {
        "names": ["fig3a"],
        "quick": True,
        "jobs": 1,
        "resume": True,
        "out": out,
        "store_path": None,
        "dask": None,
        "as_json": True,
    }
    reproduced(**{**given, **options})


def test_the_json_document(small, tmp_path, capsys):
    run(tmp_path)
    document = json.loads(capsys.readouterr().out)
    points, fits = document["fig3a"]["points"], document["fig3a"]["fits"]
    assert len(points) == 5 * 2 * 6
    assert {"sigma", "seed", "layer", "block", "part", "value", "stderr"} <= set(points[0])
    assert {point["part"] for point in points} == {"outer", "functional", "total"}
    assert {"block", "part", "layer", "predicted", "fitted", "low", "high", "agrees"} <= set(fits[0])
    outer = next(fit for fit in fits if (fit["block"], fit["part"]) == ("Q", "outer"))
    assert outer["predicted"] == 6 and abs(outer["fitted"] - 6) < 0.1 and outer["agrees"] is True
    zero = next(fit for fit in fits if (fit["block"], fit["part"]) == ("V", "functional"))
    assert zero["agrees"] is True and zero["fitted"] is None
    assert (document["fig3a"]["seeds"], document["fig3a"]["versions"]) == ([0, 1], versions())
    made_by = ", ".join(f"{name} {version}" for name, version in versions().items())
    assert f"Seeds: 0, 1. Versions: {made_by}." in (tmp_path / "fig3a.html").read_text()
    for kind, start in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("html", b"<!DOCTYPE html")):
        assert (tmp_path / f"fig3a.{kind}").read_bytes().startswith(start)


def test_a_second_run_measures_nothing_and_says_the_same(small, undrawn, tmp_path, capsys, monkeypatch):
    run(tmp_path)
    first = capsys.readouterr().out
    monkeypatch.setattr(experiments.Task, "job", property(lambda task: pytest.fail("measured again")))
    run(tmp_path)
    assert capsys.readouterr().out == first


def test_without_resume_it_is_measured_anew(small, undrawn, tmp_path, capsys):
    run(tmp_path)
    seen = []
    wrapped = small.measure

    def counted(*arguments):
        seen.append(arguments)
        return wrapped(*arguments)

    object.__setattr__(small, "measure", counted)
    run(tmp_path, resume=False)
    assert len(seen) == 10


def test_the_verdicts_are_shown_line_by_line(small, undrawn, tmp_path, capsys):
    run(tmp_path, as_json=False)
    shown = capsys.readouterr().out
    assert "outer Q grows as σ⁶ for σ ≤ 0.3" in shown and "agrees" in shown
    assert "functional V is exactly zero" in shown and "wrote" in shown


def test_a_long_run_is_announced(small, undrawn, tmp_path, capsys):
    object.__setattr__(small, "seconds", lambda point: 3600.0)
    run(tmp_path)
    assert "10 points to measure, about 10.0 hours with 1 jobs" in capsys.readouterr().err


def test_unknown_names(tmp_path):
    with pytest.raises(RangeError, match=r"^NAME: there is no figure 'fig33'; did you mean"):
        run(tmp_path / "out", names=["fig33"])
    assert not (tmp_path / "out").exists()


def test_export(small, undrawn, tmp_path, capsys):
    run(tmp_path)
    document = json.loads(capsys.readouterr().out)["fig3a"]["points"]
    export.run(tmp_path, "csv", None)
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(table) == len(document) and table[0]["experiment"] == "fig3a"
    assert {name: table[0][name] for name in versions()} == versions()
    key = ("sigma", "seed", "layer", "block", "part", "value")
    assert {tuple(str(point[name]) for name in key) for point in document} == {
        tuple(row[name] for name in key) for row in table
    }
    parquet = pytest.importorskip("pyarrow.parquet")
    export.run(tmp_path / reproduce.STORE, "parquet", tmp_path / "table.parquet")
    columns = parquet.read_table(tmp_path / "table.parquet").to_pydict()
    assert sorted(columns["value"]) == sorted(point["value"] for point in document)


def test_export_of_nothing(tmp_path):
    with pytest.raises(RangeError, match=r"^RUN: there is no store at"):
        export.run(tmp_path, "csv", None)
    with pytest.raises(RangeError, match=r"^format: got 'xls'"):
        export.run(tmp_path, "xls", None)
