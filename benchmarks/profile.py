"""Where the time of a product goes: operations of a product with the Hessian, and with its Gauss-Newton part, beside
those of a gradient, by `torch.profiler`.

The model is that of `matrix_free`, of torch's own layers, with one thread. Each kind of operation has the least time of
several profiles, in units of all matrix products of a gradient. The limit of a product is that each of the three matrix
products of a weight in a gradient becomes two (Hessian), or that there is one more (Gauss-Newton).
"""

import json
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.matrix_free import PlainGPT2, gradient, ours

PROFILES = 8
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


def by_kind(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds by kind of operation, the least of several profiles."""
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    least: dict[str, float] = {}
    for _ in range(PROFILES):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            call()
        spent: dict[str, float] = {}
        for event in found.key_averages():
            kind = kind_of.get(event.key, "other")
            spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total / 1e3
        least = {kind: min(spent.get(kind, 0.0), least.get(kind, float("inf"))) for kind in {*spent, *least}}
    return least


def run() -> dict[str, object]:
    """A gradient and two products."""
    H, make_gradient = ours(PlainGPT2), gradient(PlainGPT2)
    torch.set_num_threads(1)
    vector: Tensor = torch.randn(H.shape[0])
    calls: dict[str, Callable[[], object]] = {
        "gradient": lambda: make_gradient(vector),
        "hessian": lambda: H.total @ vector,
        "ggn": lambda: H.outer @ vector,
    }
    found: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        call()
        found[name] = by_kind(call)
    unit = found["gradient"]["matrix products"]
    shares = {name: {kind: one / unit for kind, one in sorted(kinds.items())} for name, kinds in found.items()}
    return {"unit_milliseconds": unit, "limits": {"hessian": 2.0, "ggn": 4 / 3}, "operations": shares}


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
