"""Approximations by name: "kfac", "kronecker:4", "shampoo:1/4", "kfac/heads"."""

from collections.abc import Callable
from fractions import Fraction

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.diagonal import diagonal
from curvoscope.approximations.ekfac import ekfac
from curvoscope.approximations.empirical import empirical
from curvoscope.approximations.gradients import GradientSource
from curvoscope.approximations.heads import heads, heads_of
from curvoscope.approximations.input import input as of_inputs
from curvoscope.approximations.kfac import kfac
from curvoscope.approximations.kl_shampoo import kl_shampoo
from curvoscope.approximations.kronecker import kronecker
from curvoscope.approximations.layers import layers, members_of
from curvoscope.approximations.neurons import neurons
from curvoscope.approximations.product import KroneckerProduct
from curvoscope.approximations.shampoo import shampoo
from curvoscope.approximations.source import CurvatureSource, source_of
from curvoscope.approximations.split import SplitForm
from curvoscope.approximations.tkfac import tkfac
from curvoscope.errors import CurvoscopeError, DtypeError, RangeError

_PLAIN: dict[str, Callable[[GradientSource], Approximation]] = {
    "diagonal": diagonal,
    "neurons": neurons,
    "heads": heads,
    "layers": layers,
    "kfac": kfac,
    "ekfac": ekfac,
    "tkfac": tkfac,
    "shampoo": shampoo,
    "kl_shampoo": kl_shampoo,
    "input": of_inputs,
    "empirical": empirical,
    "kronecker": kronecker,
}
_WITH_OPTION: dict[str, Callable[[GradientSource, str], Approximation]] = {
    "kfac": lambda source, option: kfac(source, sharing=option),
    "shampoo": lambda source, option: shampoo(source, power=float(Fraction(option))),
    "kronecker": lambda source, option: kronecker(source, rank=int(option)),
}
_EXAMPLES = {"kfac": "kfac:reduce", "shampoo": "shampoo:1/4", "kronecker": "kronecker:4"}
NAMES = tuple(_PLAIN)


def approximation(H: CurvatureSource, text: str, name: str | None = None) -> Approximation:
    """An approximation by its name.

    Args:
        H: a Hessian, a sweep that keeps the block, or a `GradientSource`.
        text: the name, with an option after a colon ("kronecker:4", "shampoo:1/4", "kfac:reduce"). "/heads" makes one
            approximation for each head ("kfac/heads"), "/layers" one for each of several joined weights.
        name: of the block.

    Returns:
        The approximation, with `text` as its name.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> cv.approximations.approximation(H, "kronecker:2", "weight").floats
        26
    """
    check_name(text)
    source = source_of(H, name, signed=True)
    whole, split = _parsed(text)
    if not split:
        found = _made(source, text)
    elif split == "heads":
        heads, axis = heads_of(source)
        if whole.startswith("kfac"):  # heads share the factor of the other side
            made = _made(source, whole)
            assert isinstance(made, KroneckerProduct)
            found = made.within(heads, axis)
        else:
            found = SplitForm(text, [_made(source.head(i), whole) for i in range(heads)], axis)
    else:
        found = SplitForm(text, [_made(part, whole) for part in members_of(source)], source.members_axis)
    found.name = text
    return found


def _parsed(text: str) -> tuple[str, str]:
    """The name of an approximation and what it is split into: ("kfac", "heads") for "kfac/heads", ("kfac", "")."""
    whole, _, split = text.rpartition("/")
    return (whole, split) if split in ("heads", "layers") and whole else (text, "")


def check_name(text: str) -> None:
    """Raise `RangeError` for a text that is the name of no approximation."""
    if not isinstance(text, str):
        raise DtypeError("approximations", f"got {type(text).__name__}, expected a name such as 'kfac'")
    kind, colon, _ = _parsed(text)[0].partition(":")
    if kind not in (_WITH_OPTION if colon else _PLAIN):
        known = ", ".join([*NAMES, *_EXAMPLES.values(), "kfac/heads"])
        raise RangeError("approximations", f"got {text!r}, expected a name such as {known}")


def _made(source: GradientSource, text: str) -> Approximation:
    kind, colon, option = text.partition(":")
    try:
        return _WITH_OPTION[kind](source, option) if colon else _PLAIN[kind](source)
    except (ValueError, ZeroDivisionError) as error:
        if isinstance(error, CurvoscopeError):
            raise
        raise RangeError(
            "approximations",
            f"got {text!r}, but {kind} has no option {option!r}; expected one such as {_EXAMPLES[kind]}",
        ) from None
