"""`curvoscope export`: the measured values of a run as one table, CSV or Parquet."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from curvoscope import checks, commands
from curvoscope.commands.reproduce import STORE
from curvoscope.database import RUNS, application_of
from curvoscope.errors import RangeError
from curvoscope.papers.experiments import Store
from curvoscope.training import RunStore

FORMATS = ("csv", "parquet")


def run(source: Path, kind: str, out: Path | None) -> None:
    """Write the table of `source`, a store or the directory of a run, to `out`; without `out`, CSV goes to stdout.

    Of experiments (`reproduce`), the coordinates of the points become columns of their own, empty if a figure has
    none of that name. Of monitored runs (`watch`), a row is one number of one record.
    """
    checks.choice("format", kind, FORMATS)
    path = source / STORE if source.is_dir() else source
    if not path.is_file():
        raise RangeError(
            "RUN", f"there is no store at {path}; give a run of watch or reproduce, the commands that keep one"
        )
    columns, table = _table(path)
    if kind == "csv":
        text = _csv(columns, table)
        if out is None:
            print(text, end="")
            return
        content = text.encode()
    else:
        if out is None:
            raise RangeError("out", "is missing; Parquet is binary and needs a file")
        content = _parquet(columns, table)
    commands.write(out, content)
    print(f"wrote {out}, {len(table)} rows")


def _table(path: Path) -> tuple[list[str], list[list[Any]]]:
    if application_of(path) == RUNS:
        with RunStore(path) as runs:
            columns, rows = runs.table()
        return columns, [list(row) for row in rows]
    with Store(path) as store:
        return _flattened(*store.table())


def _flattened(names: list[str], rows: list[tuple[object, ...]]) -> tuple[list[str], list[list[Any]]]:
    place = names.index("point")
    points = [json.loads(str(row[place])) for row in rows]
    coordinates = sorted({name for point in points for name in point})
    columns = [*names[:place], *coordinates, *names[place + 1 :]]
    table = [
        [*row[:place], *(point.get(name) for name in coordinates), *row[place + 1 :]]
        for row, point in zip(rows, points, strict=True)
    ]
    return columns, table


def _csv(columns: list[str], table: list[list[Any]]) -> str:
    """Floats in the shortest form that reads back as the same number."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(table)
    return buffer.getvalue()


def _parquet(columns: list[str], table: list[list[Any]]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise RangeError("format", "parquet needs pyarrow: pip install pyarrow, or export csv") from error
    values = {name: [row[i] for row in table] for i, name in enumerate(columns)}
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(values), buffer)
    return buffer.getvalue()
