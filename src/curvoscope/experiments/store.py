"""Where measured values are kept: SQLite in WAL mode, one row a value, committed with the point that it belongs to.

A point of a figure's grid is in the store with all its values or not at all, so that a run may be killed at any moment.
The key is the experiment, the hash of its full configuration, its version, the seed and the point: a change of any of
them finds nothing. Rows hold nothing of when or where: two runs with the same seeds make equal tables.
"""

import contextlib
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from curvoscope.errors import CurvoscopeError, NonFiniteError
from curvoscope.experiments.figure import Figure, Point, Row, Value, canonical

VERSION = 1
"""Of the tables. A store of a newer version is left alone."""

_APPLICATION = 0x43757276  # "Curv"
_COLUMNS = ("experiment", "configuration", "version", "seed", "point", "layer", "block", "part", "quantity", "at")
_SCHEMA = f"""
CREATE TABLE measured (
    experiment TEXT NOT NULL, configuration TEXT NOT NULL, version INTEGER NOT NULL, seed INTEGER NOT NULL,
    point TEXT NOT NULL, layer INTEGER NOT NULL, block TEXT NOT NULL, part TEXT NOT NULL, quantity TEXT NOT NULL,
    at REAL NOT NULL, value REAL NOT NULL, stderr REAL NOT NULL,
    PRIMARY KEY ({", ".join(_COLUMNS)})
) STRICT, WITHOUT ROWID;
CREATE TABLE configurations (configuration TEXT PRIMARY KEY, document TEXT NOT NULL) STRICT, WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {VERSION};
"""
_WAIT = 60.0  # seconds for another process that writes


class StoreError(CurvoscopeError):
    """A store that cannot be read or written."""


class Store:
    """The measured values of all experiments in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._named("open"):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = not path.exists() or path.stat().st_size == 0
            self._connection = sqlite3.connect(path, timeout=_WAIT, isolation_level=None)
        try:
            self._prepare(fresh)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was committed stays."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def done(self, figure: Figure) -> set[tuple[str, int]]:
        """The points that are there, as (canonical point, seed)."""
        with self._named("read"):
            found = self._connection.execute(
                "SELECT DISTINCT point, seed FROM measured WHERE experiment = ? AND configuration = ? AND version = ?",
                (figure.name, figure.hash, figure.version),
            )
            return set(found.fetchall())

    def add(self, figure: Figure, point: Point, seed: int, values: list[Value]) -> None:
        """Commit all values of one point. Adding a point that is there already changes nothing."""
        for value in values:
            if not (math.isfinite(value.value) and math.isfinite(value.stderr)):
                raise NonFiniteError("value", f"{figure.name} measured {value} at {dict(point)}, seed {seed}")
        key = (figure.name, figure.hash, figure.version, seed, canonical(point))
        rows = [(*key, v.layer, v.block, v.part, v.quantity, v.at, v.value, v.stderr) for v in values]
        document = canonical(figure.configuration.model_dump(mode="json"))
        with self._named("write"), self._transaction():
            self._connection.execute("INSERT OR IGNORE INTO configurations VALUES (?, ?)", (figure.hash, document))
            self._connection.executemany(f"INSERT OR IGNORE INTO measured VALUES ({', '.join('?' * 12)})", rows)

    def forget(self, figure: Figure) -> None:
        """Delete what was measured for the figure's present configuration and version."""
        with self._named("write"), self._transaction():
            self._connection.execute(
                "DELETE FROM measured WHERE experiment = ? AND configuration = ? AND version = ?",
                (figure.name, figure.hash, figure.version),
            )

    def rows(self, figure: Figure, quick: bool) -> list[Row]:
        """The values of a figure's grid, in the order of the key."""
        wanted = {(canonical(point), seed) for point, seed in figure.grid(quick)}
        with self._named("read"):
            found = self._connection.execute(
                "SELECT point, seed, layer, block, part, value, stderr, quantity, at FROM measured "
                "WHERE experiment = ? AND configuration = ? AND version = ? "
                f"ORDER BY {', '.join(_COLUMNS)}",
                (figure.name, figure.hash, figure.version),
            ).fetchall()
        return [Row(json.loads(point), seed, Value(*rest)) for point, seed, *rest in found if (point, seed) in wanted]

    def table(self) -> tuple[list[str], list[tuple[object, ...]]]:
        """Everything: the names of the columns, and the rows in the order of the key."""
        with self._named("read"):
            found = self._connection.execute(f"SELECT * FROM measured ORDER BY {', '.join(_COLUMNS)}")
            return [column[0] for column in found.description], found.fetchall()

    def _prepare(self, fresh: bool) -> None:
        with self._named("open"):
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            application = self._connection.execute("PRAGMA application_id").fetchone()[0]
            tables = self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if tables and application != _APPLICATION:
            raise StoreError("store", f"{self.path} is a database of another program; name another file")
        if version > VERSION:
            raise StoreError(
                "store", f"{self.path} has version {version}, this program knows {VERSION}; use a newer curvoscope"
            )
        with self._named("open"):
            if tables:
                problems = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if problems != "ok":
                    raise sqlite3.DatabaseError(problems)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            if not tables and not fresh:
                raise sqlite3.DatabaseError("no tables")
            if not tables:
                self._create()

    def _create(self) -> None:
        with self._transaction():  # of two processes that start at once, the second finds the tables
            if not self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                for statement in _SCHEMA.split(";"):
                    self._connection.execute(statement)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Errors of the disk and of SQLite as a StoreError that says what to do."""
        try:
            yield
        except OSError as error:
            raise StoreError("store", f"cannot {doing} {self.path}: {error.strerror}") from error
        except sqlite3.OperationalError as error:
            advice = "what was measured before stays; make room or give write permission and run again to continue"
            raise StoreError("store", f"cannot {doing} {self.path}: {error}; {advice}") from error
        except sqlite3.DatabaseError as error:
            advice = "it was left as it is; restore a copy, or name another file"
            raise StoreError("store", f"{self.path} is damaged ({error}); {advice}") from error
