"""Runs to report on, and a reader of their HTML that knows nothing of how it was made."""

import json
from html.parser import HTMLParser

from curvoscope.commands import analyze, analyze_model, spectrum
from curvoscope.commands.subject import Request

KINDS = ("analyze", "analyze MODEL", "spectrum")


def run_of(kind, out):
    """A small run in `out`: its directory and its document."""
    if kind == "analyze":
        analyze.run(analyze.Configuration(5, 4, 3, "none", "softmax", "float64"), out, True)
    elif kind == "analyze MODEL":
        options = analyze_model.Options(("h.0.attn.[QV]", "positions"), matvecs=16)
        analyze_model.run(Request("addition", 1, sequences=3), options, out, True)
    else:
        spectrum.run(Request("addition", 1, sequences=3), spectrum.Options(("h.0.attn.[QV]",), 16), out, True)
    name = "spectrum.json" if kind == "spectrum" else "table.json"
    return out, json.loads((out / name).read_text())


class Page(HTMLParser):
    """Tags with their attributes, tables as lists of cells (text, value, stderr), and all text that is shown."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.tables, self.text, self._open = [], [], "", []
        self._cell = None
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)
        if tag == "table":
            self.tables.append({"caption": "", "rows": []})
        elif tag == "tr":
            self.tables[-1]["rows"].append([])
        elif tag in ("th", "td"):
            self._cell = ["", None, None]
        elif tag == "data":
            self._cell[1] = float(found["value"])
            self._cell[2] = float(found["data-stderr"]) if "data-stderr" in found else None

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag in ("th", "td"):
            self.tables[-1]["rows"][-1].append(tuple(self._cell))
            self._cell = None

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("style", "script"):
            self.text += data
        if self._cell is not None:
            self._cell[0] += data
        elif self._open and self._open[-1] == "caption":
            self.tables[-1]["caption"] += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]
