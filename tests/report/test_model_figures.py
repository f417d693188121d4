"""The figures of a model's blocks: every block is there, nothing overlaps, bars are intervals."""

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from curvoscope.analysis.measurements import Measurement
from curvoscope.analysis.spectra import BlockSpectrum, distances
from curvoscope.estimate import Density, Estimate, density
from curvoscope.report.block_figures import OUTSIDE, norm_figure, split_name
from curvoscope.report.density_figures import density_figure, distance_figure, headline_of

NAMES = ["embed", *(f"h.{i}.{name}" for i in range(3) for name in ("norm1", "attn.Q", "attn.V", "mlp.up"))]


def rows(names=NAMES):
    """Functional parts are 1, 10, 100, ..., the outer ones ten times that; the last block has no functional part."""
    found = []
    for i, name in enumerate(names):
        for part, factor in (("outer", 10.0), ("functional", 1.0), ("total", 11.0)):
            zero = part == "functional" and i == len(names) - 1
            norm = Estimate(0.0, 0.0, 0, "exact") if zero else Estimate(factor * 10.0 ** (i % 5), factor, 16, "xtrace")
            found.append(Measurement(name, part, (2, 2), "autodiff", norm, norm, norm))
    return found


def spectrum(name, seed, estimated):
    generator = torch.Generator().manual_seed(seed)
    values = 10.0**seed * torch.randn(80, generator=generator, dtype=torch.float64)
    found = density(torch.diag(values), matvecs=32, steps=8) if estimated else Density.exact(values)
    return BlockSpectrum(name, 80, "autodiff", found, found.log_spectrum())


def texts(figure):
    """Visible texts with their boxes."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    found = [figure._suptitle, figure._supylabel, *(t for legend in figure.legends for t in legend.get_texts())]
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        found += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    shown = [text for text in found if text is not None and text.get_text() and text.get_visible()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in shown], canvas.get_width_height()


def assert_readable(figure):
    boxes, (width, height) = texts(figure)
    for text, box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, text
    for i, (one, first) in enumerate(boxes):
        for other, second in boxes[i + 1 :]:
            assert not first.shrunk(0.98, 0.98).overlaps(second.shrunk(0.98, 0.98)), (one, other)


def test_names_are_split_into_layer_and_block():
    assert split_name("h.0.attn.Q") == ("h.0", "Q")
    assert split_name("h.11.mlp.b_up") == ("h.11", "b_up")
    assert split_name("encoder.h.2.norm1") == ("encoder.h.2", "norm1")
    assert split_name("h.0.attn.Q.3") == ("h.0", "Q.3")
    for name in ("embed", "final_norm", "transformer.h.weight", "transformer.h.0.attn.q_proj.weight", "h.0.mlp.bias"):
        assert split_name(name) == (OUTSIDE, name)


class TestNorms:
    @pytest.mark.parametrize("names", [NAMES, NAMES[:1], NAMES[1:3], [f"h.{i}.attn.Q" for i in range(13)]])
    def test_nothing_overlaps(self, names):
        assert_readable(norm_figure(rows(names), "h.0.mlp.up is 1,234 times larger than h.2.attn.Q (Frobenius norm)"))

    def test_long_names_and_titles(self):
        names = ["cls.predictions.transform.dense.weight", "bert.embeddings.token_type_embeddings.weight"]
        assert_readable(norm_figure(rows(names), f"{names[0]} is 12 times larger than {names[1]} (Frobenius norm)"))

    def test_dollars_are_no_mathematics(self):
        figure = norm_figure(rows(["a$^$b", "c$_$d.h.0.norm1"]), "a$^$b and c$_$d")
        labels = {"a\\$^\\$b", "c\\$_\\$d.layer 0", "a\\$^\\$b and c\\$_\\$d"}
        assert labels <= {text for text, _ in texts(figure)[0]}

    def test_every_block_has_its_parts_on_one_axis(self):
        figure = norm_figure(rows(), "title")
        panels = [axes for axes in figure.axes if axes.get_visible()]
        assert [axes.get_title("left") for axes in panels] == ["layer 0", "layer 1", "layer 2", "outside of the layers"]
        labels = [[tick.get_text() for tick in axes.get_xticklabels()] for axes in panels]
        assert labels == [["norm1", "Q", "V", "up"]] * 3 + [["embed"]]
        assert len({axes.get_ylim() for axes in panels}) == 1 and panels[0].get_yscale() == "log"
        assert "zero to rounding" in [text.get_text() for text in figure.legends[0].get_texts()]

    def test_bars_are_intervals(self):
        row = rows(["h.0.attn.Q"])[0]
        figure = norm_figure([row], "title")
        (segment,) = figure.axes[0].collections[0].get_segments()
        low, high = row.frobenius_norm.interval(0.95)
        assert segment[0][1] == pytest.approx(max(low, row.frobenius_norm.value / 3)) and segment[1][
            1
        ] == pytest.approx(high)


class TestDensities:
    @pytest.mark.parametrize("estimated", [False, True])
    def test_nothing_overlaps(self, estimated):
        found = [spectrum(name, i % 4, estimated) for i, name in enumerate([*NAMES, "whole Hessian"])]
        assert_readable(density_figure(found, headline_of(found)))
        assert_readable(distance_figure(distances(found)))

    def test_one_block(self):
        found = [spectrum("h.0.attn.Q", 0, True)]
        assert_readable(density_figure(found, headline_of(found)))
        assert_readable(distance_figure(distances(found)))

    def test_a_row_a_layer_and_common_axes(self):
        found = [spectrum(name, i % 4, False) for i, name in enumerate(NAMES)]
        figure = density_figure(found, headline_of(found))
        shown = [axes for axes in figure.axes if axes.get_visible()]
        assert len(shown) == len(NAMES)
        assert [axes.get_ylabel() for axes in shown if axes.get_ylabel()] == ["layer 0", "layer 1", "layer 2"]
        assert [axes.get_title() for axes in shown[:4]] == ["norm1", "Q", "V", "up"]
        assert len({(axes.get_xlim(), axes.get_ylim()) for axes in shown}) == 1

    def test_the_curves_hold_the_eigenvalues(self):
        """The area under a curve, over decades, and the grey share make one; no curve goes far beyond the largest."""
        one = spectrum("h.0.attn.Q", 0, False)
        axes = density_figure([one], "title").axes[0]
        area = 0.0
        for line in axes.lines:
            x, y = (torch.as_tensor(part, dtype=torch.float64) for part in line.get_data())
            area += float(torch.trapezoid(y, x.abs().log10()).abs())
            assert float(x.abs().max()) < 2.2 * float(one.density.nodes.abs().max())
        grey = float(axes.texts[0].get_text().strip("%<")) / 100 if axes.texts else 0.0
        assert area + grey == pytest.approx(1, abs=0.05)

    def test_the_title_tells_how_far_apart_they_are(self):
        found = [BlockSpectrum(name, 2, "exact", d, d.log_spectrum()) for name, d in (
            ("a", Density.exact(torch.tensor([0.1, 2.0]))),
            ("b", Density.exact(torch.tensor([-1.0, 0.5]))),
            ("c", Density.exact(torch.tensor([-1.0, -0.5]))),
        )]  # fmt: skip
        assert headline_of(found) == "Largest eigenvalues from 0.5 (b) to 2 (a): 4 times apart"
        assert headline_of(found[2:]) == "Spectra of the Hessian's blocks"
