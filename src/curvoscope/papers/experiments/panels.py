"""What a picture shows, without saying how it is drawn: Matplotlib and Plotly draw the same panels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from jaxtyping import Float

_LEAST_MARGIN, _MARGIN = 1.5, 4.0  # above and below curves on a logarithmic axis; a legend has room in a third of it


@dataclass(frozen=True)
class Series:
    """A curve with error bars; `colour` and `stroke` count through the palette and the strokes."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    colour: int = 0
    stroke: int = 0
    steps: bool = False


@dataclass(frozen=True)
class Guide:
    """A dashed line: the predicted slope through a point of the data, and its name."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Image:
    """A matrix of numbers as colours, with the borders of its blocks and their names in the middle."""

    values: Float[np.ndarray, "r c"]
    borders: Sequence[float]
    names: Sequence[str]
    scale: str

    @property
    def middles(self) -> list[float]:
        """The middles of the blocks, on axes on which entry i reaches from i - 1/2 to i + 1/2."""
        return [(first + last - 1) / 2 for first, last in pairwise([0.0, *self.borders])]

    @property
    def shades(self) -> tuple[float, float]:
        """The numbers with the first and the last colour: few small entries do not take all of the scale."""
        low, high = np.nanpercentile(self.values, [1, 100])
        return float(low), float(high)


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `x_names` name the places 1, 2, ... on the x axis; below `y_floor` nothing is shown."""

    title: str
    x_label: str = "σ"
    y_label: str = "Frobenius norm"
    x_log: bool = True
    y_log: bool = True
    series: Sequence[Series] = field(default_factory=tuple)
    guides: Sequence[Guide] = field(default_factory=tuple)
    marks: Sequence[float] = field(default_factory=tuple)
    image: Image | None = None
    note: str = ""
    x_names: Sequence[str] = field(default_factory=tuple)
    y_floor: float = 0.0

    def y_range(self) -> tuple[float, float] | None:
        """What to show: the curves with their error bars, and not the guides; None without a curve."""
        low, high = math.inf, -math.inf
        for one in self.series:
            for y, error in zip(one.y, one.error or [0.0] * len(one.y), strict=True):
                if not self.y_log:
                    low, high = min(low, y - error), max(high, y + error)
                elif y > 0:
                    low, high = min(low, y), max(high, y + error)
        if low > high:
            return None
        if self.y_log:
            margin = min(_MARGIN, max(high / low, _LEAST_MARGIN))
            return max(low / margin, self.y_floor), high * margin
        pad = 0.08 * (high - min(low, 0.0)) or 1.0
        return (low - pad if low < 0 else 0.0), high + pad
