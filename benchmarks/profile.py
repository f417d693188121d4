"""Where the time of a product goes: operations of a product with the Hessian, and with its Gauss-Newton part, beside
those of a gradient, by `torch.profiler`; and the same of version 0.1.0, from `profile_0_1_0.json`.

The model is that of `matrix_free`, of torch's own layers, with two threads. Each operation has the least time of
several profiles, without the operations that it calls. Times are in units of a gradient, profiled in the same way.
Beside them the ratios without the profiler, by processor time of one thread: as they are, and if the C library keeps
freed memory, which it otherwise returns to the system after a product and takes anew for the next, page by page.

`python -m benchmarks.profile` prints the table of single operations; `python -m benchmarks.profile --json` what
`profile_0_1_0.json` holds: run it with PYTHONPATH set to another version to compare with that.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.matrix_free import PlainGPT2, gradient, ours
from benchmarks.measure import in_own_process, in_turns

PROFILES, TURNS = 12, 9
SHOWN = 16  # operations in the table
KEPT = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**31 - 1))
BEFORE = Path(__file__).with_name("profile_0_1_0.json")
KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm"),
    "attention, fused": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "softmax": ("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "_safe_softmax"),
    "layer norm": ("native_layer_norm", "native_layer_norm_backward"),
    "activation": ("gelu", "gelu_backward"),
    "sums and products of entries": ("add", "add_", "mul", "mul_", "sub", "sub_", "div", "div_", "addcmul", "addcmul_"),
    "sums": ("sum", "mean"),
    "copies": ("copy_", "cat", "fill_", "_foreach_copy_"),
    "check of the weights": ("hash_tensor",),
}
_CALL = "the call itself"
_KIND_OF = {f"aten::{name}": kind for kind, names in KINDS.items() for name in names}
_KIND_OF |= {_CALL: "Python between operations"}


class Spent(NamedTuple):
    """Milliseconds of an operation and the number of its calls."""

    milliseconds: float
    calls: int


def profiled(call: Callable[[], object]) -> dict[str, Spent]:
    """What each operation of a call takes itself, the least of several profiles."""
    least: dict[str, Spent] = {}
    for _ in range(PROFILES):
        with profile(activities=[ProfilerActivity.CPU]) as found, record_function(_CALL):
            call()
        for event in found.key_averages():
            spent = Spent(event.self_cpu_time_total / 1e3, event.count)
            least[event.key] = min(spent, least.get(event.key, spent))
    return least


def by_kind(operations: dict[str, Spent]) -> dict[str, float]:
    """Milliseconds by kind of operation."""
    spent: dict[str, float] = {}
    for name, one in operations.items():
        kind = _KIND_OF.get(name, "views and other operations")
        spent[kind] = spent.get(kind, 0.0) + one.milliseconds
    return spent


def calls() -> dict[str, Callable[[], object]]:
    """A gradient and two products."""
    H, make_gradient = ours(PlainGPT2), gradient(PlainGPT2)
    vector: Tensor = torch.randn(H.shape[0])
    return {
        "gradient": lambda: make_gradient(vector),
        "hessian": lambda: H.total @ vector,
        "ggn": lambda: H.outer @ vector,
    }


def measured() -> dict[str, dict[str, Spent]]:
    """A gradient and two products, by operation."""
    found: dict[str, dict[str, Spent]] = {}
    for name, call in calls().items():
        call()
        found[name] = profiled(call)
    return found


def ratios() -> dict[str, float]:
    """Both products in gradients, without the profiler, by processor time of one thread."""
    chosen = calls()
    torch.set_num_threads(1)
    seconds = in_turns(TURNS, time.process_time, **chosen)
    return {name: seconds[name] / seconds["gradient"] for name in ("hessian", "ggn")}


def shares() -> dict[str, Any]:
    """A gradient and two products by kind of operation, in gradients."""
    found = {name: by_kind(operations) for name, operations in measured().items()}
    unit = sum(found["gradient"].values())
    kinds = {name: {kind: one / unit for kind, one in sorted(spent.items())} for name, spent in found.items()}
    return {"gradient_milliseconds": unit, "operations": kinds}


def run() -> dict[str, object]:
    """This version and 0.1.0."""
    return {
        "now": shares(),
        "0.1.0": json.loads(BEFORE.read_text()),
        "one thread": in_own_process("benchmarks.profile", "--ratios"),
        "one thread, memory kept": in_own_process("benchmarks.profile", "--ratios", environment=KEPT),
    }


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
    match sys.argv[1:]:
        case ["--json"]:
            print(json.dumps(shares(), indent=1))
        case ["--ratios"]:
            print(json.dumps(ratios()))
        case _:
            print(table(measured()))
