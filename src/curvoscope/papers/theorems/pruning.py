"""Optimal Brain Surgeon, the slides' example of what a Hessian is good for."""

import torch
from jaxtyping import Float
from torch import Tensor


def pruning_step(curvature: Float[Tensor, "n n"], weight: Float[Tensor, "n"], q: int) -> Float[Tensor, "n"]:
    """Optimal Brain Surgeon, corrected: δw = −w_q / [H⁻¹]_qq · H⁻¹ e_q removes weight q at the least cost."""
    column = torch.linalg.inv(curvature)[:, q]
    return -weight[q] / column[q] * column


def pruning_step_as_printed(curvature: Float[Tensor, "n n"], weight: Float[Tensor, "n"], q: int) -> Float[Tensor, "n"]:
    """Optimal Brain Surgeon as the slides print it, with w_q² in place of w_q."""
    column = torch.linalg.inv(curvature)[:, q]
    return -(weight[q] ** 2) / column[q] * column
