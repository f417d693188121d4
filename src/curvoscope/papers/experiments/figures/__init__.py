"""The figures: what is said of them in `catalogue.toml`, what they compute in the file of their name, or in `file`."""

import difflib
import importlib

from curvoscope.errors import RangeError
from curvoscope.papers.catalogue import CATALOGUE, NAMES
from curvoscope.papers.experiments import extras
from curvoscope.papers.experiments.figure import Figure


def find(names: list[str]) -> list[Figure]:
    """The figures of these names.

    Args:
        names: some of `NAMES`; "all" stands for all of them except those `left_out`.

    Returns:
        The figures, in the order of the names.

    Example:
        >>> from curvoscope.papers.experiments import find
        >>> [figure.title for figure in find(["fig3a"])]
        ['Growth with the scale of the input, one block without a norm']
    """
    if not names:
        raise RangeError("NAME", f"is missing; give one or more of all, {', '.join(NAMES)}")
    for name in names:
        if name != "all" and name not in NAMES:
            near = difflib.get_close_matches(name, ("all", *NAMES), n=3, cutoff=0.3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are all, {', '.join(NAMES)}"
            raise RangeError("NAME", f"there is no figure {name!r}; {hint}")
    for name in names:
        for extra in _needs(name):
            extras.check_installed(extra)
    every = [name for name in NAMES if name not in left_out()]
    wanted = every if "all" in names else list(dict.fromkeys(names))
    return [load(name) for name in wanted]


def left_out() -> tuple[str, ...]:
    """The figures that "all" leaves out because packages that they need are not installed.

    Returns:
        Their names.

    Example:
        >>> from curvoscope.papers.experiments import NAMES, left_out
        >>> set(left_out()) <= set(NAMES)
        True
    """
    return tuple(name for name in NAMES if not all(map(extras.is_installed, _needs(name))))


def _needs(name: str) -> tuple[str, ...]:
    """The extras that a figure needs."""
    return tuple(CATALOGUE.get(name, {}).get("needs", ()))


def load(name: str) -> Figure:
    """One figure."""
    shared = CATALOGUE[name].get("file")
    module = importlib.import_module(f"{__name__}.{shared or name.replace('-', '_')}")
    figure = module.FIGURES[name] if shared else module.FIGURE
    assert isinstance(figure, Figure)
    return figure
