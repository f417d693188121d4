import io

from rich.console import Console

from curvoscope.analysis import BlockRow
from curvoscope.report.tables import off_diagonal_table

ROWS = [
    BlockRow("Q", "Q", "outer", 1.25e-4, 2.5e-7, -3.5e-3, 4.75e-2, -1.0e-20, 1e-18, 0.125),
    BlockRow("Q", "Q", "functional", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    BlockRow("Q", "Q", "total", 1.25e-4, 2.5e-7, -3.5e-3, 4.75e-2, -6.5e-2, 1e-18, 0.5),
    BlockRow("Q", "V", "outer", 8.5e-4, 9.5e-7),
]


def printed(table):
    stream = io.StringIO()
    Console(file=stream, width=80).print(table)
    return stream.getvalue()


def test_the_off_diagonal_table():
    lines = [line.split() for line in printed(off_diagonal_table(ROWS)).splitlines()]
    assert ["Q,", "V", "outer", "8.50e-04", "9.50e-07"] in lines
    assert sum("outer" in line for line in lines) == 1
