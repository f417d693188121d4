"""`curvoscope report RUN`: the report again, from the files of a run."""

import base64
import json

import pytest

from curvoscope.commands import report
from curvoscope.commands.document import REPORTS
from curvoscope.papers.experiments import Store
from curvoscope.report.contents import ReportError
from curvoscope.training import Incident, RunStore
from model_folders import saved
from report_cases import KINDS, Page, run_of, training_records


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_again(kind, tmp_path, capsys):
    out, _ = run_of(kind, tmp_path)
    before = [(out / name).read_bytes() for name in REPORTS]
    for name in REPORTS:
        (out / name).unlink()
    capsys.readouterr()
    report.run(out)
    assert capsys.readouterr().out == "".join(f"wrote {out / name}\n" for name in REPORTS)
    assert [(out / name).read_bytes() for name in REPORTS] == before


def test_a_document_without_its_figures(tmp_path):
    out, _ = run_of("spectrum", tmp_path)
    for path in (*out.glob("*.png"), *out.glob("*.svg")):
        path.unlink()
    report.run(out / "spectrum.json")
    page = Page((out / "report.html").read_text())
    assert not page.all("img") and not page.all("svg") and not page.all("figure")


@pytest.mark.parametrize("damaged", [b"<svg", b"<html/>", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x00"])
def test_a_damaged_svg_gives_way_to_the_png(tmp_path, damaged):
    out, _ = run_of("reproduce", tmp_path)
    (out / "toy.svg").write_bytes(damaged)
    report.run(out)
    page = Page((out / "report.html").read_text())
    (image,) = page.all("img")
    assert not page.all("svg") and len(image["alt"]) > 30
    assert base64.b64decode(image["src"].partition(",")[2]) == (out / "toy.png").read_bytes()


def test_no_script_comes_in_with_an_svg(tmp_path):
    out, _ = run_of("reproduce", tmp_path)
    (out / "toy.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" onload="alert(1)"><script>alert(1)</script>'
        '<g id="a" onclick="alert(1)"><path d="M 0 0 L 9 9" style="stroke: #000000"/></g>'
        '<use href="javascript:alert(1)"/><image href="http://a.b/c.png"/><foreignObject><p>x</p></foreignObject></svg>'
    )
    report.run(out)
    text = (out / "report.html").read_text()
    page = Page(text)
    assert "alert" not in text and "a.b" not in text and not page.all("foreignobject")
    assert len(page.all("script")) == 2 and len(page.all("svg")) == 1
    assert page.all("path")[0]["style"] == "stroke: currentColor"


def test_a_training_run_that_was_killed(undrawn, tmp_path, capsys):
    records = training_records()
    with RunStore(tmp_path / "store.sqlite") as store:
        run = store.run("run 1", {"configuration": {"steps": 9, "optimizer": "adam"}, "versions": {"torch": "2"}})
        for record in records:
            run.add(record)
        run.note(Incident(35, "failed", "out of memory"))
    report.run(tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "did not finish: these are the 4 measurements up to step 35" in page.text
    assert "out of memory" in page.text and "curvoscope watch --steps 9 --optimizer adam" in page.text
    document = json.loads((tmp_path / "watch.json").read_text())
    assert document["records"] == [json.loads(json.dumps(one.facts())) for one in records]
    assert not any(one["subject"] == "learning-rate cap" for one in document["advice"])  # 2/λ_max is none of Adam's


def test_a_folder_named_script(undrawn, tmp_path):
    from curvoscope.commands import analyze
    from curvoscope.commands.subject import Request

    folder = tmp_path / "a<" / "script><script>alert(1)<" / "script>"
    saved(folder)
    options = analyze.AnalyzeOptions(("h.0.attn.V",), matvecs=4)
    analyze.run(Request(str(folder), 0, sequences=2, length=6), options, tmp_path / "out", True)
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert len(page.all("script")) == 2 and page.text.count(str(folder)) >= 2  # the command, and what was measured
    assert page.text.count(f"Curvature of {folder.name}") == 2  # the window's title and the page's
    assert "<script" not in (tmp_path / "out" / "report.md").read_text().split("```")[0]


class TestErrors:
    def test_a_missing_run(self, tmp_path):
        with pytest.raises(ReportError, match=r"^RUN: there is no .*; give the directory of a run"):
            report.run(tmp_path / "nowhere")
        with pytest.raises(ReportError, match=r"^RUN: there is no table.json, .* or reproduce.json in .*: no run has"):
            report.run(tmp_path)

    def test_two_runs_in_one_directory(self, tmp_path):
        for name in ("table.json", "audit.json"):
            (tmp_path / name).write_text("{}")
        with pytest.raises(ReportError, match=r"holds table.json and audit.json; give one of the files"):
            report.run(tmp_path)

    def test_a_reproduction_that_did_not_finish(self, tmp_path):
        with Store(tmp_path / "store.sqlite"):
            pass
        with pytest.raises(ReportError, match=r"did not finish; run its command again, its measurements are kept"):
            report.run(tmp_path)

    def test_a_training_run_without_measurements(self, tmp_path):
        with RunStore(tmp_path / "store.sqlite") as store:
            with pytest.raises(ReportError, match=r"^RUN: .* contains no run"):
                report.run(tmp_path)
            store.run("run 1", {"configuration": {}, "versions": {}})
        with pytest.raises(ReportError, match=r"^RUN: contains no records: nothing was measured"):
            report.run(tmp_path)

    @pytest.mark.parametrize("damage", [lambda one: one.pop("largest_eigenvalue"), lambda one: one.update(new=1)])
    def test_a_record_that_is_damaged(self, tmp_path, damage):
        out, document = run_of("watch", tmp_path)
        damage(document["records"][1])
        (out / "watch.json").write_text(json.dumps(document))
        with pytest.raises(ReportError, match=r"^RUN: contains a record that cannot be read"):
            report.run(out)

    def test_the_command_says_it_in_one_line(self, tmp_path, call):
        (tmp_path / "table.json").write_text('{"kind": "analyze", "rows": [')
        code, out, err = call("report", tmp_path)
        assert code == 2 and not out and err.count("\n") == 1 and "is not a complete JSON document" in err

    @pytest.mark.parametrize(
        "content", [b'{"kind": "analyze", "rows": [', b"\xff\xfe", json.dumps({"rows": []}).encode()]
    )
    def test_a_document_that_is_damaged_leaves_the_old_report(self, tmp_path, content):
        (tmp_path / "report.html").write_text("old")
        (tmp_path / "table.json").write_bytes(content)
        with pytest.raises(ReportError, match=r"^RUN: ") as caught:
            report.run(tmp_path)
        assert str(caught.value).count("\n") == 0 and (tmp_path / "report.html").read_text() == "old"


def test_figures_of_an_earlier_run_in_the_same_directory_stay_out(tmp_path):
    everything, _ = run_of("analyze", tmp_path / "all")
    out, document = run_of("some blocks", tmp_path / "some")
    before = (out / "report.html").read_text()
    assert "norms" in document["pictures"] and "depth" not in document["pictures"]
    for kind in ("png", "svg"):
        (out / f"depth.{kind}").write_bytes((everything / f"depth.{kind}").read_bytes())
    report.run(out)
    assert (out / "report.html").read_text() == before
    del document["pictures"]  # a document of an older version: all figures beside it are its own
    (out / "table.json").write_text(json.dumps(document))
    report.run(out)
    assert (out / "report.html").read_text() != before
