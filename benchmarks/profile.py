"""Where the time of a product goes: operations of a product with the Hessian, and with its Gauss-Newton part, beside
those of a gradient, by `torch.profiler`.

The model is that of `matrix_free`, of torch's own layers, with one thread. Each operation has the least time of several
profiles. By kind they are in units of all matrix products of a gradient; the limit of a product is that each of the
three matrix products of a weight in a gradient becomes two (Hessian), or that there is one more (Gauss-Newton).

`python -m benchmarks.profile` prints the table of single operations, that of a change on the tree before and after it;
`python -m benchmarks.profile --json` the results of `run`.
"""

import json
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.matrix_free import PlainGPT2, gradient, ours

PROFILES = 8
SHOWN = 16  # operations in the table
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone"),
    "sums and products of entries": ("aten::add", "aten::add_", "aten::mul", "aten::mul_", "aten::sub", "aten::div"),
    "sums": ("aten::sum", "aten::mean"),
    "softmax": ("aten::_softmax", "aten::_softmax_backward_data", "aten::_log_softmax", "aten::_safe_softmax"),
    "layer norm": ("aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::addcmul"),
    "activation": ("aten::gelu", "aten::gelu_backward"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "check of the weights": ("aten::hash_tensor",),
}


class Spent(NamedTuple):
    """Milliseconds of an operation and the number of its calls."""

    milliseconds: float
    calls: int


def profiled(call: Callable[[], object]) -> dict[str, Spent]:
    """What each operation of a call takes itself, the least of several profiles."""
    least: dict[str, Spent] = {}
    for _ in range(PROFILES):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            call()
        for event in found.key_averages():
            spent = Spent(event.self_cpu_time_total / 1e3, event.count)
            least[event.key] = min(spent, least.get(event.key, spent))
    return least


def by_kind(operations: dict[str, Spent]) -> dict[str, float]:
    """Milliseconds by kind of operation."""
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    spent: dict[str, float] = {}
    for name, one in operations.items():
        kind = kind_of.get(name, "other")
        spent[kind] = spent.get(kind, 0.0) + one.milliseconds
    return spent


def measured() -> dict[str, dict[str, Spent]]:
    """A gradient and two products, by operation."""
    H, make_gradient = ours(PlainGPT2), gradient(PlainGPT2)
    torch.set_num_threads(1)
    vector: Tensor = torch.randn(H.shape[0])
    calls: dict[str, Callable[[], object]] = {
        "gradient": lambda: make_gradient(vector),
        "hessian": lambda: H.total @ vector,
        "ggn": lambda: H.outer @ vector,
    }
    found: dict[str, dict[str, Spent]] = {}
    for name, call in calls.items():
        call()
        found[name] = profiled(call)
    return found


def run() -> dict[str, object]:
    """A gradient and two products, by kind of operation."""
    found = {name: by_kind(operations) for name, operations in measured().items()}
    unit = found["gradient"]["matrix products"]
    shares = {name: {kind: one / unit for kind, one in sorted(kinds.items())} for name, kinds in found.items()}
    return {"unit_milliseconds": unit, "limits": {"hessian": 2.0, "ggn": 4 / 3}, "operations": shares}


def table(found: dict[str, dict[str, Spent]]) -> str:
    """The operations that take most of a product, in Markdown."""
    none = Spent(0.0, 0)
    ranked = sorted(found["hessian"], key=lambda name: -found["hessian"][name].milliseconds)[:SHOWN]
    rows = [(name, [one.get(name, none) for one in found.values()]) for name in ranked]
    rest = [
        Spent(
            sum(spent.milliseconds for name, spent in one.items() if name not in ranked),
            sum(spent.calls for name, spent in one.items() if name not in ranked),
        )
        for one in found.values()
    ]
    total = [Spent(*map(sum, zip(*one.values(), strict=True))) for one in found.values()]
    lines = [f"| operation, ms (calls) | {' | '.join(found)} |", f"|{' --- |' * (1 + len(found))}"]
    for name, spent in [*rows, ("other", rest), ("all", total)]:
        lines.append(f"| {name} | {' | '.join(f'{one.milliseconds:.2f} ({one.calls})' for one in spent)} |")
    ratios = (f"{one.milliseconds / total[0].milliseconds:.2f}" for one in total)
    return "\n".join([*lines, f"| all, in gradients | {' | '.join(ratios)} |"])


if __name__ == "__main__":
    print(json.dumps(run(), indent=1) if "--json" in sys.argv else table(measured()))
