"""Which claims hold on a measured model: each with the layers in which it holds and fails."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from curvoscope.blocks import layer_and_role
from gallery.measure import ATTENTION, LINEAR, STATE_SPACE, Facts

WORDS = dict(zip((*ATTENTION, *STATE_SPACE), ("query", "key", "value", "C", "B", "input"), strict=True))
SIZE = "Is the query block smaller than the value block?"
KEY_SIZE = "Is the key block smaller than the value block?"
PARTS = "How large is the functional part?"
NORMS = "Does normalisation equalise?"
VERDICTS = ("fails", "fails in part", "not contradicted", "holds")
_LEADING = 5
_PAPER = "the paper on self-attention"
_CARRIED_OVER = "the same, carried over to a state space"
_ASSUMPTION = "assumed by Gauss-Newton methods"


class Ratio(NamedTuple):
    """A quotient of two norms of one layer, and an interval from the ends of both 95 % intervals."""

    layer: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Claim:
    """A statement that says that a quotient exceeds 1 in every layer, and what was measured.

    Args:
        question: that it answers.
        statement: what is claimed.
        source: who claims it.
        ratios: one per layer.
    """

    question: str
    statement: str
    source: str
    ratios: list[Ratio]

    @property
    def holds(self) -> list[Ratio]:
        """The layers whose whole interval is above 1."""
        return [ratio for ratio in self.ratios if ratio.low > 1]

    @property
    def fails(self) -> list[Ratio]:
        """The layers whose whole interval is below 1."""
        return [ratio for ratio in self.ratios if ratio.high < 1]

    @property
    def verdict(self) -> str:
        """In one word or two."""
        if len(self.holds) == len(self.ratios):
            return "holds"
        if not self.fails:
            return "not contradicted"
        return "fails in part" if self.holds else "fails"


def claims(facts: Facts, bare: Facts | None = None) -> list[Claim]:
    """Those that failed come first. `bare`: the same model without norms, if it was measured."""
    trio = trio_of(facts)
    source = _PAPER if trio is ATTENTION else _CARRIED_OVER
    norms = norms_of(facts)
    query, key, value = (WORDS[role] for role in trio)
    found = [
        Claim(SIZE, f"The {query} block is smaller than the {value} block.", source, value_over_query(facts)),
        Claim(
            KEY_SIZE,
            f"The {key} block is smaller than the {value} block.",
            source,
            ratios(norms, norms, trio[2], trio[1]),
        ),
    ]
    for role in trio[:2]:
        said = f"The Gauss-Newton part of the {WORDS[role]} block is larger than its functional part."
        found.append(Claim(PARTS, said, _ASSUMPTION, outer_over_functional(facts, role)))
        said = f"The outer part of the {WORDS[role]} block is larger than its functional part, split at its layer."
        found.append(Claim(PARTS, said, _ASSUMPTION, ratios(facts["outer"], facts["functional"], role, role)))
    if bare is not None:
        said = f"Normalisation equalises: norms bring the {query} block closer to the {value} block."
        found.append(Claim(NORMS, said, source, closer(value_over_query(bare), value_over_query(facts))))
    return by_verdict(claim for claim in found if claim.ratios)


def by_verdict(found: Iterable[Claim]) -> list[Claim]:
    """What failed comes first."""
    return sorted(found, key=lambda claim: VERDICTS.index(claim.verdict))


def trio_of(facts: Facts) -> tuple[str, ...]:
    """The roles of query, key and value, or of what a state space has in their place."""
    present = {where[1] for name in facts["blocks"] if (where := layer_and_role(name)) is not None}
    return ATTENTION if ATTENTION[0] in present else STATE_SPACE


def norms_of(facts: Facts) -> Facts:
    """The norm of the Gauss-Newton part of each block."""
    return {name: numbers["norm"] for name, numbers in facts["blocks"].items()}


def value_over_query(facts: Facts) -> list[Ratio]:
    """Norms of the value blocks over those of the query blocks."""
    query, _, value = trio_of(facts)
    return ratios(norms_of(facts), norms_of(facts), value, query)


def outer_over_functional(facts: Facts, role: str) -> list[Ratio]:
    """Norms of the Gauss-Newton parts of a role over those of its functional parts."""
    return ratios(norms_of(facts), facts["functional"], role, role)


def ratios(above: Facts, below: Facts, role: str, other: str) -> list[Ratio]:
    """Norms of `role` in `above` over those of `other` in `below`, layer by layer."""
    found = []
    for name, top in above.items():
        where = layer_and_role(name)
        if where is None or where[1] != role:
            continue
        bottom = below.get(f"{where[0]}.{other}")
        if bottom is not None and bottom["value"]:
            found.append(_quotient(where[0], Ratio(where[0], *_ends(top)), Ratio(where[0], *_ends(bottom))))
    return found


def spreads(facts: Facts) -> list[Ratio]:
    """The largest norm over the smallest one among the linear weights of each layer."""
    layers: dict[str, list[Ratio]] = {}
    for name, norm in norms_of(facts).items():
        where = layer_and_role(name)
        if where is not None and where[1] in LINEAR:
            layers.setdefault(where[0], []).append(Ratio(name, *_ends(norm)))
    pick = [(layer, max(some, key=_value), min(some, key=_value)) for layer, some in layers.items()]
    return [_quotient(layer, top, bottom) for layer, top, bottom in pick if bottom.value > 0]


def closer(without: Sequence[Ratio], norms: Sequence[Ratio]) -> list[Ratio]:
    """How many times further apart two blocks are without norms: the distance of a quotient r is max(r, 1/r)."""
    twins = {ratio.layer: ratio for ratio in without}
    return [_quotient(one.layer, _apart(twins[one.layer]), _apart(one)) for one in norms if one.layer in twins]


def middle(found: Sequence[Ratio]) -> Ratio:
    """The medians over the layers, of the values and of both ends."""
    return Ratio("", *(median(values) for values in zip(*(ratio[1:] for ratio in found), strict=True)))


def _value(ratio: Ratio) -> float:
    return ratio.value


def _ends(norm: Facts) -> tuple[float, float, float]:
    return norm["value"], max(norm["low"], 0.0), norm["high"]


def _quotient(layer: str, top: Ratio, bottom: Ratio) -> Ratio:
    high = top.high / bottom.low if bottom.low > 0 else math.inf
    return Ratio(layer, top.value / bottom.value, top.low / bottom.high, high)


def _apart(ratio: Ratio) -> Ratio:
    """max(r, 1/r), which is 1 at least."""
    inverse = Ratio(ratio.layer, 1 / ratio.value, 1 / ratio.high, 1 / ratio.low if ratio.low > 0 else math.inf)
    if ratio.low < 1 < ratio.high:
        return Ratio(ratio.layer, max(ratio.value, inverse.value), 1.0, max(ratio.high, inverse.high))
    return ratio if ratio.value >= 1 else inverse


def leading_heads(facts: Facts, role: str) -> tuple[list[str], Ratio]:
    """The five heads with the largest norms among all of a role, or a quarter of them if they are fewer, and their
    share in the sum of squared norms, with an interval from the ends of all 95 % intervals."""
    norms = {name: _ends(facts["heads"][name]) for name in heads_of(facts, role)}
    order = sorted(norms, key=lambda name: -norms[name][0])
    count = min(_LEADING, -(-len(order) // 4))

    def share(end: int, other_end: int) -> float:
        leading = sum(norms[name][end] ** 2 for name in order[:count])
        total = leading + sum(norms[name][other_end] ** 2 for name in order[count:])
        return leading / total if total else 0.0

    value, low, high = range(3)
    return order[:count], Ratio("", share(value, value), share(low, high), share(high, low))


def heads_of(facts: Facts, role: str) -> list[str]:
    """The heads of a role in all layers."""
    return [name for name in facts["heads"] if (where := layer_and_role(name)) is not None and where[1] == role]
