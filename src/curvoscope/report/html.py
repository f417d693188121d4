"""The report as one HTML file that needs no network."""

import base64
import hashlib
import html
import re
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from curvoscope.report.cells import amount
from curvoscope.report.contents import Report, ReportFigure
from curvoscope.report.vector import VectorError, inline
from curvoscope.report.views import as_json

if TYPE_CHECKING:
    import jinja2


def page(report: Report) -> str:
    """The whole page: style, script and figures are inside, everything from the run is escaped."""
    figures = [one for section in report.sections for one in section.figures]
    drawn = {one.file: _image(one, f"f{place}-") for place, one in enumerate(figures)}
    return (
        _templates()
        .get_template("page.html")
        .render(report=report, drawn=drawn, data=as_json(report.views), script=_script(), hash=script_hash())
    )


def script_hash() -> str:
    """The only script that a page runs, as its content security policy names it."""
    digest = hashlib.sha256(_script().encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@lru_cache(maxsize=1)
def _script() -> str:
    return files("curvoscope.report").joinpath("assets/page.js").read_text(encoding="utf-8")


def fragment(report: Report) -> str:
    """Answer, tables and advice, for a notebook."""
    return _templates().get_template("fragment.html").render(report=report)


def _image(figure: ReportFigure, prefix: str) -> str:
    """The SVG in the colours of the page; if none can be read, the PNG, always on white."""
    if figure.svg is not None:
        try:
            return inline(figure.svg, prefix, figure.alt)
        except VectorError:
            pass
    if figure.png is None:
        return f"<p>{html.escape(figure.file)} cannot be drawn: its file is damaged.</p>"
    content = base64.b64encode(figure.png).decode()
    return f'<img src="data:image/png;base64,{content}" alt="{html.escape(figure.alt, quote=True)}">'


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
    templates.filters["full"] = lambda value: repr(float(value))  # reads back as the same number
    templates.filters["unbroken"] = _unbroken
    templates.filters["amount"] = amount
    return templates


def _unbroken(escaped: str) -> str:
    """Numbers such as 1e-04 and options such as --seed stay on one line: browsers break lines behind a hyphen."""
    return re.sub(r"-?[\d.]+e-\d+|(?<!\w)--[\w-]+|λ max", r'<span class="unbroken">\g<0></span>', str(escaped))
