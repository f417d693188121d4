"""Every task of `curvoscope analyze`: the loss and its Hessian are those of the model itself, and the data are said."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

import zoo
from curvoscope.commands.subject import Request, subject_of
from curvoscope.curvature import hessian
from curvoscope.errors import CurvoscopeError, RangeError, ShapeError
from curvoscope.families.loading import UnknownArchitectureError
from curvoscope.families.model_folders import MissingWeightsError
from curvoscope.families.tasks import ModelTask
from curvoscope.families.text import TextError, corpus
from model_folders import characters, saved
from reference import normal, relative

transformers = pytest.importorskip("transformers")

TASKS = {  # the class, the task that the folder tells, and the targets that the model itself computes its loss with
    "GPT2LMHeadModel": ModelTask.CAUSAL,
    "BertForMaskedLM": ModelTask.MASKED,
    "T5ForConditionalGeneration": ModelTask.SEQ2SEQ,
    "WhisperForConditionalGeneration": ModelTask.SPEECH_TO_TEXT,
    "BertForSequenceClassification": ModelTask.SEQUENCE_CLASSIFICATION,
    "RobertaForTokenClassification": ModelTask.TOKEN_CLASSIFICATION,
    "BertForQuestionAnswering": ModelTask.QUESTION_ANSWERING,
    "ViTForImageClassification": ModelTask.IMAGE_CLASSIFICATION,
    "Wav2Vec2ForSequenceClassification": ModelTask.AUDIO_CLASSIFICATION,
    "ASTForAudioClassification": ModelTask.AUDIO_CLASSIFICATION,
    "WhisperForAudioClassification": ModelTask.AUDIO_CLASSIFICATION,
}
OF_THE_TEXT = {ModelTask.CAUSAL, ModelTask.MASKED, ModelTask.SEQ2SEQ, ModelTask.SPEECH_TO_TEXT}
LENGTHS = {"Wav2Vec2ForSequenceClassification": 60, "ViTForImageClassification": None}
LENGTHS |= {"ASTForAudioClassification": None, "WhisperForAudioClassification": None}


def request(folder, name="", **options):
    return Request(str(folder), 2, sequences=2, **{"length": LENGTHS.get(name, 6), "dtype": "float64"} | options)


def own_loss(model, batch):
    """The loss that transformers' model computes for itself."""
    if isinstance(batch, tuple):
        inputs, spans = batch
        return model(**inputs, start_positions=spans[:, 0], end_positions=spans[:, 1]).loss
    return model(**batch).loss


@pytest.mark.parametrize("targets", [None, pytest.param("random", marks=pytest.mark.slow), "sampled"])
@pytest.mark.parametrize("name", TASKS)
def test_the_loss_is_the_one_that_the_model_has(tmp_path, name, targets):
    model = zoo.save(name, tmp_path / "model").double()
    subject = subject_of(request(tmp_path / "model", name, targets=targets))
    assert (subject.facts["task"], subject.facts["class"]) == (TASKS[name], name)
    assert subject.facts["saved_from"] is None
    expected = float(own_loss(model, subject.batch).detach())
    assert abs(hessian(subject.model, subject.loss, [subject.batch]).loss - expected) < 1e-5  # partly float32 inside
    told = " ".join(subject.about)
    natural = targets is None and TASKS[name] in OF_THE_TEXT
    assert subject.facts["data"]["targets"] == ("text" if natural else targets or "random")
    assert ("Targets are random and contain nothing to learn." in told) == (not natural and targets != "sampled")
    assert ("Targets are drawn from the model's own predictions." in told) == (targets == "sampled")


def product_by_hand(value, blocks, parameters, v):
    """The Hessian of a number times v, by differentiating it twice."""
    leaves = {name: parameters[name] for name in sorted(blocks.parameters)}
    gradients = torch.autograd.grad(value, list(leaves.values()), create_graph=True, materialize_grads=True)
    spread = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    blocks.scatter(v, spread)
    along = sum((g * spread[name]).sum() for name, g in zip(leaves, gradients, strict=True))
    found = torch.autograd.grad(along, list(leaves.values()), materialize_grads=True)
    return blocks.gather(dict(zip(leaves, found, strict=True)))


def test_answers_have_the_hessian_of_the_models_own_loss(tmp_path):
    zoo.save("BertForQuestionAnswering", tmp_path / "model")
    subject = subject_of(request(tmp_path / "model"))
    v = normal(1)(sum(subject.blocks.sizes.values()))
    H = hessian(subject.model, subject.loss, [subject.batch], subject.blocks)
    parameters = dict(subject.model.named_parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = product_by_hand(own_loss(subject.model.model, subject.batch), subject.blocks, parameters, v)
    assert relative(H @ v, expected) < 1e-10
    assert "h.0.attn.Q" in subject.blocks


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_embeddings_find_the_text_that_follows(tmp_path, pooling):
    """Against the contrastive loss of in-batch negatives, written by hand, with the second texts held fixed."""
    saved(tmp_path / "model", "bert").bert.save_pretrained(tmp_path / "model")
    modes = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}
    (tmp_path / "model" / "1_Pooling").mkdir()
    settings = {f"pooling_mode_{mode}": name == pooling for name, mode in modes.items()}
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 8} | settings)
    )
    subject = subject_of(Request(str(tmp_path / "model"), 2, sequences=3, length=5, dtype="float64", task="embedding"))
    assert subject.facts["class"] == "BertModel" and subject.facts["data"]["pooling"] == pooling
    assert f"{pooling} of tokens" in subject.about[1] and "are constants" in subject.about[2]
    (inputs, labels), body = subject.batch, subject.model.model
    first, second = characters(corpus(), 30)[:30].view(3, 10).split(5, 1)

    def embedding(tokens):
        states = body(input_ids=tokens).last_hidden_state
        pooled = {"mean": states.mean(1), "first": states[:, 0], "last": states[:, -1]}[pooling]
        return normalize(pooled, dim=-1)

    assert labels.tolist() == [0, 1, 2] and torch.equal(inputs["input_ids"], first)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = cross_entropy(20 * embedding(first) @ embedding(second).detach().T, labels)
        v = normal(1)(sum(subject.blocks.sizes.values()))
        expected = product_by_hand(loss, subject.blocks, dict(subject.model.named_parameters()), v)
    H = hessian(subject.model, subject.loss, [subject.batch], subject.blocks)
    assert abs(H.loss - float(loss.detach())) < 1e-12
    assert relative(H @ v, expected) < 1e-10


# ---- other kinds of heads


@pytest.mark.parametrize("targets", ["random", "sampled", "file"])
@pytest.mark.parametrize(
    "problem, labels, form",
    [
        ("regression", 1, "Mean squared error of 1 numbers"),
        ("regression", 3, "Mean squared error of 3 numbers"),
        ("multi_label_classification", 3, "Binary cross-entropy of 3 labels"),
    ],
)
def test_heads_that_are_no_classifiers_of_one_class(tmp_path, problem, labels, form, targets):
    model = zoo.save("BertForSequenceClassification", tmp_path / "model", problem_type=problem, num_labels=labels)
    if targets == "file":
        targets = str(tmp_path / "targets.txt")
        (tmp_path / "targets.txt").write_text("\n".join([" ".join(["1"] * labels), " ".join(["0"] * labels)]))
    subject = subject_of(request(tmp_path / "model", targets=targets))
    assert subject.about[1].startswith(form)
    batch = subject.batch | {"labels": subject.batch["labels"].double()}
    expected = float(own_loss(model.double(), batch | {"labels": batch["labels"].squeeze()}).detach())
    assert abs(hessian(subject.model, subject.loss, [subject.batch]).loss - expected) < 1e-5


def test_a_decoder_with_a_classifier_reads_its_last_token(tmp_path):
    """It needs a padding token as soon as there are two sequences; none of these tokens is one."""
    transformers.utils.logging.disable_progress_bar()
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=16, vocab_size=40, num_labels=3)
    model = transformers.GPT2ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    subject = subject_of(request(tmp_path / "model"))
    states = model.double().transformer(subject.batch["input_ids"]).last_hidden_state
    expected = float(cross_entropy(model.score(states)[:, -1], subject.batch["labels"]).detach())
    assert abs(hessian(subject.model, subject.loss, [subject.batch]).loss - expected) < 1e-9


# ---- targets


def test_targets_of_a_file(tmp_path):
    zoo.save("RobertaForTokenClassification", tmp_path / "model")
    file = tmp_path / "targets.txt"
    file.write_text("0 1 2 0 1 2\n\n2 2 2 0 0 0\n1 1 1 1 1 1\n")
    subject = subject_of(request(tmp_path / "model", targets=str(file)))
    assert subject.batch["labels"].tolist() == [[0, 1, 2, 0, 1, 2], [2, 2, 2, 0, 0, 0]]
    assert subject.about[-1] == f"Targets are those of {file}."
    for content, error, message in (
        ("0 1 2 0 1 2", ShapeError, r"has 1 lines of 6 numbers, expected 2 lines of 6"),
        ("0 1\n1 0", ShapeError, r"has 2 lines of 2 numbers, expected 2 lines of 6"),
        ("0 1 2 0 1 3\n0 0 0 0 0 0", RangeError, "got 3, expected classes from 0 to 2"),
        ("0 1 2 0 1 x\n0 0 0 0 0 0", RangeError, "something other than numbers"),
    ):
        file.write_text(content)
        with pytest.raises(error, match=f"^targets: .*{message}"):
            subject_of(request(tmp_path / "model", targets=str(file)))


def test_what_an_encoder_decoder_is_to_write(tmp_path):
    """The decoder is to write the text of the file, which it reads as in training; before other targets it reads what
    it read without them."""
    zoo.save("BartForConditionalGeneration", tmp_path / "model")
    (tmp_path / "targets.txt").write_text("eeeeee tttttt")
    plain = subject_of(request(tmp_path / "model"))
    subject = subject_of(request(tmp_path / "model", targets=str(tmp_path / "targets.txt")))
    assert torch.equal(subject.batch["input_ids"], plain.batch["input_ids"])
    assert set(subject.batch) == {"input_ids", "labels"}
    drawn = subject_of(request(tmp_path / "model", targets="sampled")).batch
    assert drawn["decoder_input_ids"][:, 1:].tolist() == plain.batch["labels"][:, :-1].tolist()
    assert len(subject.batch["labels"].unique()) == 3 and subject.batch["labels"].shape == (2, 6)
    (tmp_path / "targets.txt").write_text("short")
    with pytest.raises(TextError, match=r"^targets: .* has 5 tokens, expected 12"):
        subject_of(request(tmp_path / "model", targets=str(tmp_path / "targets.txt")))


def test_sampled_targets_follow_the_predictions(tmp_path):
    """A model that is sure of its class draws that class alone; of hidden tokens only the hidden ones are drawn."""
    model = zoo.save("BertForSequenceClassification", tmp_path / "model")
    model.classifier.bias.data = torch.tensor([0.0, 100.0, 0.0])
    model.save_pretrained(tmp_path / "model")
    assert subject_of(request(tmp_path / "model", targets="sampled")).batch["labels"].tolist() == [1, 1]
    saved(tmp_path / "masked", "bert")
    plain, drawn = (subject_of(request(tmp_path / "masked", targets=one)).batch for one in (None, "sampled"))
    assert torch.equal(plain["input_ids"], drawn["input_ids"])
    assert torch.equal(plain["labels"] == -100, drawn["labels"] == -100)


# ---- which class is loaded


def test_a_class_that_the_folder_was_not_saved_from_is_said(tmp_path):
    saved(tmp_path / "tied").transformer.save_pretrained(tmp_path / "tied")
    subject = subject_of(request(tmp_path / "tied"))
    assert "The folder was saved from GPT2Model; it is read as GPT2LMHeadModel." in subject.about
    assert subject.facts["saved_from"] == ["GPT2Model"]
    saved(tmp_path / "masked", "bert")
    subject = subject_of(request(tmp_path / "masked", task="embedding"))
    assert "The folder was saved from BertForMaskedLM; it is read as BertModel." in subject.about
    assert any("Not used" in line and "cls.predictions" in line for line in subject.about)


def test_a_body_without_a_head_names_what_to_give(tmp_path):
    saved(tmp_path, "bert").bert.save_pretrained(tmp_path)
    with pytest.raises(
        MissingWeightsError, match=r"was saved from BertModel; --task embedding reads it without a head"
    ):
        subject_of(request(tmp_path))
    with pytest.raises(MissingWeightsError, match=r"random in BertForQuestionAnswering, and .* saved from BertModel$"):
        subject_of(request(tmp_path, task="question-answering"))


def test_a_task_that_a_family_has_not(tmp_path):
    saved(tmp_path, "vit")
    with pytest.raises(UnknownArchitectureError, match=r"^task: got seq2seq.*'vit'.*it has image-classification"):
        subject_of(request(tmp_path, "ViTForImageClassification", task="seq2seq"))
    with pytest.raises(UnknownArchitectureError, match="embedding is for models of text; ViTModel reads none"):
        subject_of(request(tmp_path, "ViTForImageClassification", task="embedding"))


@pytest.mark.parametrize("name", ["gpt2-tiny", "addition"])
def test_a_model_by_name_has_its_task(name):
    with pytest.raises(RangeError, match=f"task: got masked, but {name}"):
        subject_of(Request(name, 0, task="masked"))
    with pytest.raises(CurvoscopeError, match="task: got 'nothing', expected one of 'seq2seq'"):
        Request(name, 0, task="nothing")


# ---- from end to end, both ways

WAYS = {"products": ["--matvecs", "2"], "sweep": ["--parts", "outer", "--fast", "--tolerance", "0.5"]}
QUICK = {("BertForQuestionAnswering", "products"), ("BertForQuestionAnswering", "sweep"), ("BertModel", "sweep")}
RUNS = [(name, way) for name in (*TASKS, "BertModel") for way in WAYS]


@pytest.mark.parametrize(
    ("name", "way"), [run if run in QUICK else pytest.param(*run, marks=pytest.mark.slow) for run in RUNS]
)
def test_from_end_to_end(call, undrawn, tmp_path, name, way):
    zoo.save(name, tmp_path / "model")
    length = LENGTHS.get(name, 6)
    options = ["--sequences", "2", *([] if length is None else ["--length", length]), *WAYS[way]]
    options += ["--blocks", "*h.0.attn.[QV]"]
    options += ["--task", "embedding"] if name == "BertModel" else []
    code, stdout, stderr = call("analyze", tmp_path / "model", *options, "--out", tmp_path / "out", "--json")
    assert (code, stderr) == (0, "")
    found = json.loads(stdout)
    assert found["model"]["class"] == name and {"h.0.attn.Q", "encoder.h.0.attn.Q"} & {
        r["block"] for r in found["rows"]
    }
