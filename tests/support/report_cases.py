"""Runs to report on, and a reader of their HTML that knows nothing of how it was made."""

import atexit
import json
import math
import random
import shutil
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from curvoscope import commands
from curvoscope.analysis.propagation import AttentionSummary
from curvoscope.commands import analyze, reproduce_report, sensitivity, spectrum, watch_report
from curvoscope.commands.subject import Request
from curvoscope.estimate import Estimate
from curvoscope.papers.experiments import Figure, MeasuredValue, Row, Verdict
from curvoscope.papers.experiments.panel_figures import draw, encode
from curvoscope.papers.experiments.panels import Guide, Panel, Series
from curvoscope.papers.experiments.setting import Setting
from curvoscope.training import Incident, Record
from curvoscope.training.records import BlockNorms, Details

KINDS = ("analyze", "some blocks", "spectrum", "sensitivity", "watch", "reproduce")
NAMES = ("table.json", "table.json", "spectrum.json", "sensitivity.json", "watch.json", "reproduce.json")
DOCUMENTS = dict(zip(KINDS, NAMES, strict=True))
_MADE = {}


def run_of(kind, out):
    """A small run in `out`: its directory and its document. Made once, and then copied."""
    made = _MADE.get(kind)
    if made is None:
        made = _MADE[kind] = Path(tempfile.mkdtemp(prefix="curvoscope-")) / "run"
        atexit.register(shutil.rmtree, made.parent, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commands, "png", lambda figure: b"\x89PNG")  # the pages show the SVG
            _make(kind, made)
    shutil.copytree(made, out, dirs_exist_ok=True)
    return out, json.loads((out / DOCUMENTS[kind]).read_text())


def _make(kind, out):
    if kind == "analyze":
        analyze.run(Request("addition", 5, sequences=3, d=4), analyze.AnalyzeOptions(), out, True)
    elif kind == "some blocks":
        options = analyze.AnalyzeOptions(("h.0.attn.[QV]", "positions"), matvecs=16)
        analyze.run(Request("addition", 1, sequences=3), options, out, True)
    elif kind == "spectrum":
        spectrum.run(Request("addition", 1, sequences=3), spectrum.SpectrumOptions(("h.0.attn.[QV]",), 16), out, True)
    elif kind == "sensitivity":
        options = sensitivity.SensitivityOptions(recipe="int4", group=4, budget=9.0)
        sensitivity.run(Request("addition", 1, sequences=3, d=4), options, out, True)
    elif kind == "watch":
        out.mkdir(parents=True, exist_ok=True)
        watch_report.write_report(out, training_facts())
    else:
        out.mkdir(parents=True, exist_ok=True)
        figure, rows = growth()
        (out / "toy.png").write_bytes(encode(draw(figure.title, figure.panels(rows), 1), "png"))
        reproduce_report.write_report(out, {"toy": rows}, [figure], True, ["toy"])


def training_records(steps=(1, 11, 21, 31)):
    """Records of a run that nobody made: a sharpness that rises to 1.5 times the edge 2/lr = 20."""

    def estimate(value):
        return Estimate(value, 0.1 * abs(value), 16, "random signs", 7.0)

    def details(step):
        blocks = {name: BlockNorms(estimate(step / size), estimate(size / 50)) for name, size in (("a.Q", 3), ("V", 7))}
        fields = {
            one: estimate(1.0 + step) for one in Details.__dataclass_fields__ if one not in ("blocks", "condition")
        }
        return Details(**fields, condition=None, blocks=blocks)

    return [
        Record(
            step=step,
            loss=2.0,
            lr=0.1,
            probe_loss=2 / step,
            largest_eigenvalue=estimate(30.0 * step / steps[-1]),
            gradient_norm=1 + math.sin(step),
            gradient_curvature=1.0,
            critical_sharpness=None if step == 1 else estimate(9.0),
            attention={"h.0.attn": AttentionSummary(1.5, 0.5)},
            details=None if step == 11 else details(step),
            seconds=0.01,
        )
        for step in steps
    ]


def training_facts():
    """The facts that `curvoscope watch` writes."""
    return {
        "kind": "watch",
        "title": "Curvature during training on addition",
        "about": ["GPT2, 3,996 parameters."],
        "configuration": {"steps": 40, "seed": 3, "optimizer": "sgd", "lr": 0.1},
        "command": "curvoscope watch --steps 40 --seed 3 --optimizer sgd --lr 0.1",
        "versions": {"curvoscope": "0", "torch": "2"},
        "seed": 3,
        "steps": 40,
        "records": [one.facts() for one in training_records()],
        "incidents": [Incident(12, "paused", "the loss is <nan>").facts()],
    }


def growth():
    """A figure of y = σ², with a prediction that holds and one that does not."""
    points = [{"sigma": sigma} for sigma in (0.5, 1.0, 2.0)]
    rows = [Row(point, 0, MeasuredValue(1, "Q", "outer", point["sigma"] ** 2)) for point in points]
    x, y = [row.point["sigma"] for row in rows], [row.found.value for row in rows]
    panel = Panel("outer Q", series=[Series("Q", x, y, [0.1] * 3)], guides=[Guide("σ^2", x, y)])
    figure = Figure(
        name="toy",
        title="Growth of a square",
        question="How does a square grow?",
        configuration=Setting(),
        points=points,
        seeds=1,
        quick_points=points,
        quick_seeds=1,
        measure=lambda *arguments: [],
        verdicts=lambda found: [
            Verdict("grows as σ^2", "Q", "outer", 1, 2.0, 2.0, 1.9, 2.1, True),
            Verdict("grows as σ^3", "V", "outer", 1, 3.0, 2.0, 1.9, 2.1, False),
            Verdict("of <unknown> growth", "K", "outer", 1, None, 1.0, None, math.inf, None),
        ],
        panels=lambda found: [panel],
        seconds=lambda point: 0.0,
        remarks="A remark.",
    )
    return figure, rows


ROLES = ("norm1", "attn.Q", "attn.K", "attn.V", "mlp.up")


def model_document(layers=3, seed=0, roles=ROLES):
    """The document of an analysis that nobody made: random numbers of the blocks of some layers, and of all pairs."""
    draw = random.Random(seed)

    def estimate(exact=False):
        value = 10 ** draw.gauss(0, 1)
        return {
            "value": value,
            "stderr": 0.0 if exact else 0.03 * value,
            "matvecs": 16,
            "method": "exact" if exact else "signs",
        }

    def row(name, part):
        exact = name.endswith(("Q", "V"))
        numbers = {key: estimate(exact) for key in ("frobenius_norm", "trace", "largest_eigenvalue")}
        return {"block": name, "part": part, "shape": [2, 2], "method": "exact" if exact else "autodiff", **numbers}

    names = [*(f"h.{layer}.{role}" for layer in range(layers) for role in roles), "embed", "head"]
    parts = ("outer", "functional", "total")
    pairs = [(a, b, part) for i, b in enumerate(names) for a in names[:i] for part in parts]
    moments = ("entropy", "first", "second", "third")
    heads = [(f"h.{layer}.attn", head) for layer in range(layers) for head in range(2)]
    return {
        **{"kind": "analyze", "title": "Curvature of a model", "question": "Which?", "answer": "This."},
        **{
            "about": ["A model."],
            "advice": [],
            "versions": {"torch": "2"},
            "seed": seed,
            "command": "curvoscope analyze",
        },
        "rounding": 1e-6,
        "rows": [row(name, part) for name in names for part in parts],
        "hessian": {"parameters": 9, **dict.fromkeys(("largest_eigenvalue", "smallest_eigenvalue"), estimate())}
        | {"critical_learning_rate": None},
        "pairs": [{"row": a, "column": b, "part": part, "frobenius_norm": estimate()} for a, b, part in pairs],
        "attention": [{"layer": layer, "head": head, **{key: estimate() for key in moments}} for layer, head in heads],
    }


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
        elif "caption" in self._open:
            self.tables[-1]["caption"] += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]
