"""Destinations of a monitor's records: a store, a logger, a function. Their failures never stop a training."""

import logging
from collections.abc import Callable

from curvoscope.training.loggers import Logger
from curvoscope.training.records import Incident, Record
from curvoscope.training.runs import StoredRun

_log = logging.getLogger(__name__)


class Outlets:
    """Passes records on. What could not be stored is tried again with the next record."""

    def __init__(
        self, store: StoredRun | None, logger: Logger | None, on_record: Callable[[Record], None] | None
    ) -> None:
        self._store, self._logger, self._on_record = store, logger, on_record
        self._waiting: list[Record | Incident] = []  # to be stored
        self._failing: set[str] = set()

    def tell(self, record: Record) -> list[str]:
        """Pass a record on; return the failures that are new since the last record."""
        self._waiting.append(record)
        tries = {"store": self._keep, "logger": lambda: self._write(record), "on_record": lambda: self._call(record)}
        return [message for name, outlet in tries.items() if (message := self._try(name, outlet))]

    def note(self, incident: Incident) -> None:
        """Store an incident; if the store fails, the incident waits and the next record reports the failure."""
        self._waiting.append(incident)
        if self._try("store", self._keep):
            self._failing.discard("store")

    def _try(self, name: str, outlet: Callable[[], None]) -> str | None:
        try:
            outlet()
        except Exception as error:
            _log.debug("the %s that failed", name, exc_info=error)
            known = name in self._failing
            self._failing.add(name)
            return None if known else f"{name}: {type(error).__name__}: {error}"
        self._failing.discard(name)
        return None

    def _keep(self) -> None:
        while self._waiting:
            if self._store is not None:
                one = self._waiting[0]
                self._store.add(one) if isinstance(one, Record) else self._store.note(one)
            self._waiting.pop(0)

    def _write(self, record: Record) -> None:
        if self._logger is not None:
            values = {f"curvature/{name}": value for name, value in record.scalars().items()}
            self._logger.log(values, record.step)

    def _call(self, record: Record) -> None:
        if self._on_record is not None:
            self._on_record(record)
