"""
A Hugging Face model with error bars
====================================

Compute the norms of both parts of every block of a Llama. Attention and feed-forward blocks have closed forms; the
norms of embeddings and norm layers are estimated from products, with standard errors.
"""

# %%
# The model has two layers with grouped keys and random weights; use a model of your own instead.
import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import curvoscope as cv

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=32,
    bos_token_id=0,
    eos_token_id=0,
    initializer_range=0.2,
)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(64, (4, 16))
H = cv.hessian(model, None, [{"input_ids": tokens, "labels": tokens}])

# %%
# Exact numbers print with all digits, estimates with their standard error.
outer = {name: H.outer[name].frobenius_norm() for name in H.names}
functional = {name: H.functional[name].frobenius_norm() for name in H.names}
for name in ("embed", "h.0.attn.Q"):
    print(f"{name}: outer {outer[name]}, by {H.method_of(name)}")

# %%
figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
for shift, (part, norms) in zip((-0.12, 0.12), {"outer": outer, "functional": functional}.items(), strict=True):
    errors = [getattr(norm, "stderr", 0.0) for norm in norms.values()]
    places = [i + shift for i in range(len(norms))]
    axes.errorbar(places, [float(norm) for norm in norms.values()], errors, fmt="o", markersize=4, label=part)
axes.set_yscale("log")
axes.set_xticks(range(len(H.names)), H.names, rotation=60, ha="right")
axes.set_ylabel("Frobenius norm")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
