"""The Dash app: two callbacks compute, the others only carry the state to and fro in the browser.

The matrices and the spectra of a state are asked for at the same time, so that the browser draws the former while the
latter are computed.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dash import ClientsideFunction, Dash, Input, Output, html, no_update
from dash import State as Given
from flask import Response, request

from curvoscope.errors import CurvoscopeError
from curvoscope.explorer import compute, downloads, layout, matrix_figures, security, spectrum_figures
from curvoscope.explorer.compute import Matrices, Spectra
from curvoscope.explorer.state import State, from_link, read

T = TypeVar("T")

_first, _second = threading.Lock(), threading.Lock()
"""One state at a time in each: several pages share the processor, and the memory stays bounded."""


class UnanswerableError(Exception):
    """A state that is within its bounds and still has no numbers, as when scores overflow."""


def make(token: str | None = None) -> Dash:
    """The app; with a token it answers only those who have it."""
    app = Dash(
        "curvoscope",
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        title="Curvature of an attention layer",
        update_title="",
        enable_mcp=False,
        add_log_handler=False,
    )
    app.index_string = app.index_string.replace("<html>", '<html lang="en">')
    app.layout = layout.page()
    _answer(app)
    _carry(app)
    app.server.add_url_rule("/csv/<name>", "csv", _csv)
    security.protect(app, token)
    return app


def matrices_of(state: State, then: Callable[[Matrices], T]) -> T:
    """What `then` makes of them. Those who ask at the same time wait for each other: the spectra for the pictures."""
    with _first:
        try:
            return then(compute.matrices(state))
        except CurvoscopeError as error:
            raise UnanswerableError(str(error)) from error


def spectra_of(state: State) -> Spectra:
    """Those who ask at the same time wait for each other."""
    with _second:
        try:
            return compute.spectra(matrices_of(state, lambda found: found))
        except CurvoscopeError as error:
            raise UnanswerableError(str(error)) from error


def _answer(app: Dash) -> None:
    """The callbacks that compute."""

    @app.callback(Output("restored", "data"), Output("link-message", "children"), Input("location", "search"))
    def restore(search: object) -> tuple[Any, Any]:
        state, problems = from_link(search if isinstance(search, str) else "")
        return state.model_dump(), [html.P(line) for line in problems]

    @app.callback(
        *(Output(f"graph-{name}", "figure") for name in matrix_figures.blank()),
        Output("pooling", "children"),
        Output("norms", "children"),
        Output("message", "children"),
        Output("answer-matrices", "data"),
        Input("request", "data"),
        running=[(Output("busy-matrices", "data"), True, False)],
        prevent_initial_call=True,
    )
    def answer_matrices(asked: object) -> tuple[Any, ...]:
        number, state, problems = _read(asked)
        if state is not None:
            try:
                shown = matrices_of(state, _shown)
            except UnanswerableError as error:
                problems = [str(error)]
            else:
                return (*shown, "", {"number": number, "accepted": True})
        lines = [html.P(line) for line in (*problems, "The figures show the last state that could be computed.")]
        same = (no_update for _ in range(len(matrix_figures.blank()) + 2))
        return (*same, lines, {"number": number, "accepted": False})

    @app.callback(
        *(Output(f"graph-{name}", "figure") for name in spectrum_figures.blank()),
        Output("summary", "children"),
        Output("answer-spectra", "data"),
        Input("request", "data"),
        running=[(Output("busy-spectra", "data"), True, False)],
        prevent_initial_call=True,
    )
    def answer_spectra(asked: object) -> tuple[Any, ...]:
        number, state, _ = _read(asked)  # the other answer has the message
        try:
            found = None if state is None else spectra_of(state)
        except UnanswerableError:
            found = None
        if found is None:
            same = (no_update for _ in range(len(spectrum_figures.blank()) + 1))
            return (*same, {"number": number, "accepted": False})
        return (*spectrum_figures.fill(found), layout.summary(found), {"number": number, "accepted": True})


def _shown(found: Matrices) -> tuple[Any, ...]:
    """The pictures, the note on their cells and the table of norms."""
    return (*matrix_figures.fill(found), layout.pooling_note(found), layout.norm_table(found))


def _read(asked: object) -> tuple[object, State | None, list[str]]:
    """The number of a request, its state, and what is wrong with it."""
    if not isinstance(asked, dict):
        return None, *read(asked)
    number = asked.get("number")
    return number if isinstance(number, int) else None, *read(asked.get("state"))


def _carry(app: Dash) -> None:
    """The callbacks of assets/explorer.js. They write through `set_props`; their outputs are never written."""

    def client(name: str, *arguments: Any, first: bool = False) -> None:
        app.clientside_callback(ClientsideFunction("explorer", name), *arguments, prevent_initial_call=not first)

    memory = Given("memory", "data")
    client("restored", Output("memory", "modified_timestamp"), Input("restored", "data"), memory, first=True)
    sliders = (Input(control.name, "value") for control in layout.CONTROLS if control.kind != "choice")
    client("moved", Output("restored", "modified_timestamp"), *sliders)
    parts = ("matrices", "spectra")
    client(
        "settled",
        Output("answer-matrices", "modified_timestamp"),
        *(Input(f"busy-{part}", "data") for part in parts),
        *(Given(f"answer-{part}", "data") for part in parts),
    )
    client(
        "tour",
        Output("tour-title", "children"),
        Output("tour-text", "children"),
        Output("tour-next", "children"),
        Output("tour-back", "disabled"),
        Input("tour-next", "n_clicks"),
        Input("tour-back", "n_clicks"),
    )
    client("reset", Output("request", "modified_timestamp"), Input("reset", "n_clicks"))


def _csv(name: str) -> Response:
    """A table of a state as a file."""
    if name not in downloads.TABLES:
        return security.refuse(404, f"there is no table of that name; there are {', '.join(downloads.TABLES)}")
    state, problems = from_link(request.query_string.decode(errors="replace"))
    if problems:
        return security.refuse(400, " ".join(problems))
    try:
        if name in downloads.FROM_MATRICES:
            table = matrices_of(state, downloads.FROM_MATRICES[name])
        else:
            table = downloads.FROM_SPECTRA[name](spectra_of(state))
    except UnanswerableError as error:
        return security.refuse(400, str(error))
    answer = Response(downloads.lines(table), mimetype="text/csv")
    answer.headers["Content-Disposition"] = f'attachment; filename="curvoscope-{name}.csv"'
    return answer
