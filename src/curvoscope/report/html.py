"""The report as one HTML file, which opens from disk and asks the network for nothing."""

import base64
from functools import lru_cache
from typing import TYPE_CHECKING

from curvoscope.report.contents import Report

if TYPE_CHECKING:
    import jinja2


def page(report: Report) -> str:
    """The whole page: style, script and figures are inside, everything from the run is escaped."""
    return _templates().get_template("page.html").render(report=report)


def fragment(report: Report) -> str:
    """Answer, tables and advice, for a notebook."""
    return _templates().get_template("fragment.html").render(report=report)


@lru_cache(maxsize=1)
def _templates() -> "jinja2.Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("curvoscope.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["base64"] = lambda content: base64.b64encode(content).decode()
    templates.filters["full"] = lambda value: repr(float(value))  # reads back as the same number
    return templates
