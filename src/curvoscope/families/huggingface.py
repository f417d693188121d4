"""Where the models of Hugging Face's transformers keep their blocks. Nothing here imports them."""

from collections.abc import Sequence

from torch import nn

from curvoscope.families.assembly import HEADS, Family, number_of, paths
from curvoscope.families.wiring import holds_in_order


def _fused_in_order(modules: Sequence[nn.Module]) -> bool:
    """Whether c_attn has all of Q, then K, then V: transformers' own classes with a Conv1D do, others such as nanoGPT's
    are tried."""
    owner = next((module for module in modules if {"c_attn", "c_proj"} <= set(module._modules)), None)
    if owner is None:
        return False
    if type(owner).__module__.startswith("transformers."):
        return type(modules[0]).__name__ == "Conv1D"
    heads, width = number_of(modules, HEADS), min(modules[0].get_parameter("weight").shape)
    return heads is not None and width % heads == 0 and holds_in_order(owner, "c_attn", "c_proj", width, heads)


GPT2 = Family(
    paths(
        norm1="ln_1",
        attn_QKV="attn.c_attn",
        attn_O="attn.c_proj",
        norm2="ln_2",
        mlp_up="mlp.c_fc",
        mlp_down="mlp.c_proj",
    ),
    paths(embed="wte", positions="wpe", final_norm="ln_f", unembed="lm_head"),
    accepts=_fused_in_order,
)

LLAMA = Family(
    paths(
        norm1="input_layernorm",
        attn_Q="self_attn.q_proj",
        attn_K="self_attn.k_proj",
        attn_V="self_attn.v_proj",
        attn_O="self_attn.o_proj",
        norm1_post="post_attention_layernorm post_self_attn_layernorm",
        norm2="pre_feedforward_layernorm post_attention_layernorm",  # Gemma has both: the first stands before the MLP
        norm2_post="post_feedforward_layernorm post_mlp_layernorm",
        mlp_gate="mlp.gate_proj",
        mlp_up="mlp.up_proj",
        mlp_down="mlp.down_proj",
    ),
    paths(embed="embed_tokens", final_norm="norm", unembed="lm_head"),
)

BERT = Family(
    paths(
        attn_Q="attention.self.query",
        attn_K="attention.self.key",
        attn_V="attention.self.value",
        attn_O="attention.output.dense",
        norm1="attention.output.LayerNorm",
        mlp_up="intermediate.dense",
        mlp_down="output.dense",
        norm2="output.LayerNorm",
    ),
    paths(
        embed="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        embed_norm="embeddings.LayerNorm",
        unembed="cls.predictions.decoder",
        b_unembed="cls.predictions.bias",
    ),
)

VIT = Family(  # the second path of each is that of transformers before version 5
    paths(
        norm1="layernorm_before",
        attn_Q="attention.q_proj attention.attention.query",
        attn_K="attention.k_proj attention.attention.key",
        attn_V="attention.v_proj attention.attention.value",
        attn_O="attention.o_proj attention.output.dense",
        norm2="layernorm_after",
        mlp_up="mlp.fc1 intermediate.dense",
        mlp_down="mlp.fc2 output.dense",
    ),
    paths(positions="embeddings.position_embeddings", final_norm="layernorm"),
)

FAMILIES = (GPT2, LLAMA, BERT, VIT)
