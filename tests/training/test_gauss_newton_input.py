"""What the optimizer refuses, and batches that teach it nothing."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.autodiff.batches import BatchError
from curvoscope.errors import DtypeError, LossError, ModelError, RangeError
from curvoscope.training import GaussNewton


def test_without_a_gradient_only_the_weights_decay():
    """Inputs of zero: no step is taken, which is no reason to take shorter ones."""
    model, batch = nn.Linear(3, 2, bias=False).double(), (torch.zeros(4, 3).double(), torch.zeros(4, 2).double())
    start = model.weight.detach().clone()
    optimizer = GaussNewton(model, nn.MSELoss(), lr=0.1, weight_decay=0.5, adapt=1)
    for _ in range(3):
        optimizer.step(batch)
    assert optimizer.scale == 1 and torch.allclose(model.weight, start * 0.95**3)


def test_bad_input():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    for options in ({"lr": 0.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"every": 0}, {"weight_decay": -1.0}):
        with pytest.raises(RangeError, match=next(iter(options))):
            GaussNewton(model, nn.CrossEntropyLoss(), **options)
    with pytest.raises(ModelError, match="loss_fn"):
        GaussNewton(model, None)
    penalised = cv.losses.Regularised(nn.CrossEntropyLoss(), lambda weights: weights["0.weight"].square().sum())
    with pytest.raises(LossError, match=r"loss_fn: has a penalty on the weights.*weight_decay"):
        GaussNewton(model, penalised)
    with pytest.raises(DtypeError, match=r"params: 'weight' is torch\.bfloat16"):
        GaussNewton(nn.Linear(2, 2).bfloat16(), nn.MSELoss())
    with pytest.raises(BatchError, match=r"batch: the function returned a Tensor; return \(outputs, targets\)"):
        GaussNewton(model, nn.CrossEntropyLoss()).step(lambda: torch.zeros(()))
    with pytest.raises(ModelError, match="is not a parameter of the model"):
        GaussNewton(model, nn.CrossEntropyLoss(), [nn.Parameter(torch.zeros(2))])
    with pytest.raises(ModelError, match="gauss_newton"):
        GaussNewton(model, nn.CrossEntropyLoss()).load_state_dict(torch.optim.SGD(model.parameters(), 1.0).state_dict())
