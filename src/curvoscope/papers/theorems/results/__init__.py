"""The checks, one small function per result. Importing this package registers them, in the order of the sources."""

import importlib

from curvoscope.papers.theorems.registry import THEOREMS

__all__ = ["THEOREMS"]

_IN_ORDER = (
    *("setup", "blocks", "moments", "growth", "weights", "linear", "query_key", "calculus", "heads", "slides"),
    *("structure", "block_calculus", "attention_norms", "layer_norm", "post_norm_block", "block_norms"),
    *("sample_size", "article"),
)
for _name in _IN_ORDER:
    importlib.import_module(f"{__name__}.{_name}")
