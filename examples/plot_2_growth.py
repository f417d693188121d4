"""
How blocks grow with the input
==============================

Scale the input of an attention layer by σ. At small σ every block grows with its exponent: six and five for the two
parts of the query block, two for the value block. Beyond σ = 1 the softmax saturates, and the query block falls.
"""

# %%
import matplotlib.pyplot as plt
import torch

import curvoscope as cv

torch.manual_seed(0)
L, d = 16, 8
X, Y = torch.randn(2, L, d, dtype=torch.float64)
layer = cv.exact.SelfAttention(*torch.randn(3, d, d, dtype=torch.float64) / d**0.5, causal=True)
scales = torch.logspace(-2, 1.3, 34, dtype=torch.float64)
lines = {"Q, outer": [], "Q, functional": [], "V, outer": []}
for scale in scales:
    H = layer.hessian(scale * X, cv.losses.MSE(Y))
    lines["Q, outer"].append(H.outer["Q"].frobenius_norm())
    lines["Q, functional"].append(H.functional["Q"].frobenius_norm())
    lines["V, outer"].append(H.outer["V"].frobenius_norm())

# %%
# Compute the exponents at the left end from the first two points:
for name, values in lines.items():
    slope = torch.tensor(values[1] / values[0]).log() / (scales[1] / scales[0]).log()
    print(f"{name}: {slope:.2f}")

# %%
figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
for name, values in lines.items():
    axes.loglog(scales, values, label=name)
axes.set_xlabel("scale σ of the input")
axes.set_ylabel("Frobenius norm")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
