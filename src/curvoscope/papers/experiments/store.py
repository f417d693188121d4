"""Storage for measured values: SQLite in WAL mode, one row per value, committed with the point that it belongs to.

A point of a figure's grid is in the store with all its values or not at all, so that a run may be killed at any moment.
The key is the experiment, the hash of its full configuration, its version, the seed and the point: a change of any of
them finds nothing. Rows do not say when or where they were measured: two runs with the same seeds make equal tables.
For each point the versions of the programs that measured it are kept.
"""

import json
import math
from collections.abc import Mapping
from typing import ClassVar

from curvoscope.database import EXPERIMENTS, Database
from curvoscope.errors import NonFiniteError
from curvoscope.papers.experiments.figure import Figure, MeasuredValue, Point, Row, canonical
from curvoscope.versions import versions

_PROGRAMS = """
CREATE TABLE programs (
    experiment TEXT NOT NULL, configuration TEXT NOT NULL, version INTEGER NOT NULL, seed INTEGER NOT NULL,
    point TEXT NOT NULL, curvoscope TEXT NOT NULL, torch TEXT NOT NULL, python TEXT NOT NULL,
    PRIMARY KEY (experiment, configuration, version, seed, point)
) STRICT, WITHOUT ROWID
"""
_SCHEMA = f"""
CREATE TABLE measured (
    experiment TEXT NOT NULL, configuration TEXT NOT NULL, version INTEGER NOT NULL, seed INTEGER NOT NULL,
    point TEXT NOT NULL, layer INTEGER NOT NULL, block TEXT NOT NULL, part TEXT NOT NULL, quantity TEXT NOT NULL,
    at REAL NOT NULL, value REAL NOT NULL, stderr REAL NOT NULL,
    PRIMARY KEY (experiment, configuration, version, seed, point, layer, block, part, quantity, at)
) STRICT, WITHOUT ROWID;
CREATE TABLE configurations (configuration TEXT PRIMARY KEY, document TEXT NOT NULL) STRICT, WITHOUT ROWID;
{_PROGRAMS}
"""


class Store(Database):
    """The measured values of all experiments in one SQLite file.

    Args:
        path: the file; it is made if it is not there.

    Example:
        >>> import tempfile
        >>> from curvoscope.papers.experiments import MeasuredValue, Store, find
        >>> figure, = find(["fig3a"])
        >>> with tempfile.TemporaryDirectory() as folder, Store(f"{folder}/store.sqlite") as store:
        ...     store.add(figure, figure.points[0], 0, [MeasuredValue(1, "Q", "outer", 0.5)])
        ...     [(row.point, row.seed, row.found.value) for row in store.rows(figure, quick=True)]
        [({'sigma': 0.01}, 0, 0.5)]
    """

    application, version, schema = EXPERIMENTS, 2, _SCHEMA
    changes: ClassVar[Mapping[int, str]] = {1: _PROGRAMS}

    def done(self, figure: Figure) -> set[tuple[str, int]]:
        """The points in the store, as (canonical point, seed)."""
        statement = (
            "SELECT DISTINCT point, seed FROM measured WHERE experiment = ? AND configuration = ? AND version = ?"
        )
        return {(point, seed) for point, seed in self.read(statement, figure.name, figure.hash, figure.version)}

    def add(self, figure: Figure, point: Point, seed: int, values: list[MeasuredValue]) -> None:
        """Commit all values of one point. Adding a point that is there already changes nothing."""
        for value in values:
            if not (math.isfinite(value.value) and math.isfinite(value.stderr)):
                raise NonFiniteError("value", f"{figure.name} measured {value} at {dict(point)}, seed {seed}")
        key = (figure.name, figure.hash, figure.version, seed, canonical(point))
        rows = [(*key, v.layer, v.block, v.part, v.quantity, v.at, v.value, v.stderr) for v in values]
        document = canonical(figure.configuration.model_dump(mode="json"))
        known = versions()
        programs = (*key, known["curvoscope"], known["torch"], known["python"])
        with self._named("write"), self._transaction():
            self._connection.execute("INSERT OR IGNORE INTO configurations VALUES (?, ?)", (figure.hash, document))
            self._connection.executemany(f"INSERT OR IGNORE INTO measured VALUES ({', '.join('?' * 12)})", rows)
            self._connection.execute("INSERT OR IGNORE INTO programs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", programs)

    def forget(self, figure: Figure) -> None:
        """Delete what was measured for the figure's present configuration and version."""
        values = (figure.name, figure.hash, figure.version)
        with self._named("write"), self._transaction():  # programs left behind would be taken for those of new values
            for statement in (
                "DELETE FROM measured WHERE experiment = ? AND configuration = ? AND version = ?",
                "DELETE FROM programs WHERE experiment = ? AND configuration = ? AND version = ?",
            ):
                self._connection.execute(statement, values)

    def rows(self, figure: Figure, quick: bool) -> list[Row]:
        """The values of a figure's grid, in the order of the key."""
        wanted = {(canonical(point), seed) for point, seed in figure.grid(quick)}
        found = self.read(
            "SELECT point, seed, layer, block, part, value, stderr, quantity, at FROM measured "
            "WHERE experiment = ? AND configuration = ? AND version = ? "
            "ORDER BY seed, point, layer, block, part, quantity, at",
            *(figure.name, figure.hash, figure.version),
        )
        return [
            Row(json.loads(point), seed, MeasuredValue(*rest))
            for point, seed, *rest in found
            if (point, seed) in wanted
        ]

    def table(self) -> tuple[list[str], list[tuple[object, ...]]]:
        """All values with the versions of the programs: column names, and the rows in the order of the key."""
        with self._named("read"):
            found = self._connection.execute(
                "SELECT * FROM measured LEFT JOIN programs USING (experiment, configuration, version, seed, point) "
                "ORDER BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
            )
            return [column[0] for column in found.description], found.fetchall()
