"""When to measure: at most every so many steps, and never for more than a share of the time."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from curvoscope.errors import RangeError

Clock = Callable[[], float]
_CHEAP = 1 / 3  # of the budget
_MARGIN = 0.9  # of the budget: after a measurement the training itself is slower for a while, which no clock here sees


class Account:
    """The time account of one kind of measurement, which may take the share `budget` of the time since the start.

    With E seconds since the start, s of them spent here, and c the cost of the last measurement, the next one is
    affordable if s + c ≤ budget (E + c): then the bound holds afterwards, if it takes no longer than the last. The cost
    of the first one is unknown; it is allowed, and the bound holds once the run has lasted for c/budget.
    """

    def __init__(self, budget: float, every: int) -> None:
        self._budget, self._every = budget, every
        self.spent = 0.0
        self.cost = 0.0
        self.last: int | None = None

    def rested(self, step: int) -> bool:
        """Whether the last measurement is far enough from `step`."""
        return self.last is None or step - self.last >= self._every

    def affords(self, elapsed: float) -> bool:
        """Whether the next measurement is affordable."""
        return self.last is None or self.spent + self.cost <= self._budget * (elapsed + self.cost)

    def charge(self, step: int, seconds: float) -> None:
        """Charge a measurement that was made at `step`."""
        self.last, self.cost = step, seconds
        self.spent += seconds

    def overhead(self, seconds: float) -> None:
        """Charge time spent outside measurements."""
        self.spent += seconds


class Pace:
    """Two accounts, a third of the budget for cheap quantities and the rest for costly ones, and the clock.

    What the costly account does not need for its next measurement is available to the cheap one.
    """

    def __init__(self, every: int, budget: float, clock: Clock) -> None:
        if every < 1:
            raise RangeError("every", f"got {every}, expected at least 1 step")
        if not (0 < budget <= 1 and math.isfinite(budget)):
            raise RangeError("budget", f"got {budget}, expected a share of the time above 0 and at most 1")
        self.clock = clock
        self._budget = budget = _MARGIN * budget if budget < 1 else 1.0
        # the whole budget is not a bound at all, and neither are its parts
        shares = (_CHEAP * budget, (1 - _CHEAP) * budget) if budget < 1 else (1.0, 1.0)
        self.cheap, self.costly = (Account(share, every) for share in shares)
        self._start: float | None = None

    def due(self, step: int) -> bool:
        """Whether to measure at `step`."""
        elapsed = self.elapsed
        return self.cheap.rested(step) and (self.cheap.affords(elapsed) or self._left_over(elapsed))

    def details_due(self, step: int) -> bool:
        """Whether to measure the details, too."""
        return self.costly.rested(step) and self.costly.affords(self.elapsed)

    def _left_over(self, elapsed: float) -> bool:
        needed = self.cheap.spent + self.cheap.cost + self.costly.spent + self.costly.cost
        return needed <= self._budget * (elapsed + self.cheap.cost)

    def state_dict(self) -> dict[str, tuple[int | None, float]]:
        """When each account was used last, and what that cost."""
        return {name: (account.last, account.cost) for name, account in self._accounts.items()}

    def load_state_dict(self, state: Mapping[str, tuple[int | None, float]]) -> None:
        """Go on after another run; what that run spent is not counted."""
        for name, account in self._accounts.items():
            account.last, account.cost = state[name]

    @property
    def _accounts(self) -> dict[str, Account]:
        return {"cheap": self.cheap, "costly": self.costly}

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
