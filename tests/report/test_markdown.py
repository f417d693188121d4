"""The Markdown report says what the HTML report says."""

import json
import re

import pytest

from curvoscope.report.contents import report_of
from report_cases import KINDS, Page, run_of


def plain(text):
    """Without the escapes."""
    text = re.sub(r"\\([\\`*_{}\[\]|#~$])", r"\1", text)
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def tables(text):
    found = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            found[-1].append([plain(cell) for cell in re.split(r"(?<!\\) \| ", line[2:-2])])
        elif found[-1]:
            found.append([])
    return [[table[0], *table[2:]] for table in found if table]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tables_words_and_figures_as_in_html(kind, tmp_path):
    out, document = run_of(kind, tmp_path)
    text, page = (out / "report.md").read_text(), Page((out / "report.html").read_text())
    assert tables(text) == [[[cell[0] for cell in row] for row in table["rows"]] for table in page.tables]
    for key in ("title", "question", "answer"):
        assert document[key] in plain(text)
    assert f"```sh\n{document['command']}\n```" in text
    named = re.findall(r"!\[[^]]+\]\((.*)\)", text)
    assert sorted(named) == sorted(path.name for path in out.glob("*.png"))
    assert all(one["recommendation"] in plain(text) for one in document["advice"])
    assert all(line in plain(text) for line in document.get("missing", []))


def test_names_stay_text(tmp_path):
    _, document = run_of("some blocks", tmp_path)
    evil = "<script>alert(1)</script> **a|b** `c` [d](e)\n# f"
    document["title"] = document["rows"][0]["block"] = evil
    document["command"] = "echo '```'\n<script>"
    text = report_of(json.dumps(document), {}).markdown()
    outside = re.sub(r"(`{3,})sh\n.*?\n\1\n", "", text, flags=re.DOTALL)
    assert "<script>" not in outside and "](e)" not in re.sub(r"\\.", "", outside)
    assert tables(text)[0][1][0] == evil.replace("\n", " ")
    assert "\n````sh\necho '```'\n<script>\n````\n" in text
    assert [line for line in text.splitlines() if line.startswith("# ")] == [text.splitlines()[0]]
