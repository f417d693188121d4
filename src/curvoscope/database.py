"""One SQLite file of this program: WAL mode, known by its application id and version, its errors named."""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from curvoscope.errors import CurvoscopeError

EXPERIMENTS, RUNS = 0x43757276, 0x43757277  # "Curv", "Curw"
_CONTENTS = {EXPERIMENTS: "values of experiments", RUNS: "monitored runs"}


Opened = TypeVar("Opened", bound="Database")


class StoreError(CurvoscopeError):
    """A store cannot be read or written."""


class Database:
    """An open file of one kind. It is opened only if it is empty or of this kind and no newer than `version`.

    A subclass says what it is: `application`, its id; `version`, of its tables; `schema`, the statements that make
    them; `wait`, the seconds that it gives another process that writes.
    """

    application: ClassVar[int]
    version: ClassVar[int]
    schema: ClassVar[str]
    changes: ClassVar[Mapping[int, str]] = {}  # of the tables: what makes a file of a version one of the next
    wait: ClassVar[float] = 60.0

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self._named("open"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = not self.path.exists() or self.path.stat().st_size == 0
            self._connection = sqlite3.connect(self.path, timeout=self.wait, isolation_level=None)
        try:
            self._prepare(fresh)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was committed stays."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def read(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows that a statement finds."""
        with self._named("read"):
            return self._connection.execute(statement, values).fetchall()

    def write(self, statement: str, *values: object) -> None:
        """Carry out one statement, and commit."""
        with self._named("write"), self._transaction():
            self._connection.execute(statement, values)

    def _prepare(self, fresh: bool) -> None:
        with self._named("open"):
            version, application = (int(self._pragma(name)) for name in ("user_version", "application_id"))
            tables = self._tables()
        if tables and application != self.application:
            owner = "of another program"
            if application in _CONTENTS:
                owner = f"of {_CONTENTS[application]}, not of {_CONTENTS[self.application]}"
            raise StoreError("store", f"{self.path} is a database {owner}; name another file")
        if version > self.version:
            raise StoreError(
                "store", f"{self.path} has version {version}, this program knows {self.version}; use a newer curvoscope"
            )
        with self._named("open"):
            if tables:
                problems = self._pragma("quick_check(1)")
                if problems != "ok":
                    raise sqlite3.DatabaseError(problems)
                self._change(version)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            if not tables and not fresh:
                raise sqlite3.DatabaseError("no tables")
            if not tables:
                self._create()

    def _change(self, version: int) -> None:
        while version < self.version:
            with self._transaction():
                if int(self._pragma("user_version")) == version:  # another process may have been here
                    for statement in self.changes[version].split(";"):
                        self._connection.execute(statement)
                    self._connection.execute(f"PRAGMA user_version = {version + 1}")
            version += 1

    def _create(self) -> None:
        with self._transaction():  # of two processes that start at once, the second finds the tables
            if not self._tables():
                for statement in self.schema.split(";"):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA application_id = {self.application}")
                self._connection.execute(f"PRAGMA user_version = {self.version}")

    def _tables(self) -> int:
        return int(self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])

    def _pragma(self, name: str) -> int | str:
        found: int | str = self._connection.execute(f"PRAGMA {name}").fetchone()[0]
        return found

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


def application_of(path: Path) -> int | None:
    """The id of the program that made a file; None if it cannot be told, for example because it is not a database."""
    try:
        # not from the file's header: after a crash the id may be in the write-ahead log alone
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return int(connection.execute("PRAGMA application_id").fetchone()[0])
    except sqlite3.Error:
        return None
