"""The figures of a page: those of a sweep, and the quotient of value and query by depth."""

from matplotlib.figure import Figure

from curvoscope.report import answers, style
from curvoscope.report.sweep_figures import depth_profile, head_map, norm_map
from curvoscope.sweep import Sweep
from gallery.claims import Ratio


def figures_of(sweep: Sweep, trained: list[Ratio], random: list[Ratio]) -> dict[str, Figure]:
    """By name."""
    title = answers.largest_block([(name, float(sweep.frobenius_norm(name))) for name in sweep.names])
    return {
        "ratios": ratio_figure({"trained": trained, "random weights": random}),
        "depth": depth_profile(sweep),
        "pairs": norm_map(sweep, title),
        "heads": head_map(sweep),
    }


def ratio_figure(lines: dict[str, list[Ratio]]) -> Figure:
    """Quotients over the layers with their intervals, one line per set of weights, and the line at 1."""
    figure = style.blank(9.5, 3.8)
    axes = figure.subplots()
    for (label, ratios), colour, marker in zip(lines.items(), style.COLOURS, "os", strict=False):
        values = [ratio.value for ratio in ratios]
        below = [ratio.value - ratio.low for ratio in ratios]
        above = [min(ratio.high, 100 * ratio.value) - ratio.value for ratio in ratios]
        axes.errorbar(
            range(len(ratios)),
            values,
            [below, above],
            label=label,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.2,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("$\\|H_V\\|_F / \\|H_Q\\|_F$")
    style.open_box(axes, grid=True)
    figure.legend(loc="outside right upper", frameon=False)
    return figure
