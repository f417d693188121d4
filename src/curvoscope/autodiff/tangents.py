"""J v = d<g, v>/dG, a pass back through the gradient g = J^T G, needs only what leads to G.

Autograd does not tell functions written in Python which of their results it uses. Those of ours ask here: in such a
pass the derivatives of g in activations and weights are not wanted.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pass(threading.local):
    """What the passes of this thread are for. Other threads, such as those of a GPU, compute everything."""

    alone = False


_current = _Pass()


@contextmanager
def for_tangents() -> Iterator[None]:
    """Inside, passes back through gradients are for J v alone."""
    before, _current.alone = _current.alone, True
    try:
        yield
    finally:
        _current.alone = before


def tangents_alone() -> bool:
    """Whether this pass is for J v alone."""
    return _current.alone
