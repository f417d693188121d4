"""
A slice of the landscape
========================

The loss of a small trained network along the eigenvectors of its largest and smallest eigenvalue, and the quadratic
that the Hessian predicts: right near the weights, and how far it is right is what one wants to know.
"""

# %%
import torch
from torch import nn

import curvoscope as cv
from curvoscope.report.analysis_figures import landscape_figure, taylor_figure

torch.manual_seed(0)
inputs = torch.randn(64, 4, dtype=torch.float64)
targets = (inputs[:, :1] * inputs[:, 1:2]).tanh()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
loss_fn = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
for _ in range(200):
    optimizer.zero_grad()
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
batches = [(inputs, targets)]

# %%
# The plane of the steepest and of the most negative direction.
plane = cv.analysis.landscape(model, loss_fn, batches, ("top", "bottom"), points=21)
print(f"loss {plane.loss:.5f}, curvatures {plane.curvatures.diagonal().numpy().round(4)}")
figure = landscape_figure(plane)

# %%
# How far the second-order expansion reaches along the gradient.
expansion = cv.analysis.taylor(model, loss_fn, batches, "gradient")
reach = taylor_figure(expansion)
