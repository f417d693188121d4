"""The page: controls, tour, figures and the table. Everything has a label; the page loads nothing from other hosts."""

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

from dash import dcc, html

from curvoscope.explorer import matrix_figures, spectrum_figures, tour
from curvoscope.explorer.compute import ExplorerSpectra, Matrices
from curvoscope.explorer.pictures import MOST_CELLS, pooling
from curvoscope.explorer.state import State, bounds, choices
from curvoscope.operators.block_matrix import PARTS

_WORDS = {
    "softmax": "softmax",
    "linear": "linear",
    "none": "none",
    "causal": "causal",
    "pre": "pre-norm",
    "mse": "MSE",
    "ce": "cross-entropy",
}


@dataclass(frozen=True)
class Control:
    """How a field of the state is set: kind "slider", "log" (a slider over its logarithm), "number" or "choice"."""

    name: str
    label: str
    kind: str = "slider"
    step: float = 1.0


CONTROLS = (
    Control("L", "Tokens, L"),
    Control("d", "Width, d"),
    Control("d_k", "Width of a key, d_k"),
    Control("heads", "Heads"),
    Control("sigma", "Scale of X, σ", "log", 0.05),
    Control("temperature", "Temperature", "log", 0.05),
    Control("attention", "Attention", "choice"),
    Control("mask", "Mask", "choice"),
    Control("norm", "Layer norm", "choice"),
    Control("sink", "Attention sink", step=0.25),
    Control("skip", "Skip connection", step=0.05),
    Control("residual", "Residual, F − Y", step=0.05),
    Control("loss", "Loss", "choice"),
    Control("seed", "Seed", "number"),
)

_FIGURES = {
    "attention": (
        "Attention map",
        "Weights of each query over the keys; linear attention has both signs.",
    ),
    "hessian": ("Hessian", "The total over all weights, with the borders of the blocks."),
    "eigenvalues": (
        "Eigenvalues",
        "Of the Hessian, with the ± pairs of its T-functional part, d_k of each. If d_k ≥ 2d, the pairs are also "
        "eigenvalues of the Hessian: the bulk.",
    ),
    "outer": ("Outer part", "Jᵀ S J, the Gauss-Newton matrix, in the colours of the total."),
    "functional": ("Functional part", "The rest, linear in the loss gradient, in the colours of the total."),
    "growth": (
        "Growth with σ",
        "Solid: exact norms of blocks; circles: at the chosen scale. Dashed: the theory, at fixed attention.",
    ),
    "scalar": (
        "Scalar model",
        "Tokens are numbers; softmax, MSE: all eigenvalues in closed form, against the sink. The model "
        "shares L, d_k, σ, mask, residual and seed.",
    ),
}
_GRAPH: Any = {
    "displayModeBar": False,  # a button of the page saves the picture
    "responsive": True,
    "scrollZoom": False,
}


def _extra(**words: str) -> dict[str, Any]:
    """Attributes with hyphens: aria_label is aria-label."""
    return {name.replace("_", "-"): word for name, word in words.items()}


def page() -> html.Div:
    """Return the whole page; the first answer brings the numbers."""
    memory = {
        "defaults": State().model_dump(),
        "kinds": {control.name: control.kind for control in CONTROLS},
        "tour": [
            {"title": step.title, "text": step.text, "figure": step.figure, "state": step.state.model_dump()}
            for step in tour.STEPS
        ],
    }
    return html.Div(
        [
            dcc.Location(id="location", refresh=False),
            dcc.Store(id="memory", data=memory),
            dcc.Store(id="restored"),
            html.Header(
                [
                    html.H1("Curvature of an attention layer"),
                    html.P(
                        "The exact Hessian of the loss in the weights of one self-attention layer, split into its "
                        "outer and its functional part. Move a control to recompute everything from closed forms."
                    ),
                ]
            ),
            html.Main([_tour(), html.Div([_controls(), _results()], className="columns")], id="main"),
        ]
    )


def _tour() -> html.Section:
    buttons = [html.Button("Start the tour", id="tour-next"), html.Button("Back", id="tour-back", disabled=True)]
    return html.Section(
        [
            html.H2("Guided tour", id="tour-title"),
            html.Div(
                html.P("The paper's findings in six steps. Each step sets the controls for you."),
                id="tour-text",
                **_extra(aria_live="polite"),
            ),
            html.Div(buttons, className="buttons"),
        ],
        className="tour",
        **_extra(aria_labelledby="tour-title"),
    )


def _controls() -> html.Section:
    return html.Section(
        [
            html.H2("Controls", id="controls-title"),
            html.Div([_control(control) for control in CONTROLS], className="controls"),
            html.Div(html.Button("Defaults", id="reset"), className="buttons"),
        ],
        className="panel",
        **_extra(aria_labelledby="controls-title"),
    )


def _control(control: Control) -> html.Div:
    name, label = control.name, control.label
    if control.kind == "choice":
        options = [html.Option(_WORDS[word], value=word) for word in choices(name)]
        return html.Div([html.Label(label, htmlFor=name), html.Select(options, id=name)], className="control")
    if control.kind == "number":
        field = dcc.Input(id=name, type="number", step=1, className="number")
        return html.Div([html.Label(label, htmlFor=name), field], className="control")
    low, high = bounds(name)
    if control.kind == "log":
        low, high = (round(math.log10(end), 6) for end in (low, high))
    slider = dcc.Input(id=name, type="range", min=low, max=high, step=control.step, className="slider")
    shown = html.Span(id=f"{name}-value", className="value")
    return html.Div([html.Label([label, " "], htmlFor=name), shown, slider], className="control")


def _results() -> html.Div:
    blank = matrix_figures.blank() | spectrum_figures.blank()
    table = html.Section(_norm_table(), id="norms", className="card", **_extra(aria_label="Norms of the blocks"))
    cards = [_card(name, *words, blank[name]) for name, words in _FIGURES.items()]
    return html.Div(
        [
            html.Div(id="link-message", className="message", role="alert"),
            html.Div(id="message", className="message", role="alert"),
            html.P(id="summary"),
            html.Div([*cards, table], className="figures"),
            html.P(id="pooling", className="note"),
        ],
        className="results",
    )


def _card(name: str, title: str, caption: str, figure: dict[str, Any]) -> html.Figure:
    return html.Figure(
        [
            html.Figcaption(
                [
                    html.H2(title),
                    html.P(caption),
                    html.Span(
                        [
                            html.Button("PNG", className="save", **_extra(data_png=name, aria_label=f"{title} as PNG")),
                            _csv_link(name, title),
                        ],
                        className="saves",
                    ),
                ]
            ),
            dcc.Graph(id=f"graph-{name}", figure=figure, config=_GRAPH, className="graph", responsive=True),
        ],
        id=f"figure-{name}",
        className="card",
    )


def _csv_link(name: str, title: str) -> html.A:
    return html.A("CSV", href="#", className="save", **_extra(data_csv=name, aria_label=f"{title} as CSV"))


def summary(found: ExplorerSpectra) -> list[Any]:
    """The state in one line of text and of numbers with their names."""
    smallest, largest = float(found.eigenvalues[0]), float(found.eigenvalues[-1])
    negative = int((found.eigenvalues < 0).sum())
    n = len(found.eigenvalues)
    spectrum = found.scalar
    outliers = ", ".join(f"{float(value):.4g}" for value in spectrum.outliers)
    return [
        f"Loss {found.matrices.loss:.4g}. The Hessian has {n:,} rows; its eigenvalues range from ",
        {"smallest": number(smallest)},
        " to ",
        {"largest": number(largest)},
        f", {negative:,} of them below zero. Scalar model: {spectrum.multiplicity} pairs ±",
        {"scalar-bulk": number(spectrum.bulk)},
        f" and the outliers {outliers}.",
    ]


def pooling_note(found: Matrices) -> str:
    """What a cell of the Hessian's pictures is."""
    step = pooling(found.borders[-1])
    if step == 1:
        return "In the pictures of the Hessian every cell is one entry."
    return (
        f"In the pictures of the Hessian a cell shows the entry of largest magnitude among {step} × {step} entries, "
        f"so that there are at most {MOST_CELLS} cells per side; the CSV has all entries."
    )


def norms(found: Matrices) -> dict[str, list[str]]:
    """The numbers of the table, by their names there."""
    return {"norm-" + "-".join(place): number(norm) for place, norm in found.norms.items()}


def number(value: float) -> list[str]:
    """As it is shown, and with all of its digits."""
    return [f"{value:.4g}", repr(value)]


def _norm_table() -> html.Div:
    """Places for the Frobenius norms of all blocks and parts; the title of a cell gets all digits."""
    head = [html.Th(word, scope="col") for word in ("block", *PARTS)]
    body = [
        html.Tr(
            [
                html.Th(row if row == column else f"{row}, {column}", scope="row"),
                *(html.Td(html.Span(**_extra(data_number=f"norm-{row}-{column}-{part}"))) for part in PARTS),
            ]
        )
        for row, column in combinations_with_replacement("QKV", 2)
    ]
    return html.Div(
        [
            html.Span(_csv_link("norms", "Norms of the blocks"), className="saves"),
            html.Table([html.Caption("Norms of the blocks"), html.Thead(html.Tr(head)), html.Tbody(body)]),
            html.P("Frobenius norms; point at a number to see all its digits.", className="note"),
        ],
        className="table",
    )
