"""The data of the figures as CSV: every number with all of its digits, every line with the seed of the state and the
versions of the programs that made it."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np

from curvoscope.explorer.compute import CURVES, SIGMAS, SINKS, Curves, ExplorerSpectra, Matrices, exponents
from curvoscope.explorer.state import State
from curvoscope.versions import versions

CsvCell = str | int | float
CsvTable = tuple[list[str], Iterable[list[CsvCell]]]


def matrix(found: Matrices, part: str) -> CsvTable:
    """The whole matrix, one line per row; rows and columns are named by block and place in it, as Q.0."""
    sizes = [stop - start for start, stop in pairwise(found.borders)]
    places = [f"{name}.{i}" for name, size in zip(found.names, sizes, strict=True) for i in range(size)]
    rows = ([place, *row.tolist()] for place, row in zip(places, found.dense[part], strict=True))
    return ["entry", *places], rows


def attention(found: Matrices) -> CsvTable:
    """One line per weight."""
    rows = ([*(place + 1 for place in where), float(value)] for where, value in np.ndenumerate(found.attention))
    return ["head", "query", "key", "weight"], rows


def norms(found: Matrices) -> CsvTable:
    """One line per block and part."""
    return ["row", "column", "part", "frobenius_norm"], ([*key, value] for key, value in found.norms.items())


def growth(found: Curves) -> CsvTable:
    """The curves; each ends with its value at the scale of the state."""
    rows: list[list[CsvCell]] = []
    for (row, column, part), power, curve, here in zip(
        CURVES, exponents(found.state), found.growth, found.here, strict=True
    ):
        block = row if row == column else f"{row}.{column}"
        points = [*zip(SIGMAS, curve.tolist(), strict=True), (found.state.sigma, here)]
        rows += [[block, part, "" if power is None else power, sigma, norm] for sigma, norm in points]
    return ["block", "part", "exponent", "sigma", "norm"], rows


def eigenvalues(found: ExplorerSpectra) -> CsvTable:
    """Those of the Hessian, of its T-functional part, and the bulk, with their multiplicities."""
    rows: list[list[CsvCell]] = [["hessian", float(value), 1] for value in found.eigenvalues]
    d_k = found.state.d_k
    rows += [["t_functional", sign * float(value), d_k] for value in found.pairs for sign in (1.0, -1.0)]
    rows += [["bulk", float(value), found.multiplicity] for value in found.bulk]
    return ["spectrum", "eigenvalue", "multiplicity"], rows


def scalar(found: Curves) -> CsvTable:
    """The spectra of the scalar model; the last one is that at the sink of the state."""
    rows = (
        [sink, one.bulk, one.multiplicity, *one.outliers.tolist()]
        for sink, one in zip((*SINKS, found.state.sink), found.scalar, strict=True)
    )
    return ["sink", "bulk", "pairs", "outlier_1", "outlier_2", "outlier_3"], rows


FROM_MATRICES: dict[str, Callable[[Matrices], CsvTable]] = {
    "attention": attention,
    "hessian": lambda found: matrix(found, "total"),
    "outer": lambda found: matrix(found, "outer"),
    "functional": lambda found: matrix(found, "functional"),
    "norms": norms,
}
FROM_CURVES: dict[str, Callable[[Curves], CsvTable]] = {"growth": growth, "scalar": scalar}
FROM_SPECTRA: dict[str, Callable[[ExplorerSpectra], CsvTable]] = {"eigenvalues": eigenvalues}
TABLES = (*FROM_MATRICES, *FROM_CURVES, *FROM_SPECTRA)


def lines(table: CsvTable, state: State) -> Iterator[str]:
    """The file: the heading, then one line per row, made as they are sent; the last columns say what made it."""
    heading, rows = table
    source: dict[str, CsvCell] = {"seed": state.seed, **versions()}
    yield ",".join([*heading, *source]) + "\n"
    for row in rows:
        yield ",".join(repr(cell) if isinstance(cell, float) else str(cell) for cell in (*row, *source.values())) + "\n"
