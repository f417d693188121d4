"""
The spectra of the two parts
============================

The outer part has no negative eigenvalue. The functional part has about as many negative as positive ones. The split at
the scores explains this: its T-functional part has eigenvalues in exact pairs ±s σ(B), each as often as a key has
dimensions.
"""

# %%
import matplotlib.pyplot as plt
import torch

import curvoscope as cv

torch.manual_seed(0)
L, d, k = 16, 4, 24  # wide keys: the pairs show in the whole Hessian
X, Y = torch.randn(2, L, d, dtype=torch.float64)
W_Q, W_K = torch.randn(2, d, k, dtype=torch.float64) / 2
layer = cv.exact.SelfAttention(W_Q, W_K, torch.randn(d, d, dtype=torch.float64))
H = layer.hessian(X, cv.losses.MSE(Y))
spectra = {
    "outer": torch.linalg.eigvalsh(H.outer.dense()),
    "functional": torch.linalg.eigvalsh(H.functional.dense()),
    "Hessian": torch.linalg.eigvalsh(H.dense()),
}
for name, values in spectra.items():
    tiny = 1e-12 * values.abs().max()
    print(f"{name}: {int((values < -tiny).sum())} negative, {int((values > tiny).sum())} positive of {len(values)}")

# %%
# Each pair is in the spectrum of the whole Hessian at least k + 1 - 2d = 17 times.
values, counts = spectra["Hessian"].round(decimals=10).unique(return_counts=True)
for value, count in zip(values[counts >= k + 1 - 2 * d], counts[counts >= k + 1 - 2 * d], strict=True):
    print(f"{value:+.6f}: {count} times")

# %%
figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.4), sharey=True, layout="constrained")
for axes, (name, values) in zip(panels, spectra.items(), strict=True):
    axes.plot(values, ".", markersize=3)
    axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_title(name)
    axes.set_xlabel("number of the eigenvalue")
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("eigenvalue")
