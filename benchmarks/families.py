"""`python -m benchmarks.families`: print what `cv.blocks_of(model, batch)` finds in tiny models, docs/families.md.

The models are those of the tests' zoo, with random weights; nothing is downloaded.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import curvoscope as cv
from curvoscope.blocks import Blocks
from curvoscope.curvature import ModelHessian, trainable

_SUPPORT = Path(__file__).parents[1] / "tests" / "support"
_INTRODUCTION = """# Families

`cv.blocks_of(model, batch)` finds the parts of a model by structure, from one forward pass; see
[`blocks_of`](reference/hessian.md). This page is written by `make families`: each row is a tiny model of the class,
with random weights. *Named* is the share of the entries that have a role, among those that the batch reaches; *not
reached* is the share of the others, such as a pooling head that the output does not use, or sinusoidal positions,
which are constants. *Heads* are those of the queries, with those of keys and values behind the bar if they are fewer.
*Exact* is the number of blocks that `cv.hessian` computes in closed form, of all in its plan; *attention* and
*feed-forward* say whether those of all such layers are, or what `H.plan` gives as the reason. The tests compare roles
with the attributes of the class, products with differences of the gradient, to 1e-8, and closed forms with autodiff, to
1e-9.

A model with layers that mix tokens in another way keeps their parameters' names; `blocks.table()` says why. Models
without attention keep all of them.

| class | named | not reached | stacks, layers | heads | exact | attention | feed-forward |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
_OWN_LOSS = ("Wav2Vec2ForCTC", "ViltForQuestionAnswering")


class FamilyRow(NamedTuple):
    """A row of the page."""

    name: str
    named: float
    missed: float
    layers: str
    heads: str
    exact: str = ""
    attention: str = ""
    feedforward: str = ""

    def __str__(self) -> str:
        missed = f"{self.missed:.1%}" if self.missed else ""
        closed = f"{self.exact} | {self.attention} | {self.feedforward}"
        return f"| {self.name} | {self.named:.1%} | {missed} | {self.layers} | {self.heads} | {closed} |"


def row(name: str) -> FamilyRow:
    """What is found in one model of the zoo."""
    import zoo

    model, loss, batches = zoo.build(name)
    blocks = cv.blocks_of(model, batches[0])
    parameters = dict(model.named_parameters())
    total = sum(blocks.sizes.values())
    missed = sum(block.size for block in blocks.values() if "does not reach" in block.note)
    named = sum(block.size for label, block in blocks.items() if label not in parameters)
    exact = () if name in _OWN_LOSS else _exact(cv.hessian(model, loss, batches, trainable(model, blocks)))
    return FamilyRow(name, named / (total - missed), missed / total, _layers(blocks), _heads(blocks), *exact)


def _layers(blocks: Blocks) -> str:
    stacks: dict[str, set[str]] = {}
    for label in blocks:
        stem, found, _ = label.partition(".attn.Q")
        front, _, number = stem.rpartition("h.")
        if found and number.isdigit():
            stacks.setdefault(front.rstrip("."), set()).add(number)
    return ", ".join(f"{front} {len(numbers)}".strip() for front, numbers in stacks.items())


def _heads(blocks: Blocks) -> str:
    found = set()
    for label in (label for label in blocks if label.endswith(".attn.Q")):
        query, key = blocks[label].heads, blocks.get(f"{label[:-1]}K")
        shared = None if key is None else key.heads
        found.add(str(query or "?") if shared in (query, None) else f"{query}/{shared}")
    return ", ".join(sorted(found)).replace("/", " \\| ")


def _exact(H: ModelHessian) -> tuple[str, str, str]:
    """How many blocks are in closed form, and whether those of attention and feed-forward layers are, or why not."""
    methods = {label: H.method_of(label) for label in H.names}
    count = sum(method == "exact" for method in methods.values())
    ends = {"attn": ("Q", "K", "V", "O"), "mlp": ("gate", "up", "down")}
    cells = []
    for kind, leaves in ends.items():
        inside = [label for label in methods if label.split(".")[-2:] in [[kind, leaf] for leaf in leaves]]
        left = [label for label in inside if methods[label] != "exact"]
        reasons = sorted({_without_number(H.plan[label, "total"].reason) for label in left})
        cells.append("; ".join(reasons) if reasons else "exact" if inside else "")
    return f"{count} of {len(methods)}", cells[0], cells[1]


def _without_number(reason: str) -> str:
    """A reason without the size of a deviation, which is another one on every CPU."""
    return re.sub(r", the nearest is off by \S+ of it", "", reason)


def page() -> Iterator[str]:
    """The lines of the page."""
    sys.path.insert(0, str(_SUPPORT))
    import zoo

    yield _INTRODUCTION.rstrip("\n")
    for name in zoo.cases():
        yield str(row(name))


if __name__ == "__main__":
    for line in page():
        print(line, flush=True)
