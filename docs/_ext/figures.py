"""The pictures of the examples: every figure that a cell of an example has made."""

from typing import Any

from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst

_DOTS = 150  # an inch


def scraper(block: Any, variables: dict[str, Any], configuration: dict[str, Any]) -> str:
    """Save the figures among an example's variables, each once."""
    paths = []
    for value in variables["example_globals"].values():
        if isinstance(value, Figure) and not getattr(value, "_in_gallery", False):
            path = next(variables["image_path_iterator"])
            value.savefig(path, dpi=_DOTS)
            value._in_gallery = True  # type: ignore[attr-defined]
            paths.append(path)
    return figure_rst(paths, configuration["src_dir"])
