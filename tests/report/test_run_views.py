"""What the interactive part of a page draws: the numbers of the document, and text that cannot leave its script."""

import json
import math
import random

import pytest

from curvoscope.blocks import layer_and_role
from curvoscope.report import run_views
from curvoscope.report.comparison import side_by_side
from curvoscope.report.contents import report_of
from curvoscope.report.run_views import NORM
from curvoscope.report.views import as_json
from report_cases import DOCUMENTS, KINDS, Page, model_document, run_of

LABELS = {NORM: "frobenius_norm", "trace": "trace", "λ max": "largest_eigenvalue"}


def embedded(text):
    """The data that a page carries, read as a browser does: up to the end of the script."""
    return json.loads(text.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])["runs"]


def cell(view, one, row, column):
    """Of a heat map as the page stores it: lower triangle, or row by row."""
    places = {block["name"]: i for i, block in enumerate(view["blocks"])}
    if one["axis"] != "block":
        return one["values"][places[row] * len(one["columns"]) + one["columns"].index(column)]
    i, j = sorted((places[row], places[column]), reverse=True)
    return one["values"][i * (i + 1) // 2 + j]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_numbers_of_an_analysis(seed):
    document = model_document(seed=seed)
    (view,) = embedded(report_of(json.dumps(document), {}).html())
    for row, shown in zip(document["rows"], view["rows"], strict=True):
        assert (row["block"], row["part"], row["method"]) == (shown["block"], shown["part"], shown["method"])
        assert shown["numbers"] == {label: [row[key]["value"], row[key]["stderr"]] for label, key in LABELS.items()}
    for block in view["blocks"]:
        assert (block["layer"], block["role"]) == (
            layer_and_role(block["name"]) or ("outside of the layers", block["name"])
        )
    maps = {one["part"]: one for one in view["maps"]}
    assert set(maps) == {"outer", "functional", "total"}
    for pair in document["pairs"]:
        for names in ((pair["row"], pair["column"]), (pair["column"], pair["row"])):
            assert cell(view, maps[pair["part"]], *names) == pair["frobenius_norm"]["value"]
    for row in document["rows"]:
        assert cell(view, maps[row["part"]], row["block"], row["block"]) == row["frobenius_norm"]["value"]


@pytest.mark.slow
def test_every_kind_of_run_is_shown(tmp_path):
    for kind in KINDS:
        out, document = run_of(kind, tmp_path / kind)
        views = embedded((out / "report.html").read_text())
        if kind == "reproduce":
            assert views == []
            continue
        (view,) = views
        names = [block["name"] for block in view["blocks"]]
        rows = document.get("rows") or document.get("blocks")
        if kind == "watch":
            assert names == list(document["records"][-1]["details"]["blocks"])
            (outer, _) = view["maps"]
            known = {str(one["step"]): one["details"]["blocks"] for one in document["records"] if one["details"]}
            assert outer["columns"] == list(known)
            for step, blocks in known.items():
                for name, norms in blocks.items():
                    assert cell(view, outer, name, step) == norms["outer"]["value"]
        else:
            assert names == list(dict.fromkeys(row["block"] for row in rows))
        if kind == "spectrum":
            known = document["jensen_shannon"]
            assert cell(view, view["maps"][0], *known["names"]) == known["distance"][1][0]
            assert [one["y"] for one in view["curves"]] == [one["cumulative"]["value"] for one in document["blocks"]]


def test_many_pairs_have_fewer_digits(monkeypatch):
    monkeypatch.setattr(run_views, "_MOST_CELLS", 10)
    document = model_document()
    (view,) = embedded(report_of(json.dumps(document), {}).html())
    for one in view["maps"]:
        assert all(value == float(f"{value:.5g}") for value in one["values"])
    pair = random.Random(0).choice(document["pairs"])
    shown = cell(view, next(one for one in view["maps"] if one["part"] == pair["part"]), pair["row"], pair["column"])
    assert math.isclose(shown, pair["frobenius_norm"]["value"], rel_tol=5e-5)


def test_no_text_of_a_run_ends_the_script():
    evil = "</script><script>alert(1)</script><!--"
    document = model_document(layers=1)
    document["rows"][0]["block"] = evil
    report = report_of(json.dumps(document), {})
    assert "<" not in as_json(report.views)
    assert embedded(report.html())[0]["blocks"][0]["name"] == evil
    assert len(Page(report.html()).all("script")) == 2


class TestSideBySide:
    def test_numbers_ratios_and_what_is_missing(self):
        documents = {"before": model_document(2, 0), "after": model_document(3, 1)}
        reports = {label: report_of(json.dumps(one), {}) for label, one in documents.items()}
        report = side_by_side(reports)
        first = report.tables[0]
        assert first.columns == ("block", "part", "before", "after", "after / before") and report.sections[0].explored
        rows = {
            label: {(one["block"], one["part"]): one for one in found["rows"]} for label, found in documents.items()
        }
        assert {(line[0].text, line[1].text) for line in first.rows} == set(rows["before"]) | set(rows["after"])
        ratios = []
        for block, part, before, after, ratio in first.rows:
            new = rows["after"][block.text, part.text]["frobenius_norm"]
            assert (after.value, after.stderr) == (new["value"], new["stderr"])
            if (block.text, part.text) not in rows["before"]:
                assert before.text == "not in this run" and before.value is None and ratio.value is None
                continue
            old = rows["before"][block.text, part.text]["frobenius_norm"]
            assert (before.value, before.stderr) == (old["value"], old["stderr"])
            assert ratio.value == pytest.approx(new["value"] / old["value"])
            relative = sum((one["stderr"] / one["value"]) ** 2 for one in (new, old))
            assert ratio.stderr == pytest.approx(abs(ratio.value) * relative**0.5)
            ratios.append(ratio.value)
        assert f"is {min(ratios):.3g} to {max(ratios):.3g} times" in report.answer
        assert (
            report.sections[0].text
            == "before does not have "
            + ", ".join(f"h.2.{role}" for role in ("norm1", "attn.Q", "attn.K", "attn.V", "mlp.up"))
            + "."
        )
        assert [view.label for view in report.views] == ["before", "after"]
        page = Page(report.html())
        assert [view["label"] for view in embedded(report.html())] == ["before", "after"]
        assert page.tables[0]["rows"][0][4][0] == "after / before"

    def test_the_spectra_of_a_run_are_those_of_the_total_of_another(self, tmp_path):
        reports = {}
        for kind in ("some blocks", "spectrum"):
            out, _ = run_of(kind, tmp_path / kind)
            reports[kind] = report_of((out / DOCUMENTS[kind]).read_text(), {})
        tables = {table.caption.partition(":")[0]: table for table in side_by_side(reports).tables}
        known = {
            (line[0].text, line[1].text)
            for line in tables["λ max"].rows
            if None not in (line[2].value, line[3].value, line[4].value)
        }
        assert known == {(f"h.0.attn.{role}", "total") for role in "QV"}

    def test_a_number_that_is_zero_to_rounding_has_no_ratio(self):
        documents = [model_document(1, seed) for seed in range(2)]
        documents[0]["rows"][0]["frobenius_norm"] |= {"value": 1e-7, "stderr": 0.0}
        report = side_by_side({str(i): report_of(json.dumps(one), {}) for i, one in enumerate(documents)})
        line = report.tables[0].rows[0]
        assert (line[2].text, line[4].text) == ("~0", "")

    def test_figures_of_a_kind_stand_together(self, tmp_path):
        runs = [run_of("watch", tmp_path / name)[0] for name in ("a", "b")]
        files = [{one.name: one.read_bytes() for one in run.glob("*.svg")} for run in runs]
        text = (runs[0] / "watch.json").read_text()
        report = side_by_side({name: report_of(text, found) for name, found in zip("ab", files, strict=True)})
        sharpness = next(section for section in report.sections if section.title == "Sharpness and the edge")
        assert [one.caption.partition(":")[0] for one in sharpness.figures] == ["a", "b", "a", "b"] or [
            one.caption.partition(":")[0] for one in sharpness.figures
        ] == ["a", "a", "b", "b"]
        assert report.html().count("<svg role") == 2 * len(files[0])

    def test_runs_without_blocks(self, tmp_path):
        out, _ = run_of("reproduce", tmp_path)
        one = report_of((out / "reproduce.json").read_text(), {})
        report = side_by_side({"a": one, "b": one})
        assert report.answer == "The runs have no blocks of a model in common." and report.views == []
        assert "grows as" in report.html()
