"""`python -m benchmarks.families`: print what `cv.blocks_of(model, batch)` finds in tiny models, docs/families.md.

The models are those of the tests' zoo, with random weights; nothing is downloaded.
"""

import contextlib
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import curvoscope as cv
from curvoscope.blocks import Blocks
from curvoscope.commands.subject import Request, subject_of
from curvoscope.curvature import ModelHessian, trainable

_SUPPORT = Path(__file__).parents[1] / "tests" / "support"
_INTRODUCTION = """# Families

`cv.blocks_of(model, batch)` finds the parts of a model by structure, from one forward pass; see
[`blocks_of`](reference/hessian.md). `make families` writes this page: each row is a tiny model of the class, with
random weights, in float64. On GPT-2 with 124 million parameters, recognition takes one forward pass plus the time of
about one gradient.

| column | meaning |
| --- | --- |
| named | share of the entries that have a role, among those that the batch reaches |
| not reached | share of the entries that the batch does not reach, such as an unused pooling head or fixed positions |
| heads | query heads; after the bar key and value heads, if they are fewer |
| exact | number of blocks that `cv.hessian` computes in closed form, of all blocks in its plan |
| attention, feed-forward | whether the blocks of all such layers are exact, or what `H.plan` gives as the reason |
| error | relative error of a product against differences of the gradient, rounded up to a power of ten |
| `analyze` | the task that `curvoscope analyze` finds in a folder of the class, or what to do |

The tests compare roles and heads with the arguments that the class passes to its attention function, entries with the
attributes of the class, and products with differences of the gradient. Layers of an unknown kind without attention keep
the names of their parameters, and `blocks.table()` says why.

Roles in recurrent layers, which are recognised by the names of their parameters:

| role | Mamba, Mamba-2 | RWKV | RecurrentGemma |
| --- | --- | --- | --- |
| `mixer.in`, `mixer.gate` | halves of `in_proj` (x, z) | | `linear_x`, `linear_y` |
| `mixer.conv` | `conv1d`, one row per channel | | `conv_1d` |
| `mixer.B`, `mixer.C` | columns of `x_proj`, in Mamba-2 of `in_proj` | | |
| `mixer.delta_in`, `mixer.delta` | columns of `x_proj`, and `dt_proj`; in Mamba-2 columns of `in_proj` | | |
| `mixer.A`, `mixer.D` | `A_log`, `D` | | `recurrent_param` (A) |
| `mixer.R`, `mixer.K`, `mixer.V` | | `receptance`, `key`, `value` | |
| `mixer.decay`, `mixer.bonus` | | `time_decay`, `time_first` | |
| `mixer.shift_R`, ... | | `time_mix_receptance`, ... | |
| `mixer.input_gate`, `mixer.recurrent_gate` | | | of `rg_lru` |
| `mixer.out` | `out_proj` | `output` | `linear_out` |
| `channel.R`, `channel.up`, `channel.down` | | `receptance`, `key`, `value` of `feed_forward` | |

| class | named | not reached | stacks, layers | heads | exact | attention | feed-forward | error | `analyze` |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


class FamilyRow(NamedTuple):
    """A row of the page."""

    name: str
    named: float
    missed: float
    layers: str
    heads: str
    analyze: str
    exact: str = ""
    attention: str = ""
    feedforward: str = ""
    error: str = ""

    def __str__(self) -> str:
        missed = f"{self.missed:.1%}" if self.missed else ""
        found = (self.name, f"{self.named:.1%}", missed, self.layers, self.heads)
        cells = (*found, self.exact, self.attention, self.feedforward, self.error, self.analyze)
        return f"| {' | '.join(cells)} |"


def row(name: str, measured: bool = True) -> FamilyRow:
    """What is found in one model of the zoo; `measured`: also closed forms and the error, which depend on the CPU."""
    import zoo

    model, loss, batches = zoo.build(name)
    blocks = cv.blocks_of(model, batches[0])
    parameters = dict(model.named_parameters())
    total = sum(blocks.sizes.values())
    missed = sum(block.size for block in blocks.values() if "does not reach" in block.note)
    named = sum(block.size for label, block in blocks.items() if label not in parameters)
    found = (name, named / (total - missed), missed / total, _layers(blocks), _heads(blocks), _task(name))
    if not measured or name in zoo.NO_LOSS:
        return FamilyRow(*found)
    chosen = trainable(model, blocks)
    H = cv.hessian(model, loss, batches, chosen)
    return FamilyRow(*found, *_exact(H), _error(H, model, loss, batches, chosen))


def _task(name: str) -> str:
    """What `curvoscope analyze` says of a folder of the class."""
    import zoo

    if name in zoo.PLAIN:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        zoo.save(name, Path(folder) / "model")
        for task in (None, "embedding"):
            for length in (6, 60, None):
                request = Request(f"{folder}/model", 0, sequences=2, length=length, task=task)
                with contextlib.suppress(cv.CurvoscopeError):
                    found = subject_of(request).facts["task"]
                    return f"`{found}`" if task is None else f"`--task {found}`"
    return "batches of your own"


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


def _error(H: ModelHessian, model: Any, loss: Any, batches: Any, blocks: Blocks) -> str:
    """The error of a product, the next power of ten."""
    from gradient_differences import differences

    v = torch.randn(1, H.shape[0], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    v /= v.norm()
    expected = differences(model, loss, batches[0], blocks, v)[0]
    error = float((H @ v[0] - expected).norm() / expected.norm())
    return f"1e{math.ceil(math.log10(max(error, 1e-16)))}"


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
