"""Docstrings as reStructuredText.

A docstring of the package is plain text: paragraphs, names in single backticks, formulas in Unicode or ASCII, lists
with dashes, indented blocks of formulas or code, and the sections `Args:`, `Attributes:`, `Returns:`, `Yields:`,
`Raises:` and `Example:` (Google style). Read as reStructuredText, as sphinx.ext.napoleon would, |x|² would be a
substitution and W_ a link; so the text is escaped, and only what is listed here is marked up.
"""

import re
from collections.abc import Iterator
from typing import Any

import curvoscope
from curvoscope import analysis, attention, estimate, exact, training

_SPECIAL = re.compile(r"([\\*|]|_(?!\w)|(?<!\w)_)")
_ARGUMENT = re.compile(r"^    (\*{0,2}\w[\w, *]*): (.*)$")
_SECTIONS = {
    "Args:": "Arguments",
    "Attributes:": "Attributes",
    "Returns:": "Returns",
    "Yields:": "Yields",
    "Raises:": "Raises",
    "Example:": "Example",
    "Examples:": "Example",
}
_LISTS = ("Arguments", "Attributes", "Raises")
_TARGETS = {
    name: f"{module.__name__}.{name}"
    for module in (attention, estimate, analysis, training, exact, curvoscope)
    for name in module.__all__
    if callable(getattr(module, name))
} | {
    "cv.hessian": "curvoscope.hessian",
    "ModelHessian": "curvoscope.curvature.ModelHessian",
    "AttentionLayer": "curvoscope.exact.attention.layer.AttentionLayer",
}


def inline(text: str) -> str:
    """Names in backticks as code, or as a link where the reference has them; everything else as it stands."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner
        return _SPECIAL.sub(r"\\\1", text.replace("`", "\\`"))
    return "".join(_code(part) if i % 2 else _SPECIAL.sub(r"\\\1", part) for i, part in enumerate(parts))


def _code(name: str) -> str:
    if not name:
        return ""
    found = _TARGETS.get(name)
    # an escaped space on both sides ends the markup, whatever stands beside it
    return rf"\ :py:obj:`{name} <{found}>`\ " if found else rf"\ ``{name}``\ "


def convert(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring, cleaned of their common indentation, as reStructuredText."""
    section = ""
    literal = False
    blank = True
    for line in lines:
        if not line.strip():
            blank = True
            yield ""
            continue
        indented = line.startswith("    ")
        if line in _SECTIONS:
            section, literal = _SECTIONS[line], False
            yield from ("", f".. rubric:: {section}", "")
            if section == "Example":
                yield from (".. code-block:: pycon", "")
        elif section and indented:
            yield from _in_section(section, line)
        elif indented and (blank or literal):
            if not literal:
                yield from ("::", "")
            literal = True
            yield line
        else:
            if (literal or section) and not blank:
                yield ""
            section, literal = "", False
            yield inline(line)
        blank = False
    yield ""


def _in_section(section: str, line: str) -> Iterator[str]:
    """A line of a section: of code as it stands, of a definition list of arguments and errors, or of a paragraph."""
    found = _ARGUMENT.match(line) if section in _LISTS else None
    if section == "Example":
        yield line
    elif found:
        yield from ("", f"``{found[1]}``", f"    {inline(found[2])}")
    else:
        yield "    " * (section in _LISTS) + inline(line.strip())


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    text = list(lines)
    if what in ("class", "exception") and text and re.match(r"^\w+\(.*\) -> None$", "".join(text).strip()):
        text = []  # the signature that dataclasses put in place of a docstring
    lines[:] = list(convert(text))


def _skip(app: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """The fields of named tuples: the docstring of the class describes them."""
    return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else None


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _process)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
