"""
A slice of the landscape
========================

Draw the loss of a small trained network along the eigenvectors of its largest and smallest eigenvalue, with the
quadratic that the Hessian predicts, to see how far from the weights the prediction holds.
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
# Draw the plane of the steepest and the most negative direction.
plane = cv.analysis.landscape(model, loss_fn, batches, ("top", "bottom"), points=21)
print(f"loss {plane.loss:.5f}, curvatures {plane.curvatures.diagonal().numpy().round(4)}")
figure = landscape_figure(plane)

# %%
# Measure how far the second-order expansion holds along the gradient.
expansion = cv.analysis.taylor(model, loss_fn, batches, "gradient")
reach = taylor_figure(expansion)
