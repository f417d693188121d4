"""The loss that a Hugging Face model has for its labels is the one that is differentiated."""

import pytest
import torch
from torch.nn import functional as f

import curvoscope as cv
import zoo
from curvoscope.curvature import BatchError, CrossEntropy, trainable
from curvoscope.errors import LossError
from reference import normal, relative

ENCODER_DECODERS = [
    "BartForConditionalGeneration",
    "T5ForConditionalGeneration",
    "MarianMTModel",
    "WhisperForConditionalGeneration",
]


def own(model, batch):
    return model(**batch).loss


def by_hand(model, batch, v, blocks):
    """The Hessian of the model's own loss times v, by differentiating it twice."""
    parameters = dict(model.named_parameters())
    names = sorted(blocks.parameters)
    leaves = [parameters[name] for name in names]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradients = torch.autograd.grad(own(model, batch), leaves, create_graph=True, materialize_grads=True)
    spread = {name: torch.zeros_like(parameters[name])[None] for name in names}
    blocks.scatter(v[None], spread)
    along = sum((g * spread[name][0]).sum() for name, g in zip(names, gradients, strict=True))
    found = torch.autograd.grad(along, leaves, materialize_grads=True)
    return blocks.gather(dict(zip(names, found, strict=True)))


def labelled(name):
    model, loss, (batch,) = zoo.build(name)
    assert loss is None
    return model, batch


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders_decode_their_labels(name):
    """Labels once went to the loss alone, and BART decoded its shifted inputs."""
    model, batch = labelled(name)
    H = cv.hessian(model, None, [batch])
    assert H.loss == pytest.approx(own(model, batch).item(), rel=1e-12)
    v = normal(1)(H.shape[0])
    expected = by_hand(model, batch, v, trainable(model, cv.blocks_of(model)))
    assert relative(H @ v, expected) < 1e-10
    assert relative(cv.hessian(model, None, [batch], micro_batch=1) @ v, expected) < 1e-10
    explicit = cv.hessian(model, CrossEntropy(), [batch])
    assert relative(explicit @ v, expected) < 1e-10


def test_decoder_inputs_that_are_given_are_used():
    model, batch = labelled("BartForConditionalGeneration")
    given = {**batch, "decoder_input_ids": batch["labels"].clamp_min(0).flip(1)}
    H = cv.hessian(model, None, [given])
    assert H.loss == pytest.approx(own(model, given).item(), rel=1e-12)
    assert abs(H.loss - own(model, batch).item()) > 1e-6


@pytest.mark.parametrize("name", [name for name in ENCODER_DECODERS if not name.startswith("Bart")])
def test_decoder_inputs_that_are_missing_are_asked_for(name):
    model, batch = labelled(name)
    labels = batch.pop("labels")
    with pytest.raises(BatchError, match=r"needs decoder_input_ids.*'labels'"):
        cv.hessian(model, CrossEntropy(), [(batch, labels)])


@pytest.mark.parametrize(
    "kind, labels",
    [
        ("regression", lambda: normal(3)(2)),
        ("single_label_classification", lambda: torch.tensor([2, 0])),
        ("multi_label_classification", lambda: torch.tensor([[1.0, 0, 1], [0, 1, 1]]).double()),
    ],
)
def test_heads_of_classifiers(kind, labels):
    outputs = 1 if kind == "regression" else zoo.CLASSES
    model = zoo.hugging_face("BertForSequenceClassification", problem_type=kind, num_labels=outputs)
    batch = zoo.batch("class of a text") | {"labels": labels()}
    H = cv.hessian(model, None, [batch])
    assert H.loss == pytest.approx(own(model, batch).item(), rel=1e-6)  # its norms and softmaxes are in float32
    v = normal(1)(H.shape[0])
    cut = cv.hessian(model, None, [batch], micro_batch=1)
    assert relative(cut @ v, H @ v) < 1e-5
    functions = {
        "regression": lambda o, t: f.mse_loss(o.logits.squeeze(), t),
        "single_label_classification": lambda o, t: f.cross_entropy(o.logits, t),
        "multi_label_classification": lambda o, t: f.binary_cross_entropy_with_logits(o.logits, t),
    }
    assert relative(cv.hessian(model, functions[kind], [batch]) @ v, H @ v) < 1e-10


def test_a_loss_that_is_not_known_is_refused():
    model, batch = labelled("Wav2Vec2ForCTC")
    with pytest.raises(LossError, match=r"not a known one.*loss_fn\(outputs, labels\)"):
        cv.hessian(model, None, [batch])
