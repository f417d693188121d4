"""How often to measure: at most every so many steps, and never for more than a share of the time."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from curvoscope.errors import RangeError

Clock = Callable[[], float]


class Account:
    """A kind of measurement that may take `budget`, a share of all the time since the start.

    With E seconds since the start, s of them spent here, and c those that the last measurement took, the next one is
    allowed when s + c ≤ budget (E + c): the bound holds when it is done, if it takes no longer than the last. What the
    first one costs is not known; it is allowed, and the bound holds once the run has lasted for c/budget.
    """

    def __init__(self, budget: float, every: int) -> None:
        self._budget, self._every = budget, every
        self.spent = 0.0
        self._cost = 0.0
        self._last: int | None = None

    def allows(self, step: int, elapsed: float) -> bool:
        """Whether to measure at `step`."""
        if self._last is None:
            return True
        if step - self._last < self._every:
            return False
        return self.spent + self._cost <= self._budget * (elapsed + self._cost)

    def charge(self, step: int, seconds: float) -> None:
        """A measurement was made."""
        self._last, self._cost = step, seconds
        self.spent += seconds

    def resume(self, step: int, seconds: float) -> None:
        """An earlier run's last measurement was made at `step`; what that run spent is not counted."""
        self._last, self._cost = step, seconds

    def overhead(self, seconds: float) -> None:
        """Time spent beside the measurements."""
        self.spent += seconds


class Pace:
    """Two accounts, each with half of the budget: for what is cheap and for what is not; and the clock."""

    def __init__(self, every: int, budget: float, clock: Clock) -> None:
        if every < 1:
            raise RangeError("every", f"got {every}, expected at least 1 step")
        if not (0 < budget <= 1 and math.isfinite(budget)):
            raise RangeError("budget", f"got {budget}, expected a share of the time above 0 and at most 1")
        self.clock = clock
        # the whole budget is no bound at all: then the halves are none either
        half = budget / 2 if budget < 1 else 1.0
        self.cheap, self.costly = Account(half, every), Account(half, every)
        self._start: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the first step."""
        if self._start is None:
            self._start = self.clock()
        return self.clock() - self._start

    @property
    def share(self) -> float:
        """Of the time since the first step, the share spent on measurements."""
        elapsed = self.elapsed
        return (self.cheap.spent + self.costly.spent) / elapsed if elapsed else 0.0

    @contextmanager
    def measuring(self, account: Account, step: int) -> Iterator[None]:
        """Charge what happens inside, also when it fails."""
        start = self.clock()
        try:
            yield
        finally:
            account.charge(step, self.clock() - start)
