"""
Which blocks carry the curvature?
=================================

The paper's network is one Transformer block that adds numbers. Its attention Hessian has a closed form for every entry;
the query and key blocks are orders of magnitude smaller than the value block.
"""

# %%
# Make the network with random weights, and 64 additions as data.
import torch

import curvoscope as cv
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import addition, answer_targets
from curvoscope.report.figures import hessian_figure

model = GPT2(d=12, seed=0)
tokens = addition(64, seed=0)
inputs, targets = tokens[:, :-1], answer_targets(tokens)

# %%
# Split the network at the attention's output: the layer has a closed form, and the rest of the network is its loss.
layer = model.attention()
with torch.no_grad():
    X = model.attention_input(inputs)
H = layer.hessian(X, model.tail(inputs, targets))
rows = cv.analysis.block_table(H)
for row in rows:
    if row.row == row.column and row.part == "total":
        print(f"{row.row}: norm {row.frobenius_norm:.2e}, median entry {row.median_absolute:.2e}")

# %%
# Draw every entry by its magnitude.
figure = hessian_figure(H, cv.analysis.headline(rows))
