"""Small random models of Hugging Face's families, saved as folders."""

import pytest
import torch

SIZES = {
    "gpt2": {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 40},
    "llama": {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 12,
        "vocab_size": 300,
        "max_position_embeddings": 32,
    },
    "bert": {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "vocab_size": 30,
        "max_position_embeddings": 16,
    },
    "vit": {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": 3,
    },
}
CLASSES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "bert": ("BertForMaskedLM", "BertConfig"),
    "vit": ("ViTForImageClassification", "ViTConfig"),
}


def make(family, **options):
    """A model in float32, in evaluation mode."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    model, config = (getattr(transformers, name) for name in CLASSES[family])
    ends = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return model(config(**{**SIZES[family], **ends, **options})).eval()


def saved(folder, family="gpt2", shards=None, **options):
    """The folder, with the model in it; the model."""
    model = make(family, **options)
    model.save_pretrained(folder, **({} if shards is None else {"max_shard_size": shards}))
    return model


def characters(text, vocabulary):
    """The most frequent characters as tokens, all others as the last one: by hand."""
    order = sorted(set(text), key=lambda c: (-text.count(c), c))[: vocabulary - 1]
    return torch.tensor([order.index(c) if c in order else vocabulary - 1 for c in text])
