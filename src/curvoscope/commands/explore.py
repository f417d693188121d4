"""`curvoscope explore`: the interactive page."""

import sys
import webbrowser

import torch
from rich.console import Console

from curvoscope.errors import MissingPackageError


def run(host: str | None, port: int, open_browser: bool) -> None:
    """Serve the page until interrupted."""
    try:
        from curvoscope.explorer.server import listen
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(("dash", "flask", "werkzeug")):
            raise
        raise MissingPackageError("explore", "needs dash: pip install 'curvoscope[explore]'") from error
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    found = listen(host, port)
    if found.token is not None:
        warning = f"warning: {host} is reachable from other machines; anyone with the link can use the page."
        Console(stderr=True).print(warning, style="yellow", soft_wrap=True)
    print(f"{found.address}\nPress Ctrl-C to stop.", flush=True)
    if port and f":{port}/" not in found.address:
        print(f"port {port} is taken; using a free one", file=sys.stderr, flush=True)
    if open_browser:
        webbrowser.open(found.address)
    with found.server as server:
        server.serve_forever()
