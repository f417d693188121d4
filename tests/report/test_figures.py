import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from curvoscope.operators import BlockHessian, BlockMatrix
from curvoscope.operators.compositions import Product
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import addition, answer_targets
from curvoscope.report.figures import hessian_figure
from drawn_figures import assert_readable, drawn

TITLE = "Query entries are 12,345 times smaller than value entries (median)"


def attention_hessian(d=4, activation="softmax"):
    tokens = addition(4)
    inputs, targets = tokens[:, :-1], answer_targets(tokens)
    model = GPT2(d, activation=activation)
    return model.attention().hessian(model.attention_input(inputs), model.tail(inputs, targets))


def given(outer, functional, shapes):
    """A BlockHessian with these dense parts."""

    def matrix(dense):
        ends = np.cumsum([a * p for a, p in shapes.values()]).tolist()
        ranges = dict(zip(shapes, map(slice, [0, *ends], ends), strict=False))

        def entry(row, column):
            block = dense[ranges[row], ranges[column]]
            products = (lambda x: block @ x, lambda x: block.T @ x)
            return Product(products, shapes[row], shapes[column], dense, row == column)

        return BlockMatrix(shapes, entry, dense)

    return BlockHessian(matrix(outer), matrix(functional))


def words(figure):
    """Every visible text: titles, labels, ticks, legends, and the numbers written into the picture."""
    texts = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [axes._left_title, axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [label for tick in ticks for label in (tick.label1, tick.label2)]
    return [text for text in texts if text.get_text() and text.get_visible()]


@pytest.mark.parametrize("activation", ["softmax", "linear"])
def test_nothing_overlaps_and_nothing_is_cut_off(activation):
    assert_readable(hessian_figure(attention_hessian(activation=activation), TITLE), words)


def test_text_is_readable_at_half_width():
    figure = hessian_figure(attention_hessian(), TITLE)
    drawn(figure)
    assert figure.get_figwidth() / 2 <= 3.3  # a column
    assert min(text.get_size() for text in words(figure)) / 2 >= 6  # points in print


def test_the_picture_is_the_logarithm_of_the_hessian_with_zeros_apart():
    generator = torch.Generator().manual_seed(0)
    outer = torch.randn(10, 10, generator=generator, dtype=torch.float64)
    outer = outer + outer.T
    outer[2, :] = outer[:, 2] = 0
    H = given(outer, torch.zeros_like(outer), {"Q": (2, 3), "V": (1, 4)})
    figure = hessian_figure(H, TITLE)
    axes, bar = figure.axes
    shown = axes.images[0].get_array()
    dense = outer.numpy()
    assert np.array_equal(np.ma.getmaskarray(shown), dense == 0)
    np.testing.assert_allclose(shown.compressed(), np.log10(np.abs(dense[dense != 0])), atol=1e-6)
    low, high = axes.images[0].get_clim()
    assert high == pytest.approx(np.log10(np.abs(dense).max()))
    assert low < np.log10(np.median(np.abs(dense[dense != 0])))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["query", "value"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["query", "value"]
    np.testing.assert_allclose(axes.get_xticks(), [2.5, 7.5])
    assert {line.get_xdata()[0] for line in axes.lines} >= {5.5}  # the border
    assert "entry" in bar.get_ylabel() and "log" in bar.get_ylabel()
    legend = figure.legends[0]
    assert "exactly zero: 19 of 100" in legend.get_texts()[0].get_text()
    pixels = np.asarray(drawn(figure).buffer_rgba())[..., :3] / 255
    zero = to_rgb(legend.get_patches()[0].get_facecolor())
    assert (np.abs(pixels - zero).max(-1) < 0.01).mean() > 0.05  # the grey row and column are there to see
    assert figure._suptitle.get_text() == TITLE


def test_a_hessian_of_zeros_can_be_drawn():
    zeros = torch.zeros(8, 8, dtype=torch.float64)
    H = given(zeros, zeros, {"Q": (2, 2), "V": (2, 2)})
    figure = hessian_figure(H, TITLE)
    drawn(figure)
    assert "exactly zero: all 64" in figure.legends[0].get_texts()[0].get_text()


def test_no_global_state():
    from matplotlib._pylab_helpers import Gcf

    hessian_figure(attention_hessian(), TITLE)
    assert not Gcf.figs
