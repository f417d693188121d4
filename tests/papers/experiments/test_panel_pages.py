"""The Plotly pages of the papers' figures: each panel has its own note, legend and colours, and text stays text."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from curvoscope.papers.experiments import panel_figures
from curvoscope.papers.experiments.panel_pages import page
from curvoscope.papers.experiments.panels import Guide, Image, Panel, Series

LINE = [1.0, 10.0, 100.0]


def drawn(panels, columns, *notes):
    """The traces and the layout that a page hands to Plotly."""
    text = page("title", panels, columns, *notes)
    start = text.index("Plotly.newPlot(")
    decoder, at = json.JSONDecoder(), text.index("[", start)
    traces, at = decoder.raw_decode(text, at)
    return traces, decoder.raw_decode(text, text.index("{", at))[0]


def place(layout, number):
    """Left, right, bottom and top of a panel on the page, from 0 to 1."""
    return [*layout[f"xaxis{number}"]["domain"], *layout[f"yaxis{number}"]["domain"]]


def test_a_note_stands_in_its_own_panel():
    curve = Panel("measured", series=[Series("", LINE, LINE)])
    traces, layout = drawn([curve, Panel("zero", note="exactly zero")], 2)
    (note,) = [one for one in layout["annotations"] if one["text"] == "exactly zero"]
    left, right, bottom, top = place(layout, "2")
    assert left < note["x"] < right and bottom < note["y"] < top and note["xref"] == note["yref"] == "paper"
    assert len(traces) == 1 and traces[0]["y"] == LINE


def covered(panel):
    """The share of the curve's points behind the legend, by the size that a legend with one line has on the page."""
    traces, layout = drawn([panel], 1)
    box = layout["legend"]
    left, right, bottom, top = place(layout, "")
    x = np.log10(traces[-1]["x"])
    low, high = layout["yaxis"]["range"]
    across = (x - x.min()) / (x.max() - x.min())
    up = (np.log10(traces[-1]["y"]) - low) / (high - low)
    at = ((box["x"] - left) / (right - left), (box["y"] - bottom) / (top - bottom))
    start, floor = at[0] * (1 - 0.4), at[1] * (1 - 0.15)
    return float(np.mean((across > start) & (across < start + 0.4) & (up > floor) & (up < floor + 0.15)))


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x**3,
        lambda x: x**-3,
        lambda x: 10 ** (3 * np.sin(np.log10(x) * 3)),
        lambda x: 10 ** np.abs(np.log10(x) - 1.5),
        lambda x: np.full_like(x, 7.0),
    ],
)
def test_the_legend_leaves_the_curve_free(shape):
    x = np.logspace(0, 3, 200)
    assert covered(Panel("curve", series=[Series("a label", x.tolist(), shape(x).tolist())])) == 0


def test_guides_and_error_bars_count_too():
    """Bars fill the corners on the left, guides those on the right, and the curve is in the middle."""
    bars = Series("curve", [1.0, 1.7, 3.0, 4.0], [0.5] * 4, [0.45, 0.45, 0.0, 0.0])
    guides = [Guide(label, [3.3, 4.0], [y, y]) for label, y in (("guide", 1.0), ("", 0.02))]
    panel = Panel("all", x_log=False, y_log=False, series=[bars], guides=guides)
    for shown, where in ((panel, ("center", "top")), (replace(panel, guides=()), ("right", "top"))):
        _, layout = drawn([shown], 1)
        assert (layout["legend"]["xanchor"], layout["legend"]["yanchor"]) == where


def test_colours_are_those_of_the_printed_figure():
    values = np.log10(np.logspace(-9, 0, 400)).reshape(20, 20)
    values[0, 0] = np.nan
    panel = Panel("entries", image=Image(values, [5.0, 20.0], ["a", "b"], "scale"))
    (heat,), layout = drawn([panel], 1)
    printed = panel_figures.draw("title", [panel], 1).axes[0].images[0].get_clim()
    assert (heat["zmin"], heat["zmax"]) == printed and heat["zmax"] == 0 and -9 < heat["zmin"] < -8.8
    assert layout["xaxis"]["showgrid"] is layout["yaxis"]["showgrid"] is False  # what is blank stays so


def test_titles_and_notes_stay_text():
    evil = "</script><img src=x onerror=alert(1)>"
    text = page(evil, [Panel(evil, series=[Series(evil, LINE, LINE)])], 1, evil, "a second note")
    assert "<img" not in text and text.count("&lt;img") == 4
    assert re.search(r"<p>[^<]*alert\(1\)&gt;</p>\n<p>a second note</p>", text)
