"""
Where the curvature of a Mamba block sits
=========================================

Train a Transformer and a state-space model of the same width and size on the same text, and compare the norms of the
Gauss-Newton part of their blocks. In attention, query and key are flatter than value and output. In a Mamba block the
gap is wider: the step delta and the matrices A, B and C, which mix the tokens, have norms 10 to 1,000 times
smaller than the weights that carry the content (in, gate, conv, out).
"""

# %%
# One Transformer layer has as many parameters as two Mamba layers. Both read the characters of the package's text.
import matplotlib.pyplot as plt
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

import curvoscope as cv
from curvoscope.families.text import corpus, cut, encode

transformers.logging.set_verbosity_error()
VOCABULARY, WIDTH, LENGTH = 48, 24, 24
tokens = encode(corpus(), VOCABULARY).tokens
shared = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
torch.manual_seed(0)
models = {
    "Transformer, 1 layer": LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, **shared)
    ),
    "Mamba, 2 layers": MambaForCausalLM(MambaConfig(num_hidden_layers=2, state_size=4, time_step_rank=2, **shared)),
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
    print(f"{name}: {inside:,} parameters in layers, loss {loss.item():.2f}")

# %%
# A sweep measures all blocks at once, with error bars.
found = {}
for name, model in models.items():
    batch = {"input_ids": rows[:8], "labels": rows[:8]}
    sweep = cv.sweep(model.eval(), None, [batch], tolerance=0.1, seed=0)
    norms = {block.removeprefix("h."): sweep.frobenius_norm(block) for block in sweep.names}
    found[name] = {block: norm for block, norm in norms.items() if block[0].isdigit() and ".b_" not in block}

# %%
MIXING = {"Q", "K", "delta_in", "delta", "A", "B", "C"}  # what mixes the tokens
KINDS = {"mixing of tokens": "tab:red", "content": "tab:blue", "norm": "tab:gray"}


def kind(block):
    """Which of the three kinds a block is."""
    leaf = block.rpartition(".")[2]
    return "norm" if "norm" in leaf else "mixing of tokens" if leaf in MIXING else "content"


figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True, width_ratios=(1, 1.9))
for axes, (name, norms) in zip(panels, found.items(), strict=True):
    for label, color in KINDS.items():
        chosen = [(place, norms[block]) for place, block in enumerate(norms) if kind(block) == label]
        places, values = zip(*chosen, strict=True)
        errors = [value.stderr for value in values]
        axes.errorbar(places, list(map(float, values)), errors, fmt="o", markersize=5, color=color, label=label)
    axes.set_xticks(range(len(norms)), norms, rotation=70, ha="right")
    axes.set_title(name)
    axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("Frobenius norm of the Gauss-Newton part")
panels[0].legend(frameon=False, loc="lower left")
