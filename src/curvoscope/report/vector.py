"""Figures as SVG: drawn by Matplotlib, set into a page in the colours of its scheme."""

import html
import io
import re
from xml.etree import ElementTree

from curvoscope.report.style import Figure

_DPI = 150  # of the pictures inside
_LEAST = 0.8  # of its own width, to which a page may shrink a figure; a narrower page scrolls it
_COLUMN = 480  # points: the narrower one of two columns of a page
# what Matplotlib draws with; a file of a run may come from anywhere, and no script of it reaches the page
_TAGS = ("svg", "g", "defs", "path", "use", "clipPath", "rect", "image")
_ATTRIBUTES = ("id", "href", "d", "style", "transform", "clip-path", "x", "y", "width", "height", "viewBox")
_HREF = re.compile(r"#[\w-]+|data:image/png;base64,[\w+/=\s]*")
_COLORS = {  # those that would be lost on a dark page, by the page's own
    "#000000": "currentColor",
    "#0072b2": "var(--blue)",
    "#e0e0e0": "var(--line)",
    "#dddddd": "var(--line)",
    "#666666": "var(--soft)",
    "#444444": "var(--soft)",
}


class VectorError(ValueError):
    """The text is not the SVG of a figure."""


def svg(figure: Figure) -> bytes:
    """The figure without a background, the same bytes for the same figure."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "curvoscope", "svg.fonttype": "path", "path.simplify_threshold": 0.2}):
        figure.savefig(buffer, format="svg", dpi=_DPI, transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def inline(content: bytes, prefix: str, label: str) -> str:
    """The SVG as an element of a page: shapes only, ids with a prefix of their own, a label for screen readers.

    Raises:
        VectorError: if the content is no SVG.
    """
    try:
        text = content.decode()
        if "<!ENTITY" in text:  # without them nothing grows and nothing is fetched
            raise VectorError("it declares entities")
        root = ElementTree.fromstring(text)  # nosec B314
    except (UnicodeDecodeError, ElementTree.ParseError) as error:
        raise VectorError(str(error)) from error
    if _local(root.tag) != "svg" or not re.fullmatch(r"0 0 [\d.]+ [\d.]+", root.get("viewBox", "")):
        raise VectorError(f"the root is {_local(root.tag)}, or has no size")
    least = _LEAST * float(root.get("viewBox", "").split()[2])
    name = ' class="broad"' if least > _COLUMN else ""
    opening = f'<svg role="img" aria-label="{html.escape(label, quote=True)}"{name} style="min-width: {least:.0f}pt"'
    return _element(root, prefix).replace("<svg", opening, 1)


def _element(element: ElementTree.Element, prefix: str) -> str:
    attributes = [f' {name}="{value}"' for name, value in _attributes(element, prefix)]
    inside = "".join(_element(child, prefix) for child in element if _local(child.tag) in _TAGS)
    tag = _local(element.tag)
    return f"<{tag}{''.join(attributes)}>{inside}</{tag}>"


def _attributes(element: ElementTree.Element, prefix: str) -> list[tuple[str, str]]:
    found = []
    for key, text in element.attrib.items():
        name, value = _local(key), text
        if name not in _ATTRIBUTES or (name == "href" and not _HREF.fullmatch(value)):
            continue
        if name == "id":
            value = f"{prefix}{value}"
        elif name == "href" and value.startswith("#"):
            value = f"#{prefix}{value[1:]}"
        elif name in ("style", "clip-path"):
            value = re.sub(r"url\(#([\w-]+)\)", rf"url(#{prefix}\1)", value)
            value = value.replace("fill: #ffffff; opacity", "fill: var(--page); opacity")  # a pad behind words
            value = re.sub("#[0-9a-f]{6}", lambda color: _COLORS.get(color[0], color[0]), value)
        elif name == "d":
            value = " ".join(value.split())
        found.append((name, html.escape(value, quote=True)))
    return found


def _local(name: object) -> str:
    """Without the namespace; comments have no name."""
    return name.rpartition("}")[2] if isinstance(name, str) else ""
