"""The checks, one small function a result. Importing this package registers them, in the order of the sources."""

from curvoscope.theorems.registry import THEOREMS  # noqa: I001  (the order is that of the table)
from curvoscope.theorems.results import (
    setup,
    blocks,
    moments,
    growth,
    weights,
    linear,
    query_key,
    calculus,
    heads,
    slides,
    structure,
)

__all__ = [
    "THEOREMS",
    "blocks",
    "calculus",
    "growth",
    "heads",
    "linear",
    "moments",
    "query_key",
    "setup",
    "slides",
    "structure",
    "weights",
]
