"""The files that the commands write."""

import re

import numpy as np

from curvoscope.commands.document import pictures
from curvoscope.report import style


def test_labels_of_a_square_map_stay_inside_the_picture():
    """Its SVG is made behind its PNG; arranged for both, the names left of the rows began outside of it."""
    figure = style.blank(12.8, 12.0)
    axes = figure.subplots()
    image = axes.imshow(np.eye(68))
    names = [f"h.{i}.mlp.down" for i in range(68)]
    axes.set_xticks(range(68), names, size=7, rotation=90)
    axes.set_yticks(range(68), names, size=7)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, aspect=30, shrink=0.8, label="a label")
    figure.suptitle("a title\non two lines")
    found = pictures("map", figure)["map.svg"]
    places = [float(x) for x in re.findall(rb'transform="translate\(([-\d.]+) [-\d.]+\)', found)]
    assert len(places) > 68 and min(places) > 0
