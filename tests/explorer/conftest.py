import threading

import pytest


@pytest.fixture(scope="session")
def address():
    """A server on loopback at a free port, in a thread of this process."""
    pytest.importorskip("dash", reason="the explorer needs dash")
    from curvoscope.explorer.server import listen

    found = listen(None, 0)
    thread = threading.Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    yield found.address
    found.server.shutdown()
    thread.join()
    found.server.server_close()
