"""`curvoscope report RUN`: the report again, from the files of a run."""

import json

import pytest

from curvoscope.commands import report
from curvoscope.commands.document import REPORTS
from curvoscope.report.contents import ReportError
from model_folders import saved
from report_cases import KINDS, Page, run_of


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
    for path in out.glob("*.png"):
        path.unlink()
    report.run(out / "spectrum.json")
    page = Page((out / "report.html").read_text())
    assert not page.all("img") and "Figures" not in page.text


def test_a_folder_named_script(tmp_path):
    from curvoscope.commands import analyze_model
    from curvoscope.commands.subject import Request

    folder = tmp_path / "a<" / "script><script>alert(1)<" / "script>"
    saved(folder)
    options = analyze_model.Options(("h.0.attn.V",), matvecs=4)
    analyze_model.run(Request(str(folder), 0, sequences=2, length=6), options, tmp_path / "out", True)
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert len(page.all("script")) == 1 and page.text.count(str(folder)) >= 4
    assert "<script" not in (tmp_path / "out" / "report.md").read_text().split("```")[0]


class TestErrors:
    def test_a_missing_run(self, tmp_path):
        for path in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(ReportError, match=r"^RUN: there is no table.json or spectrum.json in"):
                report.run(path)

    def test_two_runs_in_one_directory(self, tmp_path):
        for name in report.DOCUMENTS:
            (tmp_path / name).write_text("{}")
        with pytest.raises(ReportError, match="give one of the two files"):
            report.run(tmp_path)

    @pytest.mark.parametrize(
        "content", [b'{"kind": "analyze", "rows": [', b"\xff\xfe", json.dumps({"rows": []}).encode()]
    )
    def test_a_document_that_is_damaged_leaves_the_old_report(self, tmp_path, content):
        (tmp_path / "report.html").write_text("old")
        (tmp_path / "table.json").write_bytes(content)
        with pytest.raises(ReportError, match=r"^RUN: ") as caught:
            report.run(tmp_path)
        assert str(caught.value).count("\n") == 0 and (tmp_path / "report.html").read_text() == "old"
