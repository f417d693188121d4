"""Models by name: small ones of each family and GPT-2 in its real size, with random weights from a seed."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from curvoscope.errors import RangeError
from curvoscope.families.loading import Loaded, transformers
from curvoscope.families.model_folders import NotAModelError
from curvoscope.families.tasks import ModelTask


@dataclass(frozen=True)
class Config:
    """A model that can be made from a seed: what it is, and the arguments of transformers' classes."""

    about: str
    task: ModelTask
    model: str
    config: str
    options: Mapping[str, Any]


# A deviation of 0.1 at width 32 gives the pre-activations that the usual 0.02 gives at width 768.
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.1}

CONFIGS: dict[str, Config] = {
    "gpt2-tiny": Config(
        "GPT-2, 2 layers, width 32, bytes",
        ModelTask.CAUSAL,
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 128, "vocab_size": 256, "initializer_range": 0.1},
    ),
    "gpt2-small": Config(
        "GPT-2 with its 124 million parameters",
        ModelTask.CAUSAL,
        "GPT2LMHeadModel",
        "GPT2Config",
        {},
    ),
    "llama-tiny": Config(
        "Llama, 2 layers, width 32, two key heads, bytes",
        ModelTask.CAUSAL,
        "LlamaForCausalLM",
        "LlamaConfig",
        _SMALL | {"intermediate_size": 88, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128},
    ),
    "bert-tiny": Config(
        "BERT, 2 layers, width 32, bytes and a mask",
        ModelTask.MASKED,
        "BertForMaskedLM",
        "BertConfig",
        _SMALL | _NO_DROPOUT | {"intermediate_size": 128, "vocab_size": 257, "max_position_embeddings": 128},
    ),
    "vit-tiny": Config(
        "ViT, 2 layers, width 32, 16 x 16 pixels, 10 classes",
        ModelTask.IMAGE_CLASSIFICATION,
        "ViTForImageClassification",
        "ViTConfig",
        _SMALL | _NO_DROPOUT | {"intermediate_size": 128, "image_size": 16, "patch_size": 4, "num_labels": 10},
    ),
}

NAMES = tuple(CONFIGS)


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, others: tuple[str, ...] = ()) -> Loaded:
    """The model of that name with random weights, in evaluation mode.

    Weights are drawn in float32, as transformers does, and then converted. torch's global generator is left as it was.
    `others` are names that the caller knows, for the error message.
    """
    if not 0 <= seed < 2**32:
        raise RangeError("seed", f"got {seed}, expected 0 to 2**32 - 1")
    if name not in CONFIGS:
        known = (*others, *NAMES)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise NotAModelError("model", f"{name!r} is not a folder and none of {', '.join(known)}{hint}")
    chosen = CONFIGS[name]
    package = transformers()
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    build: Callable[..., nn.Module] = getattr(package, chosen.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(getattr(package, chosen.config)(**chosen.options, **ends))
    return Loaded(model.to(dtype).eval(), chosen.task)
