"""The HTML report: its numbers are those of the JSON, it is whole by itself, and text from outside stays text."""

import base64
import itertools
import json
import re

import pytest
import torch
from rich.console import Console

import curvoscope as cv
from curvoscope.estimate import Estimate
from curvoscope.report.contents import ReportError, report_of
from report_cases import KINDS, Page, run_of

NUMBERS = ("frobenius_norm", "trace", "largest_eigenvalue")


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    return run_of(request.param, tmp_path_factory.mktemp("run") / "out")


def read(run):
    out, document = run
    text = (out / "report.html").read_text()
    return text, Page(text), document


def test_the_numbers_are_those_of_the_document(run):
    _, page, document = read(run)
    rows = page.tables[0]["rows"][1:]
    if document["kind"] == "analyze":
        expected = [row for row in document["rows"] if row["row"] == row["column"]]
        names = ("frobenius_norm", "trace", "largest_eigenvalue", "smallest_eigenvalue", "negative_share")
        for shown, row in zip(rows, expected, strict=True):
            assert [cell[0] for cell in shown[:2]] == [row["row"], row["part"]]
            assert [cell[1] for cell in shown[2:]] == [row[name] for name in (*names, "median_absolute")]
        others = [row for row in document["rows"] if row["row"] != row["column"]]
        found = [(*(cell[0] for cell in shown[:3]), shown[3][1]) for shown in page.tables[1]["rows"][1:]]
        assert found == [(row["row"], row["column"], row["part"], row["frobenius_norm"]) for row in others]
    elif document["kind"] == "analyze MODEL":
        for shown, row in zip(rows, document["rows"], strict=True):
            assert [cell[0] for cell in shown[:3]] == [row["block"], row["part"], row["method"]]
            expected = [(row[name]["value"], row[name]["stderr"]) for name in NUMBERS]
            assert [cell[1:] for cell in shown[3:]] == expected
            for text, value, _ in shown[3:]:
                assert text in ("0", "~0") or float(text.split()[0]) == pytest.approx(value, rel=0.06)
    else:
        for shown, one in zip(rows, document["blocks"], strict=True):
            quantiles = [one["quantiles"][share] for share in ("0.05", "0.5", "0.95")]
            ends = [one[f"{end}_eigenvalue"]["value"] for end in ("smallest", "largest")]
            shares = [one[f"{kind}_share"]["value"] for kind in ("negative", "near_zero")]
            assert shown[0][0] == one["block"]
            assert [cell[1] for cell in shown[1:9]] == [one["size"], ends[0], *quantiles, ends[1], *shares]
    if "hessian" in document:
        whole = next(table for table in page.tables if "whole Hessian" in table["caption"])["rows"][1:]
        names = ("largest_eigenvalue", "smallest_eigenvalue", "critical_learning_rate")
        assert [row[1][1] for row in whole] == [document["hessian"][name]["value"] for name in names]


def test_words_command_and_advice(run):
    _, page, document = read(run)
    for key in ("title", "question", "answer", "command"):
        assert document[key] in page.text
    assert all(line in page.text for line in document["about"])
    assert all(f"{name} {version}" in page.text for name, version in document["versions"].items())
    assert document["advice"] or "bear none out" in page.text
    for one in document["advice"]:
        assert one["recommendation"] in page.text and f"{one['quantity']}: {one['value']:.3g}" in page.text
    subjects = {one["subject"] for one in document["advice"]}
    assert ("learning-rate cap" in subjects) == ("hessian" in document)  # of what was measured, and of nothing else


def test_one_file_that_asks_for_no_other(run):
    text, page, _ = read(run)
    assert len(text.encode()) < 5e6
    for _, attributes in page.tags:
        assert "href" not in attributes and attributes.get("src", "data:").startswith("data:")
    assert not re.search(r"https?:|@import|url\(", text)
    policy = next(one for one in page.all("meta") if "http-equiv" in one)["content"]
    assert policy.startswith("default-src 'none'")
    files = {path.read_bytes() for path in run[0].glob("*.png")}
    assert {base64.b64decode(image["src"].partition(",")[2]) for image in page.all("img")} == files and files


def test_for_keyboard_and_screen_reader(run):
    text, page, _ = read(run)
    assert page.all("html") == [{"lang": "en"}] and len(page.all("title")) == len(page.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(len(image["alt"]) > 30 for image in page.all("img"))
    assert len(page.all("figcaption")) == len(page.all("img"))
    assert all(table["caption"] for table in page.tables)
    columns = [one for one in page.all("th") if one["scope"] == "col"]
    assert all(one["aria-sort"] == "none" for one in columns) and len(page.all("button")) == len(columns)
    assert len([one for one in page.all("th") if one["scope"] == "row"]) == sum(len(t["rows"]) - 1 for t in page.tables)
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(identifiers)) == len(identifiers)
    assert {one["aria-labelledby"] for one in page.all("section")} <= set(identifiers)
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_contrast_is_that_of_wcag_aa(run):
    text, _, _ = read(run)
    schemes = re.findall(r":root \{([^}]*--page[^}]*)\}", text)
    assert len(schemes) == 3  # light, dark, print
    for scheme in schemes:
        colors = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for front in ("text", "soft", "mark"):
            for back in ("page", "band"):
                low, high = sorted(luminance(colors[name]) for name in (front, back))
                assert (high + 0.05) / (low + 0.05) >= 4.5


def test_script_stays_text(tmp_path):
    _, document = run_of("analyze MODEL", tmp_path)
    evil = '</script><script>alert("1")</script><img src=x onerror=alert(1)>'
    for key in ("title", "question", "answer", "command"):
        document[key] = evil
    document["about"] = [evil]
    document["versions"] = {evil: evil}
    document["rows"][0] |= {"block": evil, "method": evil}
    document["advice"][0] |= {"subject": evil, "recommendation": evil, "quantity": evil, "settings": {evil: 1, "b": 2}}
    report = report_of(json.dumps(document), {})
    for text, scripts in ((report.html(), 1), (report._repr_html_(), 0)):
        page = Page(text)
        assert len(page.all("script")) == scripts and not page.all("img")
        assert page.text.count(evil) >= 6


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is no whole JSON document"),
        (lambda text: "", "is no whole JSON document"),
        (lambda text: "[]", "is of another kind"),
        (lambda text: '{"results": [], "holds": true}', "is of another kind"),
        (lambda text: text.replace('"kind": "', '"kind": "un'), "is of another kind"),
        (lambda text: text.replace('"command"', '"order"'), "is of another kind"),
    ],
)
def test_documents_that_are_no_runs(run, damage, message):
    text = json.dumps(run[1])
    with pytest.raises(ReportError, match=f"^RUN: {message}") as caught:
        report_of(damage(text), {})
    assert "\n" not in str(caught.value)


def shown(thing):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(thing)
    return console.export_text()


class TestNotebooksAndTerminals:
    def test_a_report(self, run):
        report = report_of(json.dumps(run[1]), {})
        fragment = Page(report._repr_html_())
        assert run[1]["answer"] in fragment.text and not fragment.all("script")
        assert fragment.tables[0]["rows"][1:] == Page(report.html()).tables[0]["rows"][1:]
        assert " ".join(run[1]["question"].split()) in " ".join(shown(report).split())

    def test_an_estimate(self):
        estimate = Estimate(1.5, 0.25, 64, "<b>")
        assert Page(estimate._repr_html_()).text == "1.5 ± 0.2 (<b>, 64 products)"
        assert shown(estimate).strip() == "1.5 ± 0.2 (<b>, 64 products)"
        assert shown(Estimate(1.5, 0.0, 0, "[red]exact")).strip() == "1.5 ± 0 ([red]exact)"

    def test_a_hessian(self):
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(3, 2, generator=generator, dtype=torch.float64) for _ in range(3)]
        X = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        H = cv.exact.SelfAttention(*weights).hessian(X, cv.losses.MSE(torch.zeros(4, 2, dtype=torch.float64)))
        page = Page(H._repr_html_())
        assert [tuple(cell[0] for cell in row) for row in page.tables[0]["rows"][1:]] == [
            (name, "3 × 2", "6") for name in "QKV"
        ]
        assert "18 × 18, float64" in page.tables[0]["caption"] and "18 × 18, float64" in shown(H)
        H.total.shapes["<i>"] = (1, 1)
        assert not Page(H._repr_html_()).all("i") and "<i>" in Page(H._repr_html_()).text
