"""
Where the curvature of a Mamba block sits
=========================================

Train a Transformer and a state-space model of the same width and size on the same text, and compare the norms of the
Gauss-Newton part of their blocks.
"""

# %%
# One Transformer layer has about as many parameters as two Mamba layers. Both models read bytes of the package's text.
import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

import curvoscope as cv
from curvoscope.families.text import corpus, cut, encode

VOCABULARY, WIDTH, LENGTH = 48, 24, 24
tokens = encode(corpus(), VOCABULARY).tokens
shared = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
torch.manual_seed(0)
models = {
    "Transformer": LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, **shared)
    ),
    "Mamba": MambaForCausalLM(MambaConfig(num_hidden_layers=2, state_size=4, time_step_rank=2, **shared)),
}

# %%
# Train each of them for a while with Adam.
rows = cut(tokens, len(tokens) // LENGTH, LENGTH)
for name, model in models.items():
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(120):
        batch = rows[torch.randint(len(rows), (16,))]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    inside = sum(size for block, size in cv.blocks_of(model).sizes.items() if block.startswith("h."))
    print(f"{name}: {inside:,} parameters in layers, loss {float(loss):.2f}")

# %%
# A sweep measures all blocks at once. The norm of a block grows with its size; divided by the root of its number of
# entries, it is the curvature per direction.
found = {}
for name, model in models.items():
    batch = {"input_ids": rows[:8], "labels": rows[:8]}
    sweep = cv.sweep(model.eval(), None, [batch], tolerance=0.1, seed=0)
    found[name] = {
        block: sweep.frobenius_norm(block) for block in sweep.names if block.startswith("h.") and ".b_" not in block
    }

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True, width_ratios=(1, 1.9))
for axes, (name, norms) in zip(panels, found.items(), strict=True):
    places = range(len(norms))
    axes.errorbar(places, [float(n) for n in norms.values()], [n.stderr for n in norms.values()], fmt="o", markersize=4)
    axes.set_xticks(places, [block.removeprefix("h.") for block in norms], rotation=70, ha="right")
    axes.set_title(name)
    axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("Frobenius norm of the Gauss-Newton part")
