"""The HTML report: its numbers are those of the JSON, it is whole by itself, and text from outside stays text."""

import itertools
import json
import re

import pytest
import torch
from rich.console import Console

import curvoscope as cv
from curvoscope.estimate import Estimate
from curvoscope.report.contents import ReportError, report_of
from curvoscope.report.vector import VectorError, inline
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
    checks = {"watch": watched, "reproduce": reproduced, "sensitivity": costs}
    if document["kind"] in checks:
        checks[document["kind"]](page, document)
        return
    if document["kind"] == "analyze":
        for shown, row in zip(rows, document["rows"], strict=True):
            assert [cell[0] for cell in shown[:3]] == [row["block"], row["part"], row["method"]]
            expected = [(row[name]["value"], row[name]["stderr"]) for name in NUMBERS]
            assert [cell[1:] for cell in shown[3:]] == expected
            for text, value, _ in shown[3:]:
                assert text in ("0", "~0") or float(text.split()[0]) == pytest.approx(value, rel=0.06)
        found = [(*(cell[0] for cell in shown[:3]), *shown[3][1:]) for shown in table(page, "Off-diagonal")]
        norms = [one["frobenius_norm"] for one in document["pairs"]]
        names = [(one["row"], one["column"], one["part"]) for one in document["pairs"]]
        assert found == [(*name, norm["value"], norm["stderr"]) for name, norm in zip(names, norms, strict=True)]
        found = [(shown[0][0], shown[1][0], shown[2][1]) for shown in table(page, "Entries")]
        assert found == [(one["block"], one["part"], one["median"]) for one in document["histograms"]]
        if document["dense"]:
            all_entries(page, document)
    else:
        for shown, one in zip(rows, document["blocks"], strict=True):
            quantiles = [one["quantiles"][share] for share in ("0.05", "0.5", "0.95")]
            ends = [one[f"{end}_eigenvalue"]["value"] for end in ("smallest", "largest")]
            shares = [one[f"{kind}_share"]["value"] for kind in ("negative", "near_zero")]
            assert shown[0][0] == one["block"]
            assert [cell[1] for cell in shown[1:9]] == [one["size"], ends[0], *quantiles, ends[1], *shares]
    if "hessian" in document:
        names = ("largest_eigenvalue", "smallest_eigenvalue", "critical_learning_rate")
        whole = [row[1][1] for row in table(page, "The whole Hessian")]
        assert whole == [document["hessian"][name]["value"] for name in names]
    moments = ("entropy", "first", "second", "third")
    shown = [(row[0][0], row[1][0], *(cell[1] for cell in row[2:])) for row in table(page, "Attention moments")]
    heads = document["attention"]
    assert shown == [(one["layer"], str(one["head"]), *(one[name]["value"] for name in moments)) for one in heads]
    assert len(heads) == 1
    if document.get("depth"):
        assert [row[0][0] for row in table(page, "Curvature at")] == [one["layer"] for one in document["depth"]]
        assert [row[1][1] for row in table(page, "Curvature at")] == [
            one["spectral"]["value"] for one in document["depth"]
        ]


def table(page, beginning):
    """The rows of the table whose caption begins so."""
    return next(one for one in page.tables if one["caption"].startswith(beginning))["rows"][1:]


def all_entries(page, document):
    expected = [row for row in document["dense"] if row["row"] == row["column"]]
    names = ("frobenius_norm", "trace", "largest_eigenvalue", "smallest_eigenvalue", "negative_share")
    for shown, row in zip(table(page, "Diagonal blocks"), expected, strict=True):
        assert [cell[0] for cell in shown[:2]] == [row["row"], row["part"]]
        assert [cell[1] for cell in shown[2:]] == [row[name] for name in (*names, "median_absolute")]
    others = [row for row in document["dense"] if row["row"] != row["column"]]
    found = [(*(cell[0] for cell in shown[:3]), shown[3][1]) for shown in table(page, "Pairs of blocks")]
    assert found == [(row["row"], row["column"], row["part"], row["frobenius_norm"]) for row in others]
    assert document["verdict"] in page.text


def costs(page, document):
    names = ("first", "outer", "functional", "second")
    for shown, row in zip(table(page, "What each block"), document["rows"], strict=True):
        assert shown[0][0] == row["block"] and [cell[1] for cell in shown[2:6]] == [row[n]["value"] for n in names]
        assert [cell[1:] for cell in shown[7:]] == [(row[n]["value"], row[n]["stderr"]) for n in ("alone", "measured")]
    whole = [[cell[1] for cell in shown[1:]] for shown in table(page, "Change of the loss")]
    names = ("predicted", "measured", "remainder")
    assert whole == [[one[name]["value"] for name in names] for one in document["scaled"]]
    pairs = {(shown[0][0], shown[1][0]): shown[2][1] for shown in table(page, "Interactions")}
    assert pairs == {(one["row"], one["column"]): one["second"]["value"] for one in document["pairs"]}
    ranks = {shown[0][0]: shown[1][1] for shown in table(page, "Rank correlation")}
    assert ranks == {one["score"]: one["correlation"]["value"] for one in document["ranks"]}
    chosen = [(shown[0][0], shown[3][1]) for shown in table(page, "Formats for 9 bits")]
    assert chosen == [(one["by"], one["measured"]["value"]) for one in document["allocations"]]


def watched(page, document):
    rows = table(page, "Measurements")
    assert len(rows) == len(document["records"]) == 4
    for shown, one in zip(rows, document["records"], strict=True):
        top, lr = one["largest_eigenvalue"], one["lr"]
        assert shown[0][0] == str(one["step"]) and shown[2][1:] == (top["value"], top["stderr"])
        assert [shown[i][1] for i in (1, 3, 6)] == [one["probe_loss"], 2 / lr, one["gradient_norm"]]
        assert shown[4][1] == pytest.approx(top["value"] * lr / 2)
        assert (shown[8][1] is None) == (one["details"] is None)
    blocks = document["records"][-1]["details"]["blocks"]
    found = {row[0][0]: (row[1][1], row[2][1]) for row in table(page, "Diagonal blocks at step 31")}
    assert found == {name: (one["outer"]["value"], one["functional"]["value"]) for name, one in blocks.items()}
    assert [cell[0] for cell in table(page, "Measurements that")[0]] == ["12", "paused", "the loss is <nan>"]
    assert "above it in 2 of 4 measurements" in document["answer"]
    assert "at most 1.5 of the edge of plain gradient descent, 2/lr (step 31)" in document["answer"]


def reproduced(page, document):
    (one,) = document["figures"]
    words = {True: "agrees", False: "DISAGREES", None: "no prediction"}
    for shown, verdict in zip(table(page, "toy"), one["verdicts"], strict=True):
        assert [cell[0] for cell in shown[:2]] == [verdict["statement"], words[verdict["agrees"]]]
        assert [cell[1] for cell in shown[2:]] == [verdict[name] for name in ("predicted", "fitted", "low", "high")]
    assert "Of 2 predictions in 1 figure, 1 agree" in document["answer"] and "toy: grows as σ^3" in document["answer"]
    assert "How does a square grow?" in page.text and "A remark." in page.text


def test_words_command_and_advice(run):
    _, page, document = read(run)
    for key in ("title", "question", "answer", "command"):
        assert document[key] in page.text
    assert all(line in page.text for line in document["about"])
    assert all(f"{name} {version}" in page.text for name, version in document["versions"].items())
    assert ("Advice" in page.text) == bool(document["advice"])
    for one in document["advice"]:
        assert one["recommendation"] in page.text and f"{one['quantity']}: {one['value']:.3g}" in page.text
    subjects = {one["subject"] for one in document["advice"]}
    # of what was measured, and of nothing else
    assert ("learning-rate cap" in subjects) == ("hessian" in document or document["kind"] == "watch")
    assert all(line in page.text for line in document.get("missing", []))
    assert document["seed"] is None or f"Seed: {document['seed']}" in page.text


def test_one_file_that_asks_for_no_other(run):
    text, page, _ = read(run)
    assert len(text.encode()) < 5e6
    for tag, attributes in page.tags:
        assert attributes.get("src", "data:").startswith("data:")
        assert tag in ("use", "image") or "href" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"https?:|@import|url\((?!#f\d)", text)
    policy = next(one for one in page.all("meta") if "http-equiv" in one)["content"]
    assert policy.startswith("default-src 'none'")
    assert len(page.all("figure")) == len(page.all("svg")) == len(list(run[0].glob("*.png"))) > 0
    assert not page.all("img")


def test_for_keyboard_and_screen_reader(run):
    text, page, _ = read(run)
    assert page.all("html") == [{"lang": "en"}] and len(page.all("title")) == len(page.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(one["role"] == "img" and len(one["aria-label"]) > 30 for one in page.all("svg"))
    assert len(page.all("figcaption")) == len(page.all("svg"))
    assert all(table["caption"] for table in page.tables)
    columns = [one for one in page.all("th") if one["scope"] == "col"]
    assert all(one["aria-sort"] == "none" for one in columns) and len(page.all("button")) == len(columns)
    assert len([one for one in page.all("th") if one["scope"] == "row"]) == sum(len(t["rows"]) - 1 for t in page.tables)
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(identifiers)) == len(identifiers)
    assert {one["aria-labelledby"] for one in page.all("section")} <= set(identifiers)
    assert "color-scheme: light dark" in text and "@media print" in text


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_contrast_is_that_of_wcag_aa(run):
    text, _, _ = read(run)
    both = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", text)
    paper = dict(re.findall(r"--(\w+): (#\w{6});", text.partition("@media print")[2]))
    assert {"page", "band", "text", "chosen"} <= {name for name, _, _ in both} and paper["page"] == "#ffffff"
    light, dark = ({name: pair[scheme] for name, *pair in both} for scheme in (0, 1))
    for colors in (light, dark, light | paper):
        for front in ("text", "soft", "mark", "blue", "orange", "green", "purple", "yellow", "sky"):
            for back in ("page", "band", *(["chosen"] if front in ("text", "mark") else [])):
                low, high = sorted(luminance(colors[name]) for name in (front, back))
                assert (high + 0.05) / (low + 0.05) >= 4.5


def test_script_stays_text(tmp_path):
    _, document = run_of("some blocks", tmp_path)
    evil = '</script><script>alert("1")</script><img src=x onerror=alert(1)>'
    for key in ("title", "question", "answer", "command"):
        document[key] = evil
    document["about"] = [evil]
    document["versions"] = {evil: evil}
    document["rows"][0] |= {"block": evil, "method": evil}
    document["advice"][0] |= {"subject": evil, "recommendation": evil, "quantity": evil, "settings": {evil: 1, "b": 2}}
    report = report_of(json.dumps(document), {})
    for text, scripts in ((report.html(), 2), (report._repr_html_(), 0)):
        page = Page(text)
        assert len(page.all("script")) == scripts and not page.all("img")
        assert page.text.count(evil) >= 6


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not a complete JSON document"),
        (lambda text: "", "is not a complete JSON document"),
        (lambda text: "[]", "is not a document of"),
        (lambda text: '{"results": [], "holds": true}', "is not a document of"),
        (lambda text: text.replace('"kind": "', '"kind": "un'), "is not a document of"),
        (lambda text: text.replace('"command"', '"order"'), "is not a document of"),
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


def test_a_drawing_that_declares_entities_is_no_vector_drawing():
    bomb = '<!DOCTYPE svg [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><svg viewBox="0 0 1 1"><g id="&b;"/></svg>'
    for content in (bomb.encode(), bomb.encode("utf-16")):
        with pytest.raises(VectorError):
            inline(content, "p", "label")
    assert inline(b'<svg viewBox="0 0 1 1"><g id="a"/></svg>', "p", "label").count("<g") == 1
