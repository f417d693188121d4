"""`curvoscope analyze`: the numbers of table.json are those of the dense Hessian by nested autodiff."""

import json
import re
import shlex

import pytest
import torch
from PIL import Image
from torch.func import functional_call

import zoo
from autodiff_cases import cross_entropy, truth_of
from curvoscope.commands.subject import Request, select, subject_of
from curvoscope.curvature import hessian
from curvoscope.families.block_maps import blocks_of
from curvoscope.families.text import corpus
from model_folders import characters, make, saved

pytest.importorskip("transformers")

FAST = ["--sequences", "2", "--length", "6"]


@pytest.fixture
def document(call, tmp_path, undrawn):
    """The JSON of a run that succeeds."""

    def run(*arguments):
        code, stdout, stderr = call(*arguments, "--out", tmp_path / "out", "--json")
        assert (code, stderr) == (0, "")
        return json.loads(stdout)

    return run


def dense_truth(model, tokens, chosen):
    parameters = {name: p.detach() for name, p in model.named_parameters() if name in chosen.parameters}
    return truth_of(
        lambda p: functional_call(model, p, (), {"input_ids": tokens, "use_cache": False}).logits,
        parameters,
        lambda F: cross_entropy(F[:, :-1], tokens[:, 1:]),
        chosen,
    )


def deviation(found, expected, scale):
    """From the truth, in standard errors; that of an exact number in units of 1e-9."""
    return abs(found["value"] - expected) / max(found["stderr"], 1e-9 * scale)


@pytest.mark.parametrize("method", ["auto", pytest.param("autodiff", marks=pytest.mark.slow)])
def test_every_number_against_the_dense_hessian(document, tmp_path, method):
    model = saved(tmp_path / "model").double()
    tokens = characters(corpus(), 40)[:12].view(2, 6)
    options = ["--dtype", "float64", "--method", method, "--blocks", "h.0.attn.[QV]", "--blocks", "h.0.norm1"]
    found = document("analyze", tmp_path / "model", *FAST, *options)
    chosen = blocks_of(model).select("h.0.attn.[QV]", "h.0.norm1")
    truth = dense_truth(model, tokens, chosen)
    assert [row["block"] for row in found["rows"]] == [name for name in chosen for _ in range(3)]
    start, dense, deviations = 0, {}, []
    for name, size in chosen.sizes.items():
        for part in ("outer", "functional", "total"):
            dense[name, part] = getattr(truth, part).detach()[start : start + size, start : start + size]
        start += size
    for row in found["rows"]:
        block = dense[row["block"], row["part"]]
        scale = float(dense[row["block"], "total"].norm())
        expected = {"frobenius_norm": block.norm(), "trace": block.trace()}
        expected["largest_eigenvalue"] = torch.linalg.eigvalsh(block)[-1]
        deviations += [deviation(row[name], float(number), scale) for name, number in expected.items()]
        assert row["method"] in ("exact", "autodiff") and (method == "auto" or row["method"] == "autodiff")
        if row["method"] == "exact":
            assert row["frobenius_norm"]["stderr"] == 0 and row["frobenius_norm"]["matvecs"] == 0
    # 16 products have few degrees of freedom: the tails are Student's
    assert max(deviations) < 6 and sum(number > 2 for number in deviations) <= 0.2 * len(deviations)
    assert any(row["frobenius_norm"]["stderr"] for row in found["rows"]) or method == "auto"
    with torch.no_grad():
        assert (
            abs(found["loss"] - float(model(input_ids=tokens, labels=tokens).loss)) < 1e-6
        )  # transformers' is float32


def test_the_ends_of_the_whole_spectrum(document, tmp_path):
    model = saved(tmp_path / "model", n_embd=4, vocab_size=12).double()
    tokens = characters(corpus(), 12)[:12].view(2, 6)
    found = document("analyze", tmp_path / "model", *FAST, "--dtype", "float64", "--blocks", "h.0.attn.Q")["hessian"]
    everything = blocks_of(model)
    assert found["parameters"] == sum(everything.sizes.values()) == sum(p.numel() for p in model.parameters())
    eigenvalues = torch.linalg.eigvalsh(dense_truth(model, tokens, everything).total)
    for name, expected in (("largest", eigenvalues[-1]), ("smallest", eigenvalues[0])):
        end = found[f"{name}_eigenvalue"]
        assert abs(end["value"] - float(expected)) <= end["stderr"] + 1e-12 and end["method"] == "lanczos"
        assert end["stderr"] <= 0.005 * float(eigenvalues.abs().max())
    rate = found["critical_learning_rate"]
    assert abs(rate["value"] - 2 / found["largest_eigenvalue"]["value"]) < 1e-12
    assert abs(rate["value"] - 2 / float(eigenvalues[-1])) <= 2 * rate["stderr"] + 1e-12


def test_the_split_at_the_layer_has_no_functional_value_block(document, tmp_path):
    saved(tmp_path / "model")
    found = document("analyze", tmp_path / "model", *FAST, "--split", "layer", "--dtype", "float64")
    names = [row["block"] for row in found["rows"]]
    assert "embed" not in names and {"h.0.attn.V", "h.0.norm1", "h.0.mlp.up"} <= set(names)
    norms = {(row["block"], row["part"]): row["frobenius_norm"]["value"] for row in found["rows"]}
    assert norms["h.0.attn.V", "functional"] <= 1e-12 * norms["h.0.attn.V", "outer"]
    assert norms["h.0.attn.Q", "functional"] > 1e-3 * norms["h.0.attn.Q", "outer"]


@pytest.mark.slow
def test_the_tolerance_and_the_budget_are_kept(document, tmp_path):
    model = ["gpt2-tiny", *FAST, "--method", "autodiff", "--blocks", "h.0.mlp.up"]
    rows = document("analyze", *model, "--tolerance", "0.02")["rows"]
    for row in rows:
        assert row["frobenius_norm"]["stderr"] <= 0.02 * row["frobenius_norm"]["value"]
        assert row["trace"]["matvecs"] <= max(16, row["frobenius_norm"]["matvecs"])
    rows = document("analyze", *model, "--matvecs", "20")["rows"]
    for row in rows:
        for name in ("frobenius_norm", "trace", "largest_eigenvalue"):
            assert row[name]["matvecs"] <= 20


@pytest.mark.slow
def test_the_same_seed_twice_gives_the_same_document_and_its_command_repeats_it(call, undrawn, tmp_path):
    options = ["--sequences", "2", "--blocks", "h.0.attn.[KV]", "--blocks", "h.0.mlp.up", "--seed", "3"]
    randomness = torch.random.get_rng_state()
    outputs = [call("analyze", "addition", *options, "--out", tmp_path / str(i), "--json")[1] for i in range(2)]
    assert torch.equal(torch.random.get_rng_state(), randomness)
    assert outputs[0] == outputs[1] == (tmp_path / "0" / "table.json").read_text()
    words = shlex.split(json.loads(outputs[0])["command"])
    assert words[:3] == ["curvoscope", "analyze", "addition"]
    assert call(*words[1:], "--out", tmp_path / "2", "--json")[1] == outputs[0]
    other = call("analyze", "addition", *options, "--seed", "4", "--out", tmp_path / "3", "--json")[1]
    assert json.loads(other)["loss"] != json.loads(outputs[0])["loss"]


def test_what_a_reader_sees(call, tmp_path):
    out = tmp_path / "deep" / "er"
    code, stdout, stderr = call("analyze", "gpt2-tiny", *FAST, "--blocks", "h.1.attn.[QV]", "--out", out)
    assert (code, stderr) == (0, "")
    assert stdout.startswith("GPT2LMHeadModel, 37,760 parameters in float32, random weights, seed 0.\n")
    assert "2 sequences of 6 tokens from the package's corpus; tokens: one token per byte." in stdout
    for word in ("h.1.attn.Q", "outer", "functional", "λ max", "2/λ max = ", "critical learning rate", "Loss"):
        assert word in stdout
    written = ["norms.png", "pairs.png", "histograms.png", "heads.png", "report.html", "report.md", "table.json"]
    assert stdout.splitlines()[-7:] == [f"wrote {out / name}" for name in written]
    with Image.open(out / "norms.png") as image:
        image.load()
        assert min(image.size) >= 700


MORE = {
    "CodeGenForCausalLM": {"n_layer": 1},
    "GPTBigCodeForCausalLM": {"n_layer": 1},
    "BloomForCausalLM": {"n_layer": 1},
    "FalconForCausalLM": {"num_hidden_layers": 1},
    "GPTNeoForCausalLM": {},
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("GPTJForCausalLM", {"n_layer": 1}), *MORE.items()],
)
@pytest.mark.slow
def test_a_family_without_a_table_of_paths_is_named_by_structure(call, tmp_path, name, changes):
    """transformer.h.0.attn.q_proj.weight is "h.0.attn.Q"; its layers have no closed form, and the run says so."""
    zoo.save(name, tmp_path / "model", **changes)
    code, stdout, stderr = call("analyze", tmp_path / "model", *FAST, "--matvecs", "2", "--out", tmp_path / "out")
    assert (code, stderr) == (0, "")
    assert "h.0.attn.Q" in stdout and "transformer.h.0." not in stdout and "wrote" in stdout
    found = json.loads((tmp_path / "out" / "table.json").read_text())
    assert "Curvature through depth: the model has no layers of a known form." in found["missing"]
    assert found["depth"] == [] and {"h.0.attn.Q", "h.0.mlp.down"} <= {row["block"] for row in found["rows"]}


BOTH_SIDES = ["BartForConditionalGeneration", "WhisperForConditionalGeneration"]


class TestData:
    def test_text_of_ones_own(self, document, tmp_path):
        (tmp_path / "words.txt").write_text("to be or not to be, that is the question")
        options = ["--text", tmp_path / "words.txt", "--sequences", "3", "--length", "10", "--blocks", "final_norm"]
        found = document("analyze", "gpt2-tiny", *options)
        subject = subject_of(Request("gpt2-tiny", 0))
        tokens = torch.tensor(list(b"to be or not to be, that is th")).view(3, 10)
        with torch.no_grad():
            expected = float(subject.model(input_ids=tokens, labels=tokens).loss)
        assert abs(found["loss"] - expected) < 1e-5
        assert found["model"]["data"]["text"].endswith("words.txt")

    def test_the_tokenizer_of_the_folder(self, document, tmp_path):
        tokenizers = pytest.importorskip("tokenizers")
        model = saved(tmp_path / "model", vocab_size=10)
        words = ["the", "cat", "sat", "on", "mat", "[UNK]", "[MASK]"]
        inner = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
        )
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        inner.save(str(tmp_path / "model" / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "mask_token": "[MASK]"}
        (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "words.txt").write_text("the cat sat on the mat and the cat sat on the mat")
        options = ["--text", tmp_path / "words.txt", "--sequences", "2", "--length", "6", "--blocks", "final_norm"]
        found = document("analyze", tmp_path / "model", *options)
        tokens = torch.tensor([[0, 1, 2, 3, 0, 4], [5, 0, 1, 2, 3, 0]])
        with torch.no_grad():
            assert abs(found["loss"] - float(model(input_ids=tokens, labels=tokens).loss)) < 1e-5
        assert found["model"]["data"]["tokens"] == "the model's tokenizer"
        assert found["title"] == "Curvature of model" and "of model, and" in found["question"]
        assert str(tmp_path / "model") in found["command"] and str(tmp_path / "model") in found["about"][0]
        (tmp_path / "model" / "tokenizer.json").write_text("{")
        code_settings = settings | {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
        for content, message in ((settings, "cannot be read"), (code_settings, "never run")):
            (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(content))
            with pytest.raises(ValueError, match=message):
                subject_of(Request(str(tmp_path / "model"), 0))

    def test_hidden_tokens_for_bert(self, document, tmp_path):
        model = saved(tmp_path / "model", "bert")
        found = document("analyze", tmp_path / "model", *FAST, "--blocks", "h.0.attn.Q", "--seed", "2")
        subject = subject_of(Request(str(tmp_path / "model"), 2, sequences=2, length=6))
        batch = subject.batch
        hidden = batch["input_ids"] == 29  # the last of the vocabulary
        assert int(hidden.sum()) == found["model"]["data"]["hidden"] == 2
        plain = characters(corpus(), 29)[:12].view(2, 6)
        assert torch.equal(batch["labels"][hidden], plain[hidden])
        with torch.no_grad():
            assert abs(found["loss"] - float(model(**batch).loss)) < 1e-5

    def test_images_are_noise_and_it_says_so(self, call, undrawn, tmp_path):
        saved(tmp_path / "model", "vit")
        options = ["--sequences", "3", "--blocks", "h.0.attn.V", "--out", tmp_path / "out"]
        code, stdout, _ = call("analyze", tmp_path / "model", *options)
        assert code == 0 and "Cross-entropy of 3 classes on 3 noise images, 8 x 8 random pixels." in stdout
        code, _, stderr = call("analyze", tmp_path / "model", *options, "--length", "5")
        assert code == 2 and stderr.startswith("error: length: is for language models")

    @pytest.mark.parametrize(
        "name", ["BartForConditionalGeneration", "MarianMTModel", "WhisperForConditionalGeneration"]
    )
    def test_an_encoder_and_a_decoder(self, tmp_path, name):
        """The loss is the one that the model itself has for these labels, and the whole model is looked at."""
        model = zoo.save(name, tmp_path / "model")
        subject = subject_of(Request(str(tmp_path / "model"), 2, sequences=2, length=6))
        batch = {key: value for key, value in subject.batch.items() if key != "decoder_input_ids"}
        with torch.no_grad():
            expected = float(model(**batch).loss)
        assert abs(hessian(subject.model, subject.loss, [subject.batch]).loss - expected) < 1e-5
        plain = characters(corpus(), 13)
        if "input_ids" in batch:
            text = plain[:24].view(2, 12)
            assert torch.equal(batch["input_ids"], text[:, :6]) and torch.equal(batch["labels"], text[:, 6:])
            assert "the 6 tokens that follow on 2 sequences of 6 tokens" in subject.about[1]
        else:
            assert torch.equal(batch["labels"], plain[:12].view(2, 6)) and batch["input_features"].shape == (2, 4, 10)
            assert subject.about[1].startswith("Cross-entropy of a text on noise as sound, unrelated to it")
        parameters = {name for name, parameter in subject.model.named_parameters() if parameter.requires_grad}
        assert subject.blocks.parameters == parameters >= {n for n, p in model.named_parameters() if p.requires_grad}

    @pytest.mark.slow
    @pytest.mark.parametrize("name", BOTH_SIDES)
    def test_an_encoder_and_a_decoder_from_end_to_end(self, document, tmp_path, name):
        zoo.save(name, tmp_path / "model")
        found = document("analyze", tmp_path / "model", *FAST, "--matvecs", "2")
        assert found["model"]["class"] == name
        assert {side for side in ("encoder", "decoder") if any(side in row["block"] for row in found["rows"])} == {
            "encoder",
            "decoder",
        }

    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            ("Speech2TextForConditionalGeneration", {}, "sound in a different form from Whisper"),
            ("CLIPModel", {}, "which this command has no data for"),
        ],
    )
    def test_what_there_are_no_data_for(self, call, tmp_path, name, changes, message):
        zoo.save(name, tmp_path / "model", **changes)
        code, _, stderr = call("analyze", tmp_path / "model", "--out", tmp_path / "out")
        assert code == 2 and message in stderr and "give cv.hessian(model, loss_fn, batches)" in stderr
        assert stderr.count("\n") == 1 and not (tmp_path / "out").exists()

    def test_additions(self, document):
        found = document("analyze", "addition", "--sequences", "3", "--blocks", "h.0.attn.V")
        assert found["model"]["dtype"] == "float64" and found["model"]["data"] == {"additions": 3}
        assert "transformers" not in found["versions"]

    def test_sequences_longer_than_the_context_or_the_text(self, call, tmp_path):
        code, _, stderr = call("analyze", "gpt2-tiny", "--length", "129", "--out", tmp_path)
        assert (code, stderr) == (2, "error: length: got 129, the model reads at most 128 tokens\n")
        code, _, stderr = call("analyze", "gpt2-tiny", "--sequences", "9999", "--out", tmp_path)
        assert code == 2 and stderr.startswith("error: text: has 10696 tokens, 9999 sequences of 64 need")

    def test_weights_that_are_not_used_are_told(self, call, undrawn, tmp_path):
        saved(tmp_path / "model", n_layer=2)
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "n_layer": 1}))
        options = [*FAST, "--blocks", "h.0.attn.V", "--out", tmp_path / "out"]
        code, stdout, _ = call("analyze", tmp_path / "model", *options)
        assert code == 0 and re.search(r"Not used: 1\d tensors of the folder, transformer\.h\.1\.", stdout)


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["gpt2-tin"], "error: model: 'gpt2-tin' is not a folder and none of"),
            (["some/where"], "error: model: some/where is not a folder"),
            (["gpt2-tiny", "--d", "8"], "error: d: applies to addition only"),
            (["gpt2-tiny", "--norm", "pre"], "error: norm: applies to addition only"),
            (["--tolerance", "2"], "error: tolerance: got 2"),
            (["--blocks", "h.1.attn.Q"], "error: blocks: 'h.1.attn.Q' matches none of"),
            (["gpt2-tiny", "--blocks", "h.0.atn.Q"], "error: blocks: 'h.0.atn.Q' matches none of 31 blocks; nearest"),
            (["gpt2-tiny", "--tolerance", "2"], "error: tolerance: got 2"),
            (["gpt2-tiny", "--tolerance", "0.1", "--matvecs", "8"], "error: tolerance: got both"),
            (["gpt2-tiny", "--matvecs", "1"], "error: matvecs: got 1"),
            (["gpt2-tiny", "--seed", "-1"], "error: seed: got -1"),
            (["gpt2-tiny", "--sequences", "0"], "error: sequences: got 0"),
            (["gpt2-tiny", "--text", "/no/such/text"], "error: text: cannot read /no/such/text"),
        ],
    )
    def test_one_line_and_no_files(self, call, tmp_path, arguments, message):
        code, stdout, stderr = call("analyze", *arguments, "--out", tmp_path / "out", "--json")
        assert (code, stdout) == (2, "") and stderr.startswith(message) and stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_a_truncated_file_is_named(self, call, tmp_path):
        saved(tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        code, _, stderr = call("analyze", tmp_path / "model", "--out", tmp_path / "out")
        assert code == 2 and f"{file} is truncated or corrupt" in stderr and stderr.count("\n") == 1


def test_the_default_blocks():
    blocks = blocks_of(make("gpt2"))
    layer = ["norm1", "attn.Q", "attn.K", "attn.V", "attn.O", "norm2", "mlp.up", "mlp.down"]
    inside = [f"h.0.{name}" for name in layer]
    assert select(blocks, ()).names == ["embed", "positions", *inside, "final_norm"]
    assert select(blocks, (), layers_only=True).names == inside
    assert select(blocks, ("*.b_Q",)).names == ["h.0.attn.b_Q"]
    bert = select(blocks_of(make("bert")), ()).names
    assert not [name for name in bert if name.endswith("bias") or ".b_" in name]
