"""Which preconditioner a solve uses: the one that predicts the fewest products."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from curvoscope.errors import CurvoscopeError
from curvoscope.solve.preconditioning import Candidate, Preconditioner

RACE = 8  # steps after which preconditioners are compared
_WORTH = 4  # times the cost of trying one must be predicted, or it is not tried
_BETTER = 2  # times fewer products must it predict than plain steps, which become faster on the way


@dataclass
class PreconditionerChoice:
    """The preconditioner of an operator: which there are, and which one is used from now on, once it is known.

    Without `race` the first is used. With it, none as long as eight plain steps are enough. If they are not, their
    residual predicts the products of a plain run,

        products = steps · log(start / target) / log(start / residual).

    A candidate is made, and takes eight steps as well, if that costs less than a quarter of the fewest products
    predicted so far. The one that predicts the fewest products is used, if they are half of those of plain steps. Plain
    runs often stand still and then become fast, which their first steps do not tell: before a candidate is used, the
    plain run goes on for as many products as the candidate predicts, and if that is enough it is kept. So a
    solve takes about twice the products of the candidate at most, if its prediction holds.

    Args:
        candidates: stand-ins that have not been made yet.
        race: whether to compare them.
    """

    candidates: tuple[Candidate, ...] = ()
    race: bool = False
    name: str | None = None  # None: not decided
    reason: str = ""
    _made: dict[str, Preconditioner] = field(default_factory=dict)
    _predicted: dict[str, float] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.candidates:
            self.name = "none"
        elif not self.race:
            first = self.candidates[0]
            self.name, self.reason = first.name, f"asked for{_of(first)}"

    @property
    def used(self) -> str:
        """The name of the one in use, "none" before it is decided."""
        return self.name or "none"

    def get(self, name: str) -> Preconditioner | None:
        """The one of a name, made when it is first asked for; None for "none"."""
        if name != "none" and name not in self._made:
            self._made[name] = next(one for one in self.candidates if one.name == name).make()
        return self._made.get(name)

    def entrants(self) -> Iterator[str]:
        """The names to compare, the next one as soon as the steps of the last have been observed."""
        self._predicted.clear()
        yield "none"
        for one in self.candidates:
            if _WORTH * (one.products + RACE) < min(self._predicted.values()):
                yield one.name

    def observe(self, name: str, steps: int, start: float, missing: float) -> None:
        """Note what so many steps left of a residual; both in units of the target."""
        gained = math.log(start / missing) if 0 < missing < start else 0.0
        self._predicted[name] = steps * math.log(start) / gained if gained else math.inf

    def refused(self, name: str, error: CurvoscopeError) -> None:
        """Note that one cannot be made."""
        self._refused[name] = str(error)

    def finished(self, name: str) -> None:
        """Use the one whose first steps were enough; after plain ones nothing is known about longer runs."""
        self.reason = f"its first {RACE} steps were enough"
        self.name = None if name == "none" else name

    def decide(self) -> str:
        """Use the one that predicts the fewest products, from now on."""
        plain = self._predicted["none"]
        weighted = {name: value * (1 if name == "none" else _BETTER) for name, value in self._predicted.items()}
        self.name = min(weighted, key=weighted.__getitem__)
        told = [f"none {_count(plain)}"]
        for one in self.candidates:
            if one.name in self._predicted:
                told.append(f"{one.name} {_count(self._predicted[one.name])}{_of(one)}")
            elif one.name in self._refused:
                told.append(f"{one.name} not made: {self._refused[one.name]}")
            else:
                told.append(f"{one.name} not tried: it costs {_count(one.products)} to make")
        self.reason = f"predicted products: {'; '.join(told)}"
        return self.name

    @property
    def patience(self) -> int:
        """Steps that a plain run is given before the chosen one is used."""
        return 0 if self.used == "none" else int(self._predicted[self.used])

    def plain_was_enough(self, steps: int) -> None:
        """Use plain steps after all."""
        self.name, self.reason = "none", f"{self.reason}; {steps} plain steps were enough"


def _of(candidate: Candidate) -> str:
    return f" ({candidate.made_of})" if candidate.made_of else ""


def _count(products: float) -> str:
    return "unknown" if math.isinf(products) else f"{products:.0f}"
