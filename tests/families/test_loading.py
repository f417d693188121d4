"""Models from folders: the weights that are there, and an error for whatever else a folder may hold."""

import builtins
import inspect
import json
import pickle
import re
import socket

import pytest
import torch
from torch.nn.functional import cross_entropy

import zoo
from curvoscope import cli
from curvoscope.commands.subject import NAMES, Request, subject_of
from curvoscope.errors import CurvoscopeError, MemoryLimitError, MissingPackageError
from curvoscope.families import configs, loading
from curvoscope.families.loading import UnknownArchitectureError, load
from curvoscope.families.model_folders import (
    CorruptFileError,
    LoadingError,
    MissingWeightsError,
    NotAModelError,
    QuantisedError,
    RemoteCodeError,
)
from model_folders import saved

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refused(*arguments):
        raise AssertionError("loading has asked the network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


def edit(folder, **changes):
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def same_weights(first, second):
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("family", "task"), [("gpt2", "causal"), ("llama", "causal"), ("bert", "masked"), ("vit", "image-classification")]
)
def test_every_family_comes_back_as_it_was_saved(tmp_path, family, task):
    model = saved(tmp_path, family)
    found = load(tmp_path)
    assert type(found.model) is type(model) and found.task == task and found.unused == ()
    assert same_weights(found.model, model)
    assert not any(module.training for module in found.model.modules())
    assert {parameter.dtype for parameter in found.model.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in load(tmp_path, torch.float64).model.parameters()} == {torch.float64}


def test_several_files_with_an_index(tmp_path):
    model = saved(tmp_path, shards="2KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert same_weights(load(tmp_path).model, model)


def test_half_precision_files_become_float32(tmp_path):
    from curvoscope.blocks import Blocks
    from curvoscope.families.block_maps import blocks_of

    model = saved(tmp_path).bfloat16()
    model.save_pretrained(tmp_path)
    found = load(tmp_path).model
    assert same_weights(found, model.float())
    assert isinstance(blocks_of(found), Blocks)


def test_pickled_weights_are_read_without_running_anything(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert same_weights(load(tmp_path).model, model)


class Malicious:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (self.mark, "w"))


@pytest.mark.parametrize("plain", [True, False])
def test_pickled_code_is_not_run(tmp_path, plain):
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file, mark = tmp_path / "pytorch_model.bin", tmp_path / "mark"
    content = {"transformer.wte.weight": Malicious(str(mark))}
    if plain:
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file)
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin is corrupt.*weights_only=True"):
        load(tmp_path)
    assert not mark.exists()


def test_safetensors_are_preferred_to_a_pickle(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    assert same_weights(load(tmp_path).model, model)


class TestNoModel:
    def test_no_folder(self, tmp_path):
        with pytest.raises(NotAModelError, match=r"model: .*nowhere is not a folder"):
            load(tmp_path / "nowhere")

    def test_no_configuration(self, tmp_path):
        with pytest.raises(NotAModelError, match=r"has no config\.json$"):
            load(tmp_path)
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(NotAModelError, match="adapter"):
            load(tmp_path)

    def test_no_weights(self, tmp_path):
        saved(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(NotAModelError, match=r"has no weights; expected model\.safetensors"):
            load(tmp_path)

    @pytest.mark.parametrize("content", ["{", "[1]", '"gpt2"'])
    def test_a_configuration_that_is_none(self, tmp_path, content):
        saved(tmp_path)
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CorruptFileError, match=r"config\.json"):
            load(tmp_path)


class TestCorruptFiles:
    @pytest.mark.parametrize("kept", [0, 5, 200, -1])
    def test_truncated(self, tmp_path, kept):
        saved(tmp_path)
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(CorruptFileError, match=r"model\.safetensors is truncated or corrupt.*copy it again"):
            load(tmp_path)

    def test_another_file_of_that_name(self, tmp_path):
        saved(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"<html>" * 100)
        with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
            load(tmp_path)

    def test_the_shard_is_named(self, tmp_path):
        saved(tmp_path, shards="2KB")
        shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-8])
        with pytest.raises(CorruptFileError, match=shard.name):
            load(tmp_path)
        shard.unlink()
        with pytest.raises(MissingWeightsError, match=f"{shard.name}, which is not there"):
            load(tmp_path)

    @pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": {"a": "../model.safetensors"}}'])
    def test_an_index_that_is_none(self, tmp_path, content):
        saved(tmp_path, shards="2KB")
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CorruptFileError, match=r"index\.json"):
            load(tmp_path)


class TestArchitecture:
    def test_unknown(self, tmp_path):
        saved(tmp_path)
        edit(tmp_path, model_type="zorg")
        with pytest.raises(UnknownArchitectureError, match="model_type 'zorg'"):
            load(tmp_path)

    def test_without_a_loss_of_a_known_kind(self, tmp_path):
        saved(tmp_path)
        edit(tmp_path, architectures=["GPT2ForMaskedLM"])
        with pytest.raises(UnknownArchitectureError, match="GPT2ForMaskedLM"):
            load(tmp_path)

    def test_a_value_that_cannot_be(self, tmp_path):
        saved(tmp_path)
        edit(tmp_path, n_layer="two")
        with pytest.raises(CorruptFileError, match=r"config\.json.*n_layer"):
            load(tmp_path)

    def test_code_of_its_own_is_refused(self, tmp_path):
        saved(tmp_path)
        edit(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model"})
        (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
        with pytest.raises(RemoteCodeError, match=r"auto_map: AutoModelForCausalLM.*never run"):
            load(tmp_path)
        assert not (tmp_path / "mark").exists()

    def test_a_kernel_to_download_is_not_asked_for(self, tmp_path):
        model = saved(tmp_path)
        edit(tmp_path, _attn_implementation="somebody/kernel", attn_implementation="somebody/kernel")
        found = load(tmp_path).model
        tokens = torch.tensor([[1, 2, 3]])
        assert torch.allclose(found(tokens).logits, model(tokens).logits, atol=1e-5)

    def test_a_body_whose_head_is_tied(self, tmp_path):
        model = saved(tmp_path)
        model.transformer.save_pretrained(tmp_path)
        found = load(tmp_path)
        assert found.task == "causal" and same_weights(found.model, model)


class TestClass:
    """The class that config.json names is the one that is loaded, with all its weights."""

    @pytest.mark.parametrize(
        ("name", "task"),
        [
            ("BartForConditionalGeneration", "seq2seq"),
            ("MarianMTModel", "seq2seq"),
            ("T5ForConditionalGeneration", "seq2seq"),
            ("WhisperForConditionalGeneration", "speech-to-text"),
            ("BertForSequenceClassification", "sequence-classification"),
            ("RobertaForTokenClassification", "token-classification"),
            ("XLMWithLMHeadModel", "masked"),
            ("SwinForImageClassification", "image-classification"),
            ("Wav2Vec2ForSequenceClassification", "audio-classification"),
            ("BertForQuestionAnswering", "question-answering"),
        ],
    )
    def test_it_comes_back_as_it_was_saved(self, tmp_path, name, task):
        model = zoo.save(name, tmp_path)
        found = load(tmp_path)
        assert type(found.model) is type(model) and found.task == task and found.unused == ()
        assert same_weights(found.model, model)

    @pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel", "Wav2Vec2ForCTC", "ViltForQuestionAnswering"])
    def test_one_that_there_are_no_data_for_names_the_cure(self, tmp_path, name):
        zoo.save(name, tmp_path)
        with pytest.raises(
            UnknownArchitectureError, match=rf"{name}, which .* no data for; load it in Python and give"
        ):
            load(tmp_path)

    def test_another_head_of_a_known_family_is_not_read_as_a_language_model(self, tmp_path):
        """All weights of GPT2LMHeadModel are there, but the folder is not one."""
        saved(tmp_path)
        edit(tmp_path, architectures=["GPT2ForQuestionAnswering"])
        with pytest.raises(MissingWeightsError, match=r"has no qa_outputs.*random in GPT2ForQuestionAnswering$"):
            load(tmp_path)

    def test_a_class_that_transformers_does_not_have_is_known_by_its_ending(self, tmp_path):
        model = saved(tmp_path)
        edit(tmp_path, architectures=["MyOwnLMHeadModel"])
        assert same_weights(load(tmp_path).model, model)

    def test_the_body_of_an_encoder_decoder(self, tmp_path):
        model = zoo.save("BartForConditionalGeneration", tmp_path)
        model.model.save_pretrained(tmp_path)
        found = load(tmp_path)
        assert found.task == "seq2seq" and type(found.model) is type(model)


class TestRandomWeights:
    """What a folder lacks would be random, and its curvature a lie."""

    def test_a_body_without_its_head(self, tmp_path):
        saved(tmp_path, "bert").bert.save_pretrained(tmp_path)
        with pytest.raises(MissingWeightsError, match=r"has no cls\.predictions.*random in BertForMaskedLM"):
            load(tmp_path)

    def test_fewer_layers_than_the_configuration_says(self, tmp_path):
        saved(tmp_path)
        edit(tmp_path, n_layer=2)
        with pytest.raises(MissingWeightsError, match=r"transformer\.h\.1.* and 9 more"):
            load(tmp_path)

    def test_other_shapes(self, tmp_path):
        saved(tmp_path)
        edit(tmp_path, vocab_size=41)
        with pytest.raises(MissingWeightsError, match=r"another shape of .*wte\.weight"):
            load(tmp_path)

    def test_more_layers_than_the_configuration_says_are_told(self, tmp_path):
        saved(tmp_path, n_layer=2)
        edit(tmp_path, n_layer=1)
        unused = load(tmp_path).unused
        assert unused and all(name.startswith("transformer.h.1.") for name in unused)


class TestQuantised:
    def test_by_the_configuration(self, tmp_path):
        saved(tmp_path)
        edit(tmp_path, quantization_config={"quant_method": "bitsandbytes"})
        with pytest.raises(QuantisedError, match="bitsandbytes"):
            load(tmp_path)

    def test_by_the_weights(self, tmp_path):
        from safetensors.torch import load_file, save_file

        saved(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["transformer.h.0.mlp.c_fc.weight"] = tensors["transformer.h.0.mlp.c_fc.weight"].to(torch.int8)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(QuantisedError, match=r"c_fc\.weight in .*model\.safetensors is I8"):
            load(tmp_path)


def test_a_model_larger_than_the_memory(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr(loading.checks, "memory_budget", lambda: 1000)
    with pytest.raises(MemoryLimitError, match=r"the model in .* needs"):
        load(tmp_path)


def test_without_transformers(tmp_path, monkeypatch):
    saved(tmp_path)
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.partition(".")[0] == "transformers":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    for ask in (lambda: load(tmp_path), lambda: configs.make("gpt2-tiny")):
        with pytest.raises(MissingPackageError, match=r'pip install "curvoscope\[hf\]"'):
            ask()
    assert subject_of(Request("addition", seed=0)).facts["task"] == "addition"


class TestNames:
    @pytest.mark.parametrize("name", [name for name in configs.NAMES if name != "gpt2-small"])
    def test_a_seed_decides_the_weights_and_nothing_else_changes(self, name):
        before = torch.random.get_rng_state()
        first, same, other = (configs.make(name, seed).model for seed in (1, 1, 2))
        assert torch.equal(torch.random.get_rng_state(), before)
        assert same_weights(first, same) and not same_weights(first, other)
        assert not any(module.training for module in first.modules())

    def test_tiny_models_compute_a_loss(self):
        tokens = torch.arange(256).view(2, 128)
        for name in ("gpt2-tiny", "llama-tiny", "bert-tiny"):
            logits = configs.make(name).model(tokens).logits
            assert torch.isfinite(cross_entropy(logits.flatten(0, 1), tokens.flatten()))

    def test_the_command_lists_the_names(self):
        help_text = inspect.signature(cli.analyze).parameters["model"].annotation.__metadata__[0].help
        assert all(name in help_text for name in NAMES)

    def test_an_unknown_name_and_its_neighbours(self):
        with pytest.raises(
            NotAModelError, match=r"'gpt-tiny' is not a folder and none of addition.*nearest: gpt2-tiny"
        ):
            subject_of(Request("gpt-tiny", seed=0))

    def test_a_seed_out_of_range(self):
        with pytest.raises(CurvoscopeError, match="seed: got -1"):
            configs.make("gpt2-tiny", -1)


def test_a_gguf_file_needs_its_package(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"install gguf: pip install .curvoscope\[gguf\]"):
        load(file)


def test_a_broken_gguf_file_is_named(tmp_path):
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF and nothing else")
    with pytest.raises(LoadingError, match=r"model\.gguf"):
        load(file)


_GGUF_NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"},
    **{"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"},
    **{"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
}


def _llama_as_gguf(file):
    """A small Llama, written as llama.cpp stores it: the halves of queries and keys that turn together side by side."""
    gguf, transformers = pytest.importorskip("gguf"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5, rope_theta=5000.0)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(config.vocab_size)
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
        stored = f"blk.{layer[1]}.{_GGUF_NAMES[layer[2]]}" if layer else _GGUF_NAMES[module]
        if module.endswith(("q_proj", "k_proj")):
            weight = weight.view(-1, 2, config.head_dim // 2, config.hidden_size).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{stored}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_is_the_model_that_was_written(tmp_path):
    model = _llama_as_gguf(tmp_path / "llama.gguf")
    loaded = load(tmp_path / "llama.gguf")
    tokens = torch.randint(64, (2, 16))
    assert loaded.task == "causal"
    assert all(torch.equal(weight, loaded.model.state_dict()[name]) for name, weight in model.state_dict().items())
    assert torch.allclose(loaded.model(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)
