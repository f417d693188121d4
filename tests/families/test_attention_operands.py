"""Roles and heads, seen from outside: a block named Q moves the queries that transformers gives to its attention
function, and nothing else of that call; the block of a head moves that head.

The recogniser has no part in this: the attention function is replaced by one that keeps its operands.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import curvoscope as cv
import zoo

transformers = pytest.importorskip("transformers")

QUICK = {"GPT2LMHeadModel", "GPTNeoXForCausalLM", "GPTBigCodeForCausalLM", "DeepseekV3ForCausalLM"}
QUICK |= {"T5ForConditionalGeneration", "LlavaForConditionalGeneration"}
OWN = {  # attention written out in the class; those with fused weights are in LAYOUTS of test_recognition
    *("OpenAIGPTLMHeadModel", "GPTJForCausalLM", "CodeGenForCausalLM", "GPTNeoForCausalLM", "BloomForCausalLM"),
    *("FalconForCausalLM", "MptForCausalLM", "MPNetForMaskedLM", "DebertaForMaskedLM", "DebertaV2ForMaskedLM"),
    *("MegatronBertForMaskedLM", "RemBertForMaskedLM", "RoFormerForMaskedLM", "ConvBertForMaskedLM"),
    *("SqueezeBertForMaskedLM", "XLMWithLMHeadModel", "XLNetLMHeadModel", "LEDForConditionalGeneration"),
    *("Swinv2ForImageClassification", "WavLMForSequenceClassification", "BlipForConditionalGeneration"),
    "ViltForQuestionAnswering",
}
NO_ATTENTION = {"MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "RwkvForCausalLM", "FNetForMaskedLM"}
NO_ATTENTION |= {f"{name}ForImageClassification" for name in ("ConvNext", "ResNet", "PoolFormer")}
NORMALISED_TOGETHER = {"Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM"}  # all heads of a query by one norm
NAMES = [name for name in zoo.cases() if name not in OWN | NO_ATTENTION | set(zoo.PLAIN)]


class Attention:
    """Attention without masks that keeps its operands; `only`: the one head whose output is not zero."""

    def __init__(self):
        self.calls, self.only = [], None

    def __call__(self, module, query, key, value, attention_mask, **options):
        self.calls.append({"Q": query.clone(), "K": key.clone(), "V": value.clone()})
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        mixed = scaled_dot_product_attention(query, key, value)
        if self.only is not None:
            mixed[:, [head for head in range(mixed.shape[1]) if head != self.only]] = 0
        return mixed.transpose(1, 2), None


class Watched:
    """A model of the zoo that tells what its attention is given."""

    def __init__(self, name):
        self.model, _, (batch,) = zoo.build(name)
        self.blocks = cv.blocks_of(self.model, batch)
        self._inputs = batch[0] if isinstance(batch, tuple) else batch
        self.attention = Attention()
        transformers.AttentionInterface.register("watched", self.attention)
        transformers.AttentionMaskInterface.register("watched", lambda *_, **__: None)
        self.model.set_attn_implementation("watched")
        self._parameters = {key: parameter.detach() for key, parameter in self.model.named_parameters()}

    def run(self, block=None):
        """Operands of all calls and the outputs, with the entries of a block moved."""
        old = None if block is None else block.gather(self._parameters).clone()
        if block is not None:
            # not by one number: a norm takes a shift of all features away
            block.scatter(old + torch.linspace(0.1, 0.2, len(old)).to(old), self._parameters)
        self.attention.calls.clear()
        with torch.no_grad():
            found = self.model(**self._inputs)
        if block is not None:
            block.scatter(old, self._parameters)
        outputs = [one for one in found.to_tuple() if isinstance(one, torch.Tensor) and one.is_floating_point()]
        return list(self.attention.calls), outputs


def changes(before, after):
    """The first call that has changed, and the heads that have, by operand; None if none has."""
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        moved = {
            role: (one[role] != other[role]).transpose(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
            for role in one
        }
        moved = {role: heads for role, heads in moved.items() if heads}
        if moved:
            return number, moved
    return None


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_blocks_move_what_they_are_named_after(name):
    watched = Watched(name)
    blocks, (before, _) = watched.blocks, watched.run()
    assert before
    layers = {}
    for label, block in blocks.items():
        stem, _, leaf = label.rpartition(".")
        role = leaf.removeprefix("b_")
        if role not in ("Q", "K", "V") or stem.rpartition(".")[2] not in ("attn", "cross") or ".pool" in f".{stem}":
            continue
        call, moved = changes(before, watched.run(block)[0])
        assert set(moved) == {role}, (label, moved)
        assert layers.setdefault(stem, call) == call, label
        assert moved[role] == list(range(before[call][role].shape[1])), label
        several = name == "DiffLlamaForCausalLM" and role == "V"  # each half of its values goes to all heads
        if block.heads is not None and name not in NORMALISED_TOGETHER and not several:
            share = before[call][role].shape[1] // block.heads
            for head in range(block.heads):
                found = changes(before, watched.run(block.head(head))[0])
                assert found == (call, {role: list(range(head * share, (head + 1) * share))}), (label, head)
    again = {"AlbertForMaskedLM", "DiffLlamaForCausalLM"}  # a layer that runs twice, and one with two softmaxes
    assert len(set(layers.values())) == len(layers) == len(before) // (2 if name in again else 1)
    for stem, call in layers.items():
        _check_output(watched, blocks[f"{stem}.O"], stem, call)


def _check_output(watched, output, stem, call):
    """W_O moves later calls alone, and its rows that belong to a head read this head alone."""
    before, outputs = watched.run()
    after, changed = watched.run(output)
    moved = changes(before, after)
    assert any(not torch.equal(a, b) for a, b in zip(outputs, changed, strict=True)), stem
    assert moved is None or moved[0] > call, stem
    for only in range(output.heads or 0):
        watched.attention.only = only
        _, plain = watched.run()
        for head in range(output.heads):
            _, found = watched.run(output.head(head))
            same = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
            assert same == (head != only), (stem, only, head)
    watched.attention.only = None
