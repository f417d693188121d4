"""Layers that hold their weights as parameters of their own, W_Q (d, heads*d_k) to W_down, as in `X @ W`.

The networks of the papers are written so. They are recognised by their parameters, not by their class.
"""

from collections.abc import Sequence

from torch import nn

from curvoscope.families.assembly import Family, paths

_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "W_up", "W_down")


def is_direct(module: nn.Module) -> bool:
    """Whether all weights of a layer are matrices of this module, between the modules `norm1` and `norm2`."""
    weights = [module._parameters.get(name) for name in _WEIGHTS]
    return all(weight is not None and weight.ndim == 2 for weight in weights) and {"norm1", "norm2"} <= set(
        module._modules
    )


def _accepts(modules: Sequence[nn.Module]) -> bool:
    return is_direct(modules[0])


FAMILIES = (
    Family(
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
        accepts=_accepts,
        heads=1,
    ),
)
