"""Storage for a monitor's records: SQLite in WAL mode, one commit per record, runs by name in one file."""

import json
from collections.abc import Mapping
from typing import Any

from curvoscope.database import RUNS, Database, StoreError
from curvoscope.training.records import Incident, Record, RecordedValue

_SCHEMA = """
CREATE TABLE runs (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, facts TEXT NOT NULL) STRICT;
CREATE TABLE records (
    run TEXT NOT NULL REFERENCES runs (name), step INTEGER NOT NULL, facts TEXT NOT NULL,
    PRIMARY KEY (run, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE incidents (
    run TEXT NOT NULL REFERENCES runs (name), step INTEGER NOT NULL, kind TEXT NOT NULL, message TEXT NOT NULL,
    PRIMARY KEY (run, step, kind, message)
) STRICT, WITHOUT ROWID
"""

_PROGRAMS = ("curvoscope", "torch", "python")


class RunStore(Database):
    """Monitored runs in one SQLite file. A process that is killed loses at most the record that it was about to write.

    Args:
        path: the file; it is made if it is not there.

    Example:
        >>> import tempfile, torch
        >>> from curvoscope.training import CurvatureMonitor, RunStore
        >>> probe = [(torch.ones(1, 2), torch.ones(1, 1))]
        >>> with tempfile.TemporaryDirectory() as folder, RunStore(f"{folder}/runs.sqlite") as store:
        ...     run = store.run("first", {"seed": 0})
        ...     monitor = CurvatureMonitor(torch.nn.Linear(2, 1), torch.nn.MSELoss(), probe, store=run)
        ...     record = monitor.measure()
        ...     store.names, store.run("first").records() == [record]
        (['first'], True)
    """

    application, version, schema = RUNS, 1, _SCHEMA
    wait = 2.0  # training waits meanwhile

    @property
    def names(self) -> list[str]:
        """The names of the runs, the newest last."""
        return [name for (name,) in self.read("SELECT name FROM runs ORDER BY number")]

    def run(self, name: str, facts: Mapping[str, Any] | None = None) -> "StoredRun":
        """The run of that name.

        Args:
            name: of the run.
            facts: what to store about the run: with it, the run is made unless it exists already.

        Returns:
            The run, to be given to a monitor or to be read.
        """
        if facts is not None:
            self.write("INSERT OR IGNORE INTO runs (name, facts) VALUES (?, ?)", name, _text(facts))
        elif name not in self.names:
            known = ", ".join(map(repr, self.names)) or "none"
            raise StoreError("run", f"{self.path} has no run {name!r}, it has {known}")
        return StoredRun(self, name)

    def table(self) -> tuple[list[str], list[tuple[object, ...]]]:
        """All numbers of all records, with the seed of the run and the versions of the programs if they are known.

        Returns:
            The names of the columns, and the rows.
        """
        columns = ["run", "step", *RecordedValue._fields, "seed", *_PROGRAMS]
        rows: list[tuple[object, ...]] = []
        for run in map(self.run, self.names):
            facts = run.facts
            seed = facts.get("configuration", facts).get("seed")
            source = (seed, *(facts.get("versions", {}).get(name) for name in _PROGRAMS))
            rows += ((run.name, record.step, *value, *source) for record in run.records() for value in record.values())
        return columns, rows


class StoredRun:
    """One run of a `RunStore`, from `RunStore.run`.

    Args:
        store: the store.
        name: of the run.

    Example:
        >>> import tempfile
        >>> from curvoscope.training import Incident, RunStore
        >>> with tempfile.TemporaryDirectory() as folder, RunStore(f"{folder}/runs.sqlite") as store:
        ...     run = store.run("first", {"seed": 0})
        ...     run.note(Incident(3, "paused", "the loss is nan"))
        ...     run.facts, run.incidents()
        ({'seed': 0}, [Incident(step=3, kind='paused', message='the loss is nan')])
    """

    def __init__(self, store: RunStore, name: str) -> None:
        self._store, self.name = store, name

    @property
    def facts(self) -> dict[str, Any]:
        """What was stored about the run when it was made."""
        found: dict[str, Any] = json.loads(self._store.read("SELECT facts FROM runs WHERE name = ?", self.name)[0][0])
        return found

    def add(self, record: Record) -> None:
        """Commit one record to the file; it replaces a record of the same step."""
        facts = _text(record.facts())
        self._store.write("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", self.name, record.step, facts)

    def note(self, incident: Incident) -> None:
        """Commit one incident to the file; repeating it changes nothing."""
        values = (incident.step, incident.kind, incident.message)
        self._store.write("INSERT OR IGNORE INTO incidents VALUES (?, ?, ?, ?)", self.name, *values)

    def records(self) -> list[Record]:
        """The records, ordered by step."""
        rows = self._store.read("SELECT facts FROM records WHERE run = ? ORDER BY step", self.name)
        return [Record.from_facts(json.loads(facts)) for (facts,) in rows]

    def incidents(self) -> list[Incident]:
        """The incidents, ordered by step."""
        statement = "SELECT step, kind, message FROM incidents WHERE run = ? ORDER BY step, kind"
        return [Incident(*row) for row in self._store.read(statement, self.name)]


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, allow_nan=False)
