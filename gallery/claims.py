"""Which claims hold on a measured model: each with the layers in which it holds and fails."""

from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

Facts = dict[str, Any]
_PAPER = "the paper on self-attention"
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
        statement: what is claimed.
        source: who claims it.
        ratios: one per layer.
    """

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

    @property
    def middle(self) -> float:
        """The median quotient."""
        return median(ratio.value for ratio in self.ratios)


def claims(facts: Facts) -> list[Claim]:
    """Those that failed come first."""
    blocks, functional = facts["blocks"], facts["functional"]
    norms = {name: numbers["norm"] for name, numbers in blocks.items()}
    found = [
        Claim(
            "The query block is smaller than the value block.",
            _PAPER,
            value_over_query(facts),
        ),
        Claim(
            "The key block is smaller than the value block.",
            _PAPER,
            ratios(norms, norms, "V", "K"),
        ),
        Claim(
            "The Gauss-Newton part of the query block is larger than its functional part.",
            _ASSUMPTION,
            ratios(norms, functional, "Q", "Q"),
        ),
        Claim(
            "The Gauss-Newton part of the key block is larger than its functional part.",
            _ASSUMPTION,
            ratios(norms, functional, "K", "K"),
        ),
    ]
    order = ("fails", "fails in part", "not contradicted", "holds")
    return sorted((claim for claim in found if claim.ratios), key=lambda claim: order.index(claim.verdict))


def value_over_query(facts: Facts) -> list[Ratio]:
    """Norms of the value blocks over those of the query blocks."""
    norms = {name: numbers["norm"] for name, numbers in facts["blocks"].items()}
    return ratios(norms, norms, "V", "Q")


def ratios(above: Facts, below: Facts, role: str, other: str) -> list[Ratio]:
    """Norms of `role` in `above` over those of `other` in `below`, layer by layer."""
    found = []
    for name, top in above.items():
        layer, _, end = name.rpartition(".attn.")
        bottom = below.get(f"{layer}.attn.{other}")
        if layer and end == role and bottom is not None and bottom["value"]:
            high = top["high"] / bottom["low"] if bottom["low"] > 0 else float("inf")
            found.append(Ratio(layer, top["value"] / bottom["value"], max(top["low"], 0.0) / bottom["high"], high))
    return found


def leading_heads(facts: Facts, role: str, count: int = 5) -> tuple[list[str], float]:
    """The heads with the largest norms among all of a role, and their share in the sum of squared norms."""
    squares = {name: numbers["value"] ** 2 for name, numbers in facts["heads"].items() if f".attn.{role}." in name}
    leading = sorted(squares, key=lambda name: -squares[name])[:count]
    total = sum(squares.values())
    return leading, sum(squares[name] for name in leading) / total if total else 0.0
