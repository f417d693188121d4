"""Where TransformerLens' models keep their blocks. Nothing here imports them.

Up to version 3, HookedTransformer has one tensor with an axis of heads for each weight. Since then TransformerBridge
keeps the weights of the model it wraps: most are found under that model's own paths, these are the others.
"""

from collections.abc import Sequence

from torch import nn

from curvoscope.families.assembly import Family, paths


def _has_axis_of_heads(modules: Sequence[nn.Module]) -> bool:
    return modules[0].get_parameter("W_Q").ndim == 3


def _is_bridge(modules: Sequence[nn.Module]) -> bool:
    return any(type(module).__module__.startswith("transformer_lens.") for module in modules)


HOOKED = Family(
    paths(
        norm1="ln1",
        attn_Q="attn.W_Q",
        attn_K="attn.W_K attn._W_K",  # with an underscore: heads that share keys and values
        attn_V="attn.W_V attn._W_V",
        attn_O="attn.W_O",
        attn_b_Q="attn.b_Q",
        attn_b_K="attn.b_K attn._b_K",
        attn_b_V="attn.b_V attn._b_V",
        attn_b_O="attn.b_O",
        norm2="ln2",
        mlp_gate="mlp.W_gate",
        mlp_up="mlp.W_in",
        mlp_down="mlp.W_out",
        mlp_b_up="mlp.b_in",
        mlp_b_down="mlp.b_out",
    ),
    paths(
        embed="embed.W_E",
        positions="pos_embed.W_pos",
        final_norm="ln_final",
        unembed="unembed.W_U",
        b_unembed="unembed.b_U",
    ),
    accepts=_has_axis_of_heads,
)

BRIDGE = Family(  # GPT-2, and the models that TransformerLens builds itself
    paths(
        norm1="ln_1 ln1",
        attn_Q="attn.q",
        attn_K="attn.k",
        attn_V="attn.v",
        attn_O="attn.o",
        norm2="ln_2 ln2",
        mlp_gate="mlp.gate",
        mlp_up="mlp.c_fc mlp.fc_in mlp.in",
        mlp_down="mlp.c_proj mlp.fc_out mlp.out",
    ),
    paths(embed="wte tok_embed", positions="wpe pos", final_norm="ln_f ln_out", unembed="lm_head head"),
    accepts=_is_bridge,
)

FAMILIES = (HOOKED, BRIDGE)
