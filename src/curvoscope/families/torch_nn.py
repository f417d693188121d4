"""Where torch's own modules keep their blocks: nn.TransformerEncoder, its layers, nn.MultiheadAttention."""

from collections.abc import Sequence

from torch import nn

from curvoscope.families.assembly import Family, paths


def _is_attention(modules: Sequence[nn.Module]) -> bool:
    return isinstance(modules[0], nn.MultiheadAttention)


def _is_encoder_layer(modules: Sequence[nn.Module]) -> bool:
    """A decoder layer has one norm and one attention more: its attentions are named, one by one."""
    return _is_attention(modules) and not isinstance(modules[1], nn.TransformerDecoderLayer)


ENCODER = Family(
    paths(
        norm1="norm1",
        attn_QKV="self_attn.in_proj",
        attn_Q="self_attn.q_proj",
        attn_K="self_attn.k_proj",
        attn_V="self_attn.v_proj",
        attn_O="self_attn.out_proj",
        norm2="norm2",
        mlp_up="linear1",
        mlp_down="linear2",
    ),
    paths(final_norm="norm"),
    beside=True,
    accepts=_is_encoder_layer,
)

ATTENTION = Family(
    paths(attn_QKV="in_proj", attn_Q="q_proj", attn_K="k_proj", attn_V="v_proj", attn_O="out_proj"),
    paths(),
    accepts=_is_attention,
)

FAMILIES = (ENCODER, ATTENTION)
