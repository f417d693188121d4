"""`blocks_of`: the named parameter blocks of any torch model."""

from collections.abc import Sequence

from torch import nn

from curvoscope.blocks import Blocks
from curvoscope.models import gpt2_block, huggingface, torch_nn, transformer_lens
from curvoscope.models.assembly import Family, assemble, paths


def _is_own(modules: Sequence[nn.Module]) -> bool:
    return isinstance(modules[0], gpt2_block.Block)


_OWN = Family(
    paths(
        norm1="norm1",
        attn_Q="W_Q",
        attn_K="W_K",
        attn_V="W_V",
        attn_O="W_O",
        attn_b_Q="b_Q",
        attn_b_K="b_K",
        attn_b_V="b_V",
        attn_b_O="b_O",
        norm2="norm2",
        mlp_up="W_up",
        mlp_down="W_down",
        mlp_b_up="b_up",
        mlp_b_down="b_down",
    ),
    paths(embed="W_E", positions="W_pos", final_norm="norm", unembed="W_U", b_unembed="b_U"),
    accepts=_is_own,
    heads=1,
)

_FAMILIES = (_OWN, *transformer_lens.FAMILIES, *huggingface.FAMILIES, *torch_nn.FAMILIES)


def blocks_of(model: nn.Module) -> Blocks:
    """The blocks of a model, by name: "h.0.attn.Q" is the query weight of layer 0, (d, heads*d_k) as in `X @ W`.

    A layer has "attn.Q", "attn.K", "attn.V", "attn.O", "mlp.up", "mlp.down" (and "mlp.gate"), their biases "attn.b_Q",
    ..., "mlp.b_up", ..., each with one row, and norms, gamma above beta: "norm1" and "norm2" before attention and MLP
    (behind them and the sum with the stream, if nothing is normalised before), "norm1_post" and "norm2_post" of their
    outputs. Around the layers stand "embed" (a row for each token), "positions", "embed_norm", "final_norm", "unembed"
    and "b_unembed". An unembedding tied to the embedding is the block "embed", which says so in `tied`. Two stacks of
    layers have the names of their modules in front: "encoder.h.0.attn.Q"; what stands around both has none.

    Known are GPT-2, Llama, BERT and ViT of Hugging Face and whatever has their parameter names, nn.TransformerEncoder
    and nn.MultiheadAttention, TransformerLens, and this package's models, also inside other modules. Where names alone
    do not tell, the module is looked at: its `forward` for the places of norms, a run on random numbers for the order
    in a fused weight. Every other parameter is a block under its own name, as it is stored: a vector is one row, more
    axes are (first, rest).
    """
    return assemble(model, _FAMILIES)
