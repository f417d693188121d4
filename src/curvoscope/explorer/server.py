"""Serving the page: on loopback, or on another address behind a token."""

import secrets
import socket
from dataclasses import dataclass

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from curvoscope.errors import RangeError
from curvoscope.explorer import app, run_page

LOOPBACK = "127.0.0.1"


class _Quiet(WSGIRequestHandler):
    """Keeps connections open between moves, and does not log every request."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing."""


@dataclass(frozen=True)
class Listening:
    """A server that is bound to its port, and the address of its page."""

    server: BaseWSGIServer
    address: str
    token: str | None


def listen(host: str | None, port: int, page: str | None = None) -> Listening:
    """Bind `port`, or a free one if it is taken (0: any). `host` None: loopback; any other needs a token.

    `page` None: that of a layer; otherwise this one, of finished runs.
    """
    if not 0 <= port <= 65535:
        raise RangeError("port", f"got {port}, expected 0 to 65535")
    token = None if host is None else secrets.token_urlsafe(24)
    address = LOOPBACK if host is None else host
    try:
        bound = _bound(address, port)
    except (OSError, UnicodeError) as error:
        raise RangeError("host", f"cannot listen on {address}: {error}; give an address of this machine") from error
    with bound:
        served = app.make(token).server if page is None else run_page.make(page, token)
        server = make_server(address, 0, served, threaded=True, request_handler=_Quiet, fd=bound.fileno())
        shown = f"[{address}]" if ":" in address else address
        page = f"http://{shown}:{bound.getsockname()[1]}/"
    return Listening(server, page if token is None else f"{page}?token={token}", token)


def _bound(address: str, port: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    for number in (port, 0):
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((place[0], number, *place[2:]))
            found.listen(128)
            return found
        except OSError:
            found.close()
            if number == 0:
                raise
    raise AssertionError("not reached")
