"""The page of finished runs, served as it is."""

from flask import Flask, Response

from curvoscope.explorer import security
from curvoscope.report.html import script_hash


def make(page: str, token: str | None) -> Flask:
    """An app with one page; with a token it answers only requests that carry it."""
    server = Flask("curvoscope", static_folder=None)
    server.add_url_rule("/", "page", lambda: Response(page, mimetype="text/html"))
    security.protect(server, {}, [script_hash()], token)
    return server
