"""Figures of matplotlib as they are drawn."""

from matplotlib.backends.backend_agg import FigureCanvasAgg


def drawn(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas


def assert_readable(figure, texts):
    """The texts neither overlap nor are cut off."""
    renderer = drawn(figure).get_renderer()
    width, height = figure.canvas.get_width_height()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(figure)]
    for text, box in boxes:
        assert min(box.x0, box.y0) >= 0 and box.x1 <= width and box.y1 <= height, text
    for i, (one, first) in enumerate(boxes):
        for other, second in boxes[i + 1 :]:
            assert not first.overlaps(second), (one, other)
