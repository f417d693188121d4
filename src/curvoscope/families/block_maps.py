"""`blocks_of`: the named parameter blocks of any torch model."""

from typing import Any

from torch import nn

from curvoscope import checks
from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError
from curvoscope.families import direct, huggingface, recurrences, torch_nn, transformer_lens
from curvoscope.families.adapters import adapters_of, with_adapters, without_adapters
from curvoscope.families.assembly import Assembly
from curvoscope.families.recognised import assemble_recognised
from curvoscope.families.recognition import Recognition
from curvoscope.families.tracing import traced

_FAMILIES = (
    *direct.FAMILIES,
    *transformer_lens.FAMILIES,
    *huggingface.FAMILIES,
    *torch_nn.FAMILIES,
    *recurrences.FAMILIES,
)


def blocks_of(model: nn.Module, batch: Any = None) -> Blocks:
    """The blocks of a model, by name: "h.0.attn.Q" is the query weight of layer 0, (d, heads*d_k) as in `X @ W`.

    A layer has "attn.Q", "attn.K", "attn.V", "attn.O", "mlp.up", "mlp.down" (and "mlp.gate"), their biases "attn.b_Q",
    ..., "mlp.b_up", ..., each with one row, and norms, gamma above beta: "norm1" and "norm2" before attention and MLP
    (in a post-norm model, after them and the residual sum), "norm1_post" and "norm2_post" of their outputs. Around the
    layers stand "embed" (a row for each token), "positions", "embed_norm", "final_norm", "unembed" and "b_unembed". An
    unembedding tied to the embedding is the block "embed", which says so in `tied`. Two stacks of
    layers have the names of their modules in front: "encoder.h.0.attn.Q"; what stands around both has none.

    Without a batch, it knows GPT-2, Llama, BERT and ViT of Hugging Face and all models with their parameter names,
    nn.TransformerEncoder and nn.MultiheadAttention, TransformerLens, and this package's models, also inside other
    modules. Where names alone do not tell, the module is looked at: its `forward` for the places of norms, a run on
    random numbers for the order in a fused weight.

    With a batch, names and classes do not matter: the model runs once, and the graph of that pass determines the roles.
    Vector-Jacobian products show which columns of a fused weight belong to which head, so a block may consist of
    several ranges of columns. This adds "attn.q_norm", "attn.k_norm", "attn.sinks", "attn.positions" (biases of the
    scores), "attn.scale" (LayerScale), "attn.Q_latent" and "attn.KV_latent" (weights in series), "cross.Q", ... with
    "norm_cross" (cross-attention), "mlp.router", "mlp.experts.0.up", "mlp.shared.up", and around the layers "patch",
    "cls", "token_types", "input.0", ..., "head.0", ... and "pool.attn.Q" (a head that pools by attention). A layer that
    runs several times is one. The graph takes the memory of a training step: a small batch is enough.

    An adapter is named after its weight: LoRA's x W + s x A B has "attn.Q.A" (d, r) and "attn.Q.B" (r, heads*d_k), with
    or without PEFT; on a fused weight "attn.QKV.A", "attn.Q.B", ...; DoRA adds "attn.Q.magnitude", IA3 has
    "attn.K.ia3". A quantised weight below an adapter is not a block.

    Layers that mix tokens by a recurrence are known by the names of their parameters, with a batch or without. The
    parts of a state space (Mamba, Mamba-2, also in Jamba) are named after its equations, h' = exp(delta A) h + delta B
    x and y = C h + D x: "mixer.in" (makes x), "mixer.conv", "mixer.gate", "mixer.B", "mixer.C", "mixer.delta_in" and
    "mixer.delta" (in series), "mixer.A" (its logarithm), "mixer.D", "mixer.out". RWKV has "mixer.R", "mixer.K",
    "mixer.V", "mixer.decay", "mixer.bonus" (of the own token), "mixer.shift_R", ... (what a weight reads of its own
    token rather than of the one before), "mixer.out", "channel.R", "channel.up" and "channel.down".

    Every other parameter is a block under its own name, as it is stored: a vector is one row, more axes are (first,
    rest). With a batch, `table()` says why.

    Args:
        model: any module.
        batch: (inputs, targets), a dict of inputs, with "labels" or without, or the inputs alone; None: by names.

    Returns:
        All parameters of the model as named blocks, each entry in one of them.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8)
        >>> cv.blocks_of(model).select("h.0.attn.[QKVO]").shapes
        {'h.0.attn.Q': (4, 4), 'h.0.attn.K': (4, 4), 'h.0.attn.V': (4, 4), 'h.0.attn.O': (4, 4)}
        >>> cv.blocks_of(torch.nn.Linear(3, 2)).names
        ['weight', 'bias']
        >>> X = torch.randn(2, 5, 4)
        >>> cv.blocks_of(model, X).names == cv.blocks_of(model).names
        True
    """
    checks.module(model)
    adapters = adapters_of(model)
    if batch is None:
        return with_adapters(Assembly(model, adapters).blocks(_FAMILIES), adapters)
    with without_adapters(model, adapters) as standing, traced(model, batch, standing) as flow:
        return assemble_recognised(model, Recognition(flow), adapters, recurrences.FAMILIES)


def trainable(model: nn.Module, blocks: Blocks) -> Blocks:
    """The blocks whose parameters are all trainable.

    Args:
        model: any module.
        blocks: its blocks, from `blocks_of(model)`.

    Returns:
        Those without a frozen parameter (`requires_grad` False), in the same order.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(3, 2)
        >>> _ = model.bias.requires_grad_(False)
        >>> cv.curvature.trainable(model, cv.blocks_of(model)).names
        ['weight']
    """
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    chosen = [b for b in blocks.values() if all(piece.parameter in free for piece in b.pieces)]
    if not chosen:
        raise EmptyError("model", "all its parameters are frozen; call requires_grad_(True) on some")
    return Blocks(chosen, blocks.whole)
