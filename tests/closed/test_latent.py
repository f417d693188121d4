"""Latent attention, as DeepSeek has it, in closed form against autodiff."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from adapter_cases import assert_parts
from family_cases import shaken

SIZES = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 6, "kv_lora_rank": 3, "qk_rope_head_dim": 2, "qk_nope_head_dim": 3, "v_head_dim": 3}


def deepseek(**options):
    """Its norms compute in float32; torch's own take their places."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**SIZES, **options, attn_implementation="sdpa")
    model = transformers.DeepseekV3ForCausalLM(config)
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape[0], module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(path, norm)
    words = torch.randint(1, 11, (2, 4), generator=torch.Generator().manual_seed(3))
    return shaken(model), [{"input_ids": words, "labels": words.flip(0)}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_hidden_layers": 2, "first_k_dense_replace": 2, "q_lora_rank": 3},
        {"num_hidden_layers": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "rope_interleave": False},
    ],
    ids=["two layers", "queries from the stream"],
)
def test_every_block(options):
    model, data = deepseek(**options)
    whole = cv.blocks_of(model, data[0])
    for blocks in (whole.select("*.attn.[QKVO]"), whole.select("h.0.attn.[QKVO]").per_head()):
        H, R = (cv.hessian(model, None, data, blocks, method=method) for method in ("exact", "autodiff"))
        assert_parts(H, R)


@pytest.mark.slow
def test_what_makes_the_latent_vectors():
    model, data = deepseek(num_hidden_layers=1, first_k_dense_replace=1, q_lora_rank=3)
    H = cv.hessian(model, None, data, cv.blocks_of(model, data[0]).select("*latent*"))
    for name in H.names:
        assert H.method_of(name) == "autodiff" and "latent vectors" in H.plan[name, "outer"].reason
