"""The heat maps show the norms they are given, in the right places."""

import numpy as np

from curvoscope.analysis import PARTS
from curvoscope.analysis.measurements import Measurement
from curvoscope.analysis.pair_norms import PairNorm
from curvoscope.estimate import Estimate
from curvoscope.report.heat_figures import layer_map, pair_map


def images(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.images and axes.get_title(loc="left")}


def labels(axes):
    return [text.get_text() for text in axes.get_xticklabels()], [text.get_text() for text in axes.get_yticklabels()]


def test_pairs_are_symmetric_and_zero_is_below_the_scale():
    norms = {("h.0.attn.Q", "h.0.attn.Q"): 1.0, ("h.0.attn.V", "h.0.attn.V"): 0.0, ("h.0.attn.Q", "h.0.attn.V"): 5.0}
    exact = {pair: Estimate(norm, 0.0, 0, "exact") for pair, norm in norms.items()}
    rows = [Measurement(a, part, (1, 1), "exact", *[n] * 3) for (a, b), n in exact.items() if a == b for part in PARTS]
    pairs = [PairNorm(*pair, part, norm) for pair, norm in exact.items() if len(set(pair)) == 2 for part in PARTS]
    figure = pair_map(rows, pairs, "a $ here and $ there")
    panels = images(figure)
    assert list(panels) == list(PARTS) and figure._suptitle.get_text() == r"a \$ here and \$ there"
    for axes in panels.values():
        image = axes.images[0]
        shown = np.asarray(image.get_array())
        assert shown[0, 0] == 1 and shown[0, 1] == shown[1, 0] == 5 and shown[1, 1] < image.norm.vmin == 1
    assert labels(panels["outer"]) == (["h.0.attn.Q", "h.0.attn.V"], ["h.0.attn.Q", "h.0.attn.V"])


def test_layers_are_lines_and_what_was_not_measured_is_blank():
    norms = {"embed": 2.0, "h.0.attn.Q": 3.0, "h.1.attn.Q": 4.0, "h.1.mlp.up": 1e-9}
    exact = [Estimate(norm, 0.0, 0, "exact") for norm in norms.values()]
    rows = [
        Measurement(name, part, (1, 1), "exact", *[norm] * 3)
        for name, norm in zip(norms, exact, strict=True)
        for part in PARTS
    ]
    panels = images(layer_map(rows, "title", rounding=1e-6))
    assert labels(panels["outer"]) == (["Q", "up", "embed"], ["layer 0", "layer 1", "outside"])
    for axes in panels.values():
        shown = np.ma.filled(axes.images[0].get_array(), np.nan)
        assert (shown[0, 0], shown[1, 0], shown[2, 2]) == (3, 4, 2)
        assert 0 < shown[1, 1] < axes.images[0].norm.vmin == 2
        assert np.isnan([shown[0, 1], shown[0, 2], shown[1, 2], shown[2, 0], shown[2, 1]]).all()
