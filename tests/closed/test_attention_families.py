"""Closed forms in models that are known by structure alone, against autodiff: blocks within each layer, all parts."""

import re

import pytest
import torch

import curvoscope as cv
import zoo
from curvoscope.curvature import trainable

# One model for each way of making scores; the first ones in `make test`
QUICK = ("GPTNeoXForCausalLM", "Qwen3ForCausalLM")
SLOW = (
    "GPTJForCausalLM",  # neighbours turn, attention and feed-forward layer in parallel
    "BloomForCausalLM",  # ALiBi, interleaved Q, K, V, and a GELU of its own
    "FalconForCausalLM",  # one key head, adds in place
    "Olmo2ForCausalLM",  # norms over all heads
    "CohereForCausalLM",  # interleaved positions
    "Gemma2ForCausalLM",  # capped scores, windows
    "GptOssForCausalLM",  # sinks
    "MptForCausalLM",
    "Phi3ForCausalLM",  # gate and up in one weight
    "T5ForConditionalGeneration",  # relative positions
    "NemotronForCausalLM",  # squared ReLU
)
ROLES = {"attn": {"Q", "K", "V", "O", "b_Q", "b_K", "b_V", "b_O"}}
ROLES["mlp"] = {"up", "gate", "down", "b_up", "b_gate", "b_down"}


def blocks_in(model, batches):
    """The blocks of attention and feed-forward layers, by structure."""
    found = trainable(model, cv.blocks_of(model, batches[0]))
    parts = {name: name.split(".")[-2:] for name in found if "." in name}
    return found.select(*(name for name, (kind, role) in parts.items() if role in ROLES.get(kind, ())))


def layers_of(blocks):
    """Names of the blocks of each layer."""
    layers = {}
    for name in blocks:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


def largest_error(model, loss, batches, blocks, **options):
    """Of all entries in the layers that have a closed form, relative to the block (of 1e-4 of the largest entry); and
    how many layers these are."""
    exact, autodiff = (cv.hessian(model, loss, batches, blocks, method=one, **options) for one in ("auto", "autodiff"))
    worst, count = 0.0, 0
    for names in layers_of(blocks).values():
        if any(exact.method_of(name) != "exact" for name in names):
            continue
        count += 1
        total = autodiff.total.select(names).dense()
        for part in ("total", "outer", "functional"):
            expected = getattr(autodiff, part).select(names)
            dense = expected.dense()
            for row in names:
                for column in names:
                    here = expected.ranges[row], expected.ranges[column]
                    size = max(float(total[here].abs().max()), 1e-4 * float(total.abs().max()))
                    found = getattr(exact, part)[row, column].dense()
                    worst = max(worst, float((found - dense[here]).abs().max()) / size)
    return worst, count


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_every_way_of_making_scores(name):
    pytest.importorskip("transformers")
    model, loss, batches = zoo.build(name)
    blocks = blocks_in(model, batches)
    blocks = blocks.select("*h.0.attn.*", *(["*h.0.mlp.*"] if name != "GptOssForCausalLM" else []))
    worst, count = largest_error(model, loss, batches, blocks)
    assert count == len(layers_of(blocks))
    assert worst < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes",
    [
        ("CohereForCausalLM", {"use_qk_norm": True}),  # a gamma for each head
        ("PhiForCausalLM", {"qk_layernorm": True}),  # with a shift
        ("FalconForCausalLM", {"alibi": True}),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 2.0, "sliding_window": 3, "attn_implementation": "eager"}),
    ],
)
def test_options_of_a_family(name, changes):
    pytest.importorskip("transformers")
    model, loss, batches = zoo.build(name, **changes)
    worst, count = largest_error(model, loss, batches, blocks_in(model, batches).select("h.0.attn.*"))
    assert count == 1 and worst < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPTNeoXForCausalLM", "BloomForCausalLM", "GptOssForCausalLM"])
def test_padding_and_the_split_at_the_layer(name):
    """Padding on the left of one row and on the right of another; positions and ALiBi then differ between rows."""
    pytest.importorskip("transformers")
    model, loss, (batch,) = zoo.build(name)
    seen = torch.ones_like(batch["input_ids"])
    seen[0, :2] = seen[1, 4:] = 0
    positions = {} if name == "BloomForCausalLM" else {"position_ids": (seen.cumsum(-1) - 1).clamp_min(0)}
    counted = (seen * seen.roll(1, -1)).bool()  # padding predicts nothing
    labels = batch["labels"].masked_fill(~counted, -100)
    batches = [{**batch, **positions, "attention_mask": seen, "labels": labels}]
    blocks = blocks_in(model, batches).select("*h.1.attn.*")
    worst, count = largest_error(model, loss, batches, blocks, split="layer")
    assert count == 1 and worst < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, cause",
    [
        ("DiffLlamaForCausalLM", "its attention is computed in several parts"),
        ("DebertaForMaskedLM", "its scores have additional weights \\(positional, or several in series\\)"),
        ("Swinv2ForImageClassification", ".* it has weights of positions in its scores, has a learned temperature"),
    ],
)
def test_the_plan_names_the_cause(name, cause):
    pytest.importorskip("transformers")
    model, loss, batches = zoo.build(name)
    blocks = blocks_in(model, batches)
    query = next(one for one in blocks if one.endswith(".attn.Q"))
    H = cv.hessian(model, loss, batches, blocks)
    assert H.method_of(query) == "autodiff"
    assert re.match(cause, H.plan[query, "total"].reason)
