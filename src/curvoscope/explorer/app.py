"""The Dash app, and a route that computes.

Dash makes the page and restores the state of a link. The numbers of a state bypass Dash, whose callbacks would add
tens of milliseconds to every move: assets/explorer.js fetches and writes them. It requests matrices, curves and
spectra at the same time, so that the browser draws some while the server computes others.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dash import ClientsideFunction, Dash, Input, Output, html
from dash import State as Given
from flask import Response, jsonify, request

from curvoscope.errors import CurvoscopeError
from curvoscope.explorer import compute, downloads, layout, matrix_figures, security, spectrum_figures
from curvoscope.explorer.compute import Curves, ExplorerSpectra, Matrices
from curvoscope.explorer.state import State, from_link, read

T = TypeVar("T")

_first, _second = threading.Lock(), threading.Lock()
"""Each lock admits one state at a time: several pages share the processor, and the memory stays bounded."""


class UnanswerableError(Exception):
    """A state that is within its bounds but has no numbers, for example because scores overflow."""


def make(token: str | None = None) -> Dash:
    """Make the app; with a token it answers only requests that carry it."""
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
    _carry(app)
    app.server.add_url_rule("/answer/<part>", "answer", _answer)
    app.server.add_url_rule("/csv/<name>", "csv", _csv)
    security.protect(app.server, app.callback_map, app.csp_hashes(), token)
    return app


def matrices_of(state: State, then: Callable[[Matrices], T]) -> T:
    """Apply `then` to the matrices of a state. Requests are handled one at a time."""
    with _first:
        try:
            return then(compute.matrices(state))
        except CurvoscopeError as error:
            raise UnanswerableError(str(error)) from error


def curves_of(state: State) -> Curves:
    """Compute the curves of a state. Requests are handled one at a time."""
    try:
        return compute.curves(matrices_of(state, lambda found: found))
    except CurvoscopeError as error:
        raise UnanswerableError(str(error)) from error


def spectra_of(state: State) -> ExplorerSpectra:
    """Compute the spectra of a state. Requests are handled one at a time."""
    with _second:
        try:
            return compute.spectra(matrices_of(state, lambda found: found))
        except CurvoscopeError as error:
            raise UnanswerableError(str(error)) from error


def _answer(part: str) -> Response:
    """Return the content of the page for a state: the values of its figures by place, its numbers and lines of text.

    For a state without numbers, return an error as a normal answer, because the controls can reach such a state.
    """
    if part not in _PARTS:
        return security.refuse(404, f"there is no part of that name; expected one of {', '.join(_PARTS)}")
    state, problems = read(request.args.to_dict())
    if state is None:
        return jsonify(error=" ".join(problems))
    try:
        return jsonify(_PARTS[part](state))
    except UnanswerableError as error:
        return jsonify(error=str(error))


def _pictures(found: Matrices) -> dict[str, Any]:
    return _parts(matrix_figures.fill(found), layout.norms(found), {"pooling": [layout.pooling_note(found)]})


def _eigenvalues(found: ExplorerSpectra) -> dict[str, Any]:
    return _parts(spectrum_figures.fill_eigenvalues(found), lines={"summary": layout.summary(found)})


def _parts(figures: Any, numbers: Any = None, lines: Any = None) -> dict[str, Any]:
    return {"figures": figures, "numbers": numbers or {}, "lines": lines or {}}


_PARTS: dict[str, Callable[[State], dict[str, Any]]] = {
    "matrices": lambda state: matrices_of(state, _pictures),
    "curves": lambda state: _parts(spectrum_figures.fill_curves(curves_of(state))),
    "spectra": lambda state: _eigenvalues(spectra_of(state)),
}


def _carry(app: Dash) -> None:
    """Register the callbacks. Those of assets/explorer.js write through `set_props` or bypass Dash; their outputs are
    never written, except for the tour's."""

    @app.callback(Output("restored", "data"), Output("link-message", "children"), Input("location", "search"))
    def restore(search: object) -> tuple[Any, Any]:
        state, problems = from_link(search if isinstance(search, str) else "")
        return state.model_dump(), [html.P(line) for line in problems]

    def client(name: str, *arguments: Any, first: bool = False) -> None:
        app.clientside_callback(ClientsideFunction("explorer", name), *arguments, prevent_initial_call=not first)

    memory = Given("memory", "data")
    client("restored", Output("memory", "modified_timestamp"), Input("restored", "data"), memory, first=True)
    client(
        "tour",
        Output("tour-title", "children"),
        Output("tour-text", "children"),
        Output("tour-next", "children"),
        Output("tour-back", "disabled"),
        Input("tour-next", "n_clicks"),
        Input("tour-back", "n_clicks"),
    )


def _csv(name: str) -> Response:
    """Return a table of a state as a file."""
    if name not in downloads.TABLES:
        return security.refuse(404, f"there is no table of that name; expected one of {', '.join(downloads.TABLES)}")
    state, problems = from_link(request.query_string.decode(errors="replace"))
    if problems:
        return security.refuse(400, " ".join(problems))
    try:
        if name in downloads.FROM_MATRICES:
            table = matrices_of(state, downloads.FROM_MATRICES[name])
        elif name in downloads.FROM_CURVES:
            table = downloads.FROM_CURVES[name](curves_of(state))
        else:
            table = downloads.FROM_SPECTRA[name](spectra_of(state))
    except UnanswerableError as error:
        return security.refuse(400, str(error))
    answer = Response(downloads.lines(table, state), mimetype="text/csv")
    answer.headers["Content-Disposition"] = f'attachment; filename="curvoscope-{name}.csv"'
    return answer
