"""Every result of the sources against automatic differentiation: what `curvoscope verify` runs."""

from collections.abc import Iterator

from curvoscope.papers.theorems.registry import Result
from curvoscope.papers.theorems.results import THEOREMS


def names() -> list[str]:
    """The names of all results, in the order in which they are examined."""
    return list(THEOREMS)


def examine(seed: int) -> Iterator[Result]:
    """The results one by one, as they are found."""
    return (theorem.examine(seed) for theorem in THEOREMS.values())


def verify(seed: int = 0) -> list[Result]:
    """Examine all theorems, lemmas, remarks and equations on random layers drawn from `seed`."""
    return list(examine(seed))
