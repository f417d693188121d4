"""Heads that are not classifiers, read as such: their outputs become logits, with cross-entropy as the loss."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from curvoscope.errors import RangeError

MEAN, FIRST, LAST = "mean", "first", "last"
SCALE = 20.0  # of cosines, as sentence-transformers has it
_POOLING = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": FIRST, "pooling_mode_lasttoken": LAST}


class SpanScores(nn.Module):
    """Question answering: the logits (N, 2, L) of the first and of the last token of the answer.

    Their cross-entropy with (first, last), the mean over 2 N terms, is the loss that transformers' models have.

    Args:
        model: its outputs have `start_logits` and `end_logits`, (N, L) each.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        """The logits."""
        outputs = self.model(**inputs)
        return torch.stack([outputs.start_logits, outputs.end_logits], 1)


class EmbeddingScores(nn.Module):
    """Embeddings: how near each text is to each of K known ones, 20 cos(e_n, k_j), as logits (N, K).

    With the target n for text n their cross-entropy is the contrastive loss that sentence embeddings are trained with
    (in-batch negatives), its second text held fixed: rows of a batch do not meet.

    Args:
        model: its outputs have `last_hidden_state`, (N, L, d).
        keys: embeddings of the known texts, (K, d); constants.
        pooling: how states become one embedding: "mean", "first" or "last" token.
    """

    def __init__(self, model: nn.Module, keys: Tensor, pooling: str = MEAN) -> None:
        super().__init__()
        self.model, self.pooling = model, pooling
        self.register_buffer("keys", normalize(keys.detach(), dim=-1), persistent=False)

    def forward(self, **inputs: Any) -> Tensor:
        """The logits."""
        embeddings = normalize(embedded(self.model, inputs, self.pooling), dim=-1)
        found: Tensor = SCALE * embeddings @ self.get_buffer("keys").T
        return found


def embedded(model: nn.Module, inputs: dict[str, Any], pooling: str) -> Tensor:
    """The embeddings (N, d) of texts of equal length, without padding."""
    states: Tensor = model(**inputs).last_hidden_state
    return {MEAN: states.mean(1), FIRST: states[:, 0], LAST: states[:, -1]}[pooling]


def pooling_of(folder: Path) -> str:
    """How a folder of sentence-transformers pools its tokens; the mean if it does not say."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return MEAN
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        asked = [key for key, value in found.items() if key.startswith("pooling_mode_") and value]
    except (ValueError, AttributeError) as error:
        raise RangeError("model", f"{file} is not a pooling configuration: {error}") from error
    if len(asked) != 1 or asked[0] not in _POOLING:
        raise RangeError(
            "model", f"{file} asks for {', '.join(asked) or 'no pooling'}; expected one of {', '.join(_POOLING)}"
        )
    return _POOLING[asked[0]]
