"""
Watching a training
===================

Add the monitor to a plain training loop: it shows the loss, the largest eigenvalue on a probe, and 2/lr, the edge of
stability of gradient descent. The sharpness rises to the edge and stays there.
"""

# %%
import torch
from torch import nn

import curvoscope as cv
from curvoscope.report.training_figures import training_figure

torch.manual_seed(0)
inputs = torch.randn(64, 6)
targets = (inputs[:, :1] * inputs[:, 1:2]).tanh()
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

# %%
# ``budget=1`` measures every ``every`` steps at any cost; use the default, a tenth of the time, for real runs.
monitor = cv.training.CurvatureMonitor(model, loss_fn, [(inputs, targets)], every=20, budget=1.0, matvecs=8)
monitor.watch(optimizer)
for _ in range(600):
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    monitor.step(loss)
monitor.close()

for record in monitor.records[::6]:
    print(
        f"step {record.step:3}: loss {record.loss:.4f}, largest eigenvalue {record.largest_eigenvalue.value:5.2f}, "
        f"edge {record.edge:.1f}"
    )

# %%
figure = training_figure(monitor.records)
