"""Where layers that mix tokens by a recurrence keep their blocks: state spaces (Mamba), RWKV, gated linear recurrences.

The order in which a fused weight holds its parts is that of the published models; widths follow from the shapes of the
other parts, and a layer whose widths do not add up is not named.
"""

from collections.abc import Sequence

from curvoscope.families.assembly import Family, Shapes, paths


def _below(*parts: str) -> str:
    """Paths of a part in the modules that hold a state space."""
    return " ".join(f"{module}.{part}" for part in parts for module in ("mixer", "mamba"))


_AROUND = paths(embed="embeddings embed_tokens", final_norm="norm_f norm final_layernorm", unembed="lm_head")
_SHARED = {
    "mixer_conv": _below("conv1d"),
    "mixer_A": _below("A_log"),
    "mixer_D": _below("D"),
    "mixer_out": _below("out_proj"),
    "norm1": "norm input_layernorm",
}


def _input_and_gate(shape: Shapes) -> Sequence[tuple[str, int]]:
    inner = shape("mixer.out")[0]
    return ("in", inner), ("gate", inner)


def _selection(shape: Shapes) -> Sequence[tuple[str, int]]:
    """What the step delta, B and C are made of."""
    rank = shape("mixer.delta")[0]
    states = (shape("mixer.selection")[1] - rank) // 2
    return ("delta_in", rank), ("B", states), ("C", states)


def _everything(shape: Shapes) -> Sequence[tuple[str, int]]:
    inner, heads = shape("mixer.out")[0], shape("mixer.A")[1]
    states = (shape("mixer.all")[1] - 2 * inner - heads) // 2
    return ("gate", inner), ("in", inner), ("B", states), ("C", states), ("delta", heads)


MAMBA = Family(
    paths(
        mixer_all=_below("in_proj"),
        mixer_selection=_below("x_proj"),
        mixer_delta=_below("dt_proj"),
        mixer_delta_norm=_below("dt_layernorm"),
        mixer_B_norm=_below("b_layernorm"),
        mixer_C_norm=_below("c_layernorm"),
        **_SHARED,
    ),
    _AROUND,
    needs=("mixer.A", "mixer.D", "mixer.all", "mixer.selection", "mixer.delta", "mixer.conv", "mixer.out"),
    fused={"mixer.all": _input_and_gate, "mixer.selection": _selection},
)

MAMBA2 = Family(
    paths(mixer_all=_below("in_proj"), mixer_b_delta=_below("dt_bias"), mixer_norm=_below("norm"), **_SHARED),
    _AROUND,
    needs=("mixer.A", "mixer.D", "mixer.all", "mixer.b_delta", "mixer.conv", "mixer.out"),
    fused={"mixer.all": _everything},
)

RWKV = Family(
    paths(
        norm1="ln1",
        mixer_R="attention.receptance",
        mixer_K="attention.key",
        mixer_V="attention.value",
        mixer_shift_R="attention.time_mix_receptance",
        mixer_shift_K="attention.time_mix_key",
        mixer_shift_V="attention.time_mix_value",
        mixer_decay="attention.time_decay",
        mixer_bonus="attention.time_first",
        mixer_out="attention.output",
        norm2="ln2",
        channel_R="feed_forward.receptance",
        channel_up="feed_forward.key",
        channel_down="feed_forward.value",
        channel_shift_R="feed_forward.time_mix_receptance",
        channel_shift_K="feed_forward.time_mix_key",
    ),
    paths(embed="embeddings", embed_norm="blocks.0.pre_ln", final_norm="ln_out", unembed="head"),
    needs=("mixer.R", "mixer.K", "mixer.V", "mixer.decay", "mixer.bonus", "mixer.out"),
)

GATED = Family(  # Griffin's, in RecurrentGemma
    paths(
        norm1="temporal_pre_norm",
        mixer_in="temporal_block.linear_x",
        mixer_gate="temporal_block.linear_y",
        mixer_conv="temporal_block.conv_1d",
        mixer_A="temporal_block.rg_lru.recurrent_param",
        mixer_input_gate="temporal_block.rg_lru.input_gate",
        mixer_recurrent_gate="temporal_block.rg_lru.recurrent_gate",
        mixer_out="temporal_block.linear_out",
        norm2="channel_pre_norm",
        mlp_gate="mlp_block.gate_proj",
        mlp_up="mlp_block.up_proj",
        mlp_down="mlp_block.down_proj",
    ),
    paths(embed="embed_tokens", final_norm="final_norm", unembed="lm_head"),
    needs=("mixer.A", "mixer.in", "mixer.gate", "mixer.conv", "mixer.input_gate", "mixer.recurrent_gate", "mixer.out"),
)

FAMILIES = (MAMBA, MAMBA2, RWKV, GATED)
