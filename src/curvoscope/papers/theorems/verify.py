"""Compare every result of the sources with automatic differentiation: what `curvoscope verify` runs."""

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
    """Examine all theorems, lemmas, remarks and equations on random layers.

    Args:
        seed: for the layers.

    Returns:
        One result per theorem, in the order of the sources.

    Example:
        >>> from curvoscope.papers.theorems import verify
        >>> results = verify(seed=0)  # takes some ten seconds
        >>> results[0].name, all(result.holds for result in results)
        ('Equation (2)', True)
    """
    return list(examine(seed))
