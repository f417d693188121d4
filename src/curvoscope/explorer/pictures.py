"""A large matrix as a small picture: the entries of largest magnitude, coloured on a signed logarithmic scale.

An entry v is drawn at sign(v) log10(|v|/floor), with floor = 10^-DECADES of the power of ten above the largest
magnitude; what is below has the colour of zero.
"""

import base64
import struct
import zlib
from functools import cache, reduce

import numpy as np

DECADES = 6
MOST_CELLS = 192

_POSITIVE, _NEGATIVE = ((0, 114, 178), (0, 38, 66)), ((213, 94, 0), (74, 28, 0))  # Okabe and Ito's, and darker
_LEVELS = 127


def pooling(n: int) -> int:
    """Entries along a side of a cell, so that n of them need at most `MOST_CELLS`."""
    return -(-n // MOST_CELLS)


def pooled(matrix: np.ndarray) -> np.ndarray:
    """Of each `pooling(n)`-sided square of an (n, n) matrix, the entry of largest magnitude with its sign."""
    step, cells = pooling(len(matrix)), -(-len(matrix) // pooling(len(matrix)))
    if len(matrix) % step:  # the last squares are smaller: copies of the last entries fill them
        matrix = np.pad(matrix, (0, -len(matrix) % step), mode="edge")
    strips = matrix.reshape(cells, step, cells * step)
    high, low = strips.max(1), strips.min(1)
    high = reduce(np.maximum, (high[:, shift::step] for shift in range(step)))  # strides are faster than reshape here
    low = reduce(np.minimum, (low[:, shift::step] for shift in range(step)))
    return np.where(high >= -low, high, low)


def scale(largest: float) -> float:
    """The power of ten above: while it stays, a move changes the colours of what changed, and no axis."""
    return float(10.0 ** np.ceil(np.log10(largest))) if largest > 0 else 1.0


def signed_log(values: np.ndarray, top: float) -> np.ndarray:
    """sign(v) log10(|v|/floor), 0 below the floor: from -DECADES to DECADES."""
    with np.errstate(divide="ignore"):
        depth = np.log10(np.abs(values) / top) + DECADES
    return np.sign(values) * np.clip(depth, 0.0, DECADES)


def ticks(top: float) -> tuple[list[float], list[str]]:
    """Places and words of the powers of ten on such a scale, and of its zero."""
    highest = int(np.floor(np.log10(top)))
    powers = [power for power in range(highest, highest - DECADES, -2) if power - np.log10(top) + DECADES > 0.7]
    places = {power: power - float(np.log10(top)) + DECADES for power in powers}
    rising = sorted(places)
    return (
        [-places[power] for power in powers] + [0.0] + [places[power] for power in rising],
        [f"−10{raised(power)}" for power in powers] + ["0"] + [f"10{raised(power)}" for power in rising],
    )


def colours() -> list[tuple[int, int, int]]:
    """From the most negative over white at zero to the most positive: 2 _LEVELS + 1 of them."""
    down, up = ([_blend(i / _LEVELS, ends) for i in range(1, _LEVELS + 1)] for ends in (_NEGATIVE, _POSITIVE))
    return [*reversed(down), (255, 255, 255), *up]


def colour_scale(steps: int = 12) -> list[list[object]]:
    """The same colours as a Plotly scale."""
    palette = colours()
    chosen = np.linspace(0, len(palette) - 1, 2 * steps + 1).astype(int)
    return [[i / (2 * steps), "rgb({}, {}, {})".format(*palette[place])] for i, place in enumerate(chosen)]


def address(cells: np.ndarray, top: float) -> str:
    """The picture of a matrix as a data: address of a PNG, a pixel for each of its `pooled` cells."""
    level = np.rint(signed_log(cells, top) * (_LEVELS / DECADES)).astype(np.int16) + _LEVELS
    return "data:image/png;base64," + base64.b64encode(_png(level.astype(np.uint8))).decode()


def _png(levels: np.ndarray) -> bytes:
    """A PNG of palette entries (h, w), stored: to compress it takes longer than to send it."""
    height, width = levels.shape
    rows = np.concatenate([np.zeros((height, 1), dtype=np.uint8), levels], 1)  # filter 0 before each row
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", _palette()), (b"IDAT", zlib.compress(rows.tobytes(), 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


@cache
def _palette() -> bytes:
    return bytes(channel for colour in colours() for channel in colour)


def _blend(share: float, ends: tuple[tuple[int, int, int], tuple[int, int, int]]) -> tuple[int, int, int]:
    """White at 0, the first colour at 5/6, the second at 1."""
    first, second = ends
    white = (255, 255, 255)
    start, stop, along = (white, first, 1.2 * share) if share <= 5 / 6 else (first, second, 6 * share - 5)
    red, green, blue = (round(a + along * (b - a)) for a, b in zip(start, stop, strict=True))
    return red, green, blue


def raised(power: int) -> str:
    """As an exponent: ⁻¹² for -12."""
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
