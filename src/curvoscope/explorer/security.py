"""Access control: which requests are answered, and what an answer never contains."""

import hmac
import ipaddress
import logging
from collections.abc import Mapping, Sequence
from http.cookies import CookieError
from typing import Any
from urllib.parse import urlsplit

from dash.exceptions import DashException
from flask import Flask, Response, jsonify, redirect, request
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response as BaseResponse

MOST_BYTES = 64 * 1024
"""Of a request's body: a state is a few hundred bytes."""

_IN_LINK = "token"


def protect(server: Flask, callbacks: Mapping[str, Any], script_hashes: Sequence[str], token: str | None) -> None:
    """Guard every route of a server with all of its callbacks and the hashes of its inline scripts.

    Without a token only requests addressed to a loopback name pass, so that no page of another site can reach the
    server under a name of its own (DNS rebinding). With one, a request needs it in its link or, after the first visit,
    in a cookie.
    """
    server.config["MAX_CONTENT_LENGTH"] = MOST_BYTES
    server.before_request(lambda: _admit(token))
    server.before_request(lambda: _well_formed(callbacks))
    server.after_request(lambda answer: _headers(answer, script_hashes))
    server.register_error_handler(Exception, _failed)


def refuse(status: int, message: str) -> Response:
    """A message in place of an answer."""
    answer: Response = jsonify(error=message)
    answer.status_code = status
    return answer


def _admit(token: str | None) -> BaseResponse | None:
    if request.method == "POST" and not _same_origin():
        return refuse(403, "requests from another site are not answered")
    if token is None:
        if not _loopback(request.host):
            return refuse(403, "the explorer answers on loopback only; open it as http://127.0.0.1")
        return None
    cookie = f"curvoscope-{urlsplit(f'//{request.host}').port or 80}"  # cookies do not know of ports
    try:
        shown = request.cookies.get(cookie, "")
    except CookieError:
        shown = ""
    if _equal(shown, token):
        return None
    if request.method == "GET" and _equal(request.args.get(_IN_LINK, ""), token):
        rest = "&".join(
            part for part in request.query_string.decode().split("&") if not part.startswith(f"{_IN_LINK}=")
        )
        answer = redirect(f"{request.path}?{rest}" if rest else request.path)
        answer.set_cookie(cookie, token, httponly=True, samesite="Strict")
        return answer
    return refuse(403, "this needs the token: open the link that curvoscope explore has printed")


def _well_formed(callbacks: Mapping[str, Any]) -> BaseResponse | None:
    """Check the shape of a request, which Dash trusts."""
    if request.method != "POST":
        return None
    try:
        body = request.get_json()
    except RecursionError:
        body = None
    if isinstance(body, dict) and _fits(body, callbacks):
        return None
    return refuse(400, "the request does not have the form that the page sends")


def _fits(body: dict[str, Any], callbacks: Mapping[str, Any]) -> bool:
    """Whether a body names a callback, as many inputs and outputs as it has, and what has changed."""
    output, changed = body.get("output"), body.get("changedPropIds")
    if not isinstance(output, str) or output not in callbacks:
        return False
    several = output.startswith("..")
    outputs = body.get("outputs") if several else [body.get("outputs")]
    return (
        _places(body.get("inputs"), len(callbacks[output]["inputs"]))
        and _places(body.get("state", []), len(callbacks[output]["state"]))
        and _places(outputs, output.count("...") + 1)
        and isinstance(changed, list)
        and all(isinstance(item, str) for item in changed)
    )


def _places(found: object, count: int) -> bool:
    """Whether these are `count` properties of components."""
    return (
        isinstance(found, list)
        and len(found) == count
        and all(
            isinstance(item, dict) and isinstance(item.get("id"), str) and isinstance(item.get("property"), str)
            for item in found
        )
    )


def _failed(error: Exception) -> BaseResponse:
    """A message, never a traceback."""
    if isinstance(error, HTTPException):
        return refuse(error.code or 500, error.description or error.name)
    if isinstance(error, DashException | KeyError) and request.method == "POST":  # no such callback, or not so
        return refuse(400, "the request does not match the page; reload it")
    logging.getLogger(__name__).error("a request failed", exc_info=error)  # for the one who runs the server
    return refuse(500, "the server could not answer; nothing was changed")


def _headers(answer: Response, script_hashes: Sequence[str]) -> Response:
    """The page may load from here alone."""
    scripts = " ".join(("'self'", *script_hashes))
    answer.headers["Content-Security-Policy"] = (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
    )
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["Referrer-Policy"] = "no-referrer"
    return answer


def _same_origin() -> bool:
    origin = request.headers.get("Origin")
    return origin is None or urlsplit(origin).netloc == request.host


def _loopback(host: str) -> bool:
    """Whether a Host header names this machine's loopback, at any port: it may be forwarded."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _equal(seen: str, token: str) -> bool:
    return hmac.compare_digest(seen.encode(), token.encode())
