"""Where a monitor's records are kept: SQLite in WAL mode, each committed by itself, runs by name in one file."""

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
    """Monitored runs in one file.

        with RunStore(Path("runs.sqlite")) as store:
            monitor = CurvatureMonitor(model, loss_fn, probe, store=store.run("first", {"seed": 0}))

    A process that is killed loses no more than the record that it was about to write.
    """

    application, version, schema = RUNS, 1, _SCHEMA
    wait = 2.0  # training waits meanwhile

    @property
    def names(self) -> list[str]:
        """Of the runs, the last one made at the end."""
        return [name for (name,) in self.read("SELECT name FROM runs ORDER BY number")]

    def run(self, name: str, facts: Mapping[str, Any] | None = None) -> "StoredRun":
        """The run of that name. With `facts`, what is to be known of it, it is made unless it is there already."""
        if facts is not None:
            self.write("INSERT OR IGNORE INTO runs (name, facts) VALUES (?, ?)", name, _text(facts))
        elif name not in self.names:
            known = ", ".join(map(repr, self.names)) or "none"
            raise StoreError("run", f"{self.path} has no run {name!r}, it has {known}")
        return StoredRun(self, name)

    def table(self) -> tuple[list[str], list[tuple[object, ...]]]:
        """All numbers of all records: the names of the columns, and a row each, with the seed of the run and the
        versions of the programs where they are known."""
        columns = ["run", "step", *RecordedValue._fields, "seed", *_PROGRAMS]
        rows: list[tuple[object, ...]] = []
        for run in map(self.run, self.names):
            facts = run.facts
            seed = facts.get("configuration", facts).get("seed")
            source = (seed, *(facts.get("versions", {}).get(name) for name in _PROGRAMS))
            rows += ((run.name, record.step, *value, *source) for record in run.records() for value in record.values())
        return columns, rows


class StoredRun:
    """One run of a store."""

    def __init__(self, store: RunStore, name: str) -> None:
        self._store, self.name = store, name

    @property
    def facts(self) -> dict[str, Any]:
        """What was said of the run when it was made."""
        found: dict[str, Any] = json.loads(self._store.read("SELECT facts FROM runs WHERE name = ?", self.name)[0][0])
        return found

    def add(self, record: Record) -> None:
        """Commit one record; one of the same step is replaced."""
        facts = _text(record.facts())
        self._store.write("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", self.name, record.step, facts)

    def note(self, incident: Incident) -> None:
        """Commit one incident; the same one again changes nothing."""
        values = (incident.step, incident.kind, incident.message)
        self._store.write("INSERT OR IGNORE INTO incidents VALUES (?, ?, ?, ?)", self.name, *values)

    def records(self) -> list[Record]:
        """In the order of the steps."""
        rows = self._store.read("SELECT facts FROM records WHERE run = ? ORDER BY step", self.name)
        return [Record.from_facts(json.loads(facts)) for (facts,) in rows]

    def incidents(self) -> list[Incident]:
        """In the order of the steps."""
        statement = "SELECT step, kind, message FROM incidents WHERE run = ? ORDER BY step, kind"
        return [Incident(*row) for row in self._store.read(statement, self.name)]


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, allow_nan=False)
