"""Destinations of a monitor's records: a store, TensorBoard, a function. Their failures never stop a training."""

import logging
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from curvoscope.training.records import Incident, Record
from curvoscope.training.runs import StoredRun

_log = logging.getLogger(__name__)


@runtime_checkable
class ScalarWriter(Protocol):
    """TensorBoard's SummaryWriter, or any object with its `add_scalar`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one number."""


class Outlets:
    """Passes records on. What could not be stored is tried again with the next record."""

    def __init__(
        self, store: StoredRun | None, writer: ScalarWriter | None, on_record: Callable[[Record], None] | None
    ) -> None:
        self._store, self._writer, self._on_record = store, writer, on_record
        self._waiting: list[Record | Incident] = []  # to be stored
        self._failing: set[str] = set()

    def tell(self, record: Record) -> list[str]:
        """Pass a record on; return the failures that are new since the last record."""
        self._waiting.append(record)
        tries = {"store": self._keep, "writer": lambda: self._write(record), "on_record": lambda: self._call(record)}
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
        if self._writer is not None:
            for name, value in record.scalars().items():
                self._writer.add_scalar(f"curvature/{name}", value, record.step)

    def _call(self, record: Record) -> None:
        if self._on_record is not None:
            self._on_record(record)
