"""`GaussNewton`: damped Gauss-Newton steps in the eigenbasis of KFAC's factors."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.autodiff.batches import Batch, Batches
from curvoscope.autodiff.graph import Graph
from curvoscope.autodiff.kernels import kept_derivatives
from curvoscope.errors import ModelError, NonFiniteError, RangeError
from curvoscope.losses import LossFunction, objective_of
from curvoscope.settings import chosen_seed
from curvoscope.training.factors import ParameterCurvature, sampled_curvature

_FALL = 0.95  # of the damping, per step, when the quadratic model predicts the loss well
_GOOD, _BAD = 0.75, 0.25  # ratios of actual to predicted decrease
_REJECTED = 4.0  # times the damping after a step that raised the loss
_LEAST, _MOST = 1e-10, 1e10


class GaussNewton(torch.optim.Optimizer):
    """Steps -(A + weight_decay + damping)^-1 (mean gradient + weight_decay w), A the KFAC approximation of each weight.

        A = (1/T) sum_t x_t x_t^T (x) sum_t delta_t delta_t^T

    over the T tokens of a batch, delta from random cotangents whose covariance is the loss Hessian at the outputs: an
    unbiased estimate of the right-hand factor, without labels. Both factors are running means; they are diagonalised,
    so that the damping is added to A itself and not to its factors. Parameters that are no matrices of a product
    (biases, norms, embeddings) have the diagonal of their Gauss-Newton block.

    Every `adapt` steps a product with the exact Gauss-Newton matrix of the batch gives the length that minimises the
    quadratic model along the step, for this and the following steps, at most 1; the ratio of actual to predicted
    decrease moves the damping (Levenberg and Marquardt); and a step that raises the loss of its own batch is undone.

    Unlike other optimizers it runs the model itself: `step(batch)` instead of `backward()` and `step()`.

    Args:
        model: the module to train.
        loss_fn: `loss_fn(outputs, targets)`, a mean whose Hessian in the outputs is positive semidefinite.
        params: parameters or groups of them, as for any optimizer; None: all that are trainable.
        lr: multiplies the step.
        momentum: of the running mean of gradients.
        weight_decay: added to the curvature and, times the weights, to the gradient.
        damping: at the start.
        every: steps between new samples of the factors, and their eigenvectors.
        adapt: steps between products with the exact Gauss-Newton matrix; more than 1 is faster and less safe.
        decay: of the running means of the factors, per new sample.
        samples: random cotangents for each.
        seed: of the cotangents; by default that of `cv.settings`.

    Example:
        >>> import torch
        >>> from curvoscope.training import GaussNewton
        >>> _ = torch.manual_seed(0)
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(20, 3).double() * torch.tensor([1, 10, 100])
        >>> optimizer = GaussNewton(model, torch.nn.MSELoss(), damping=1e-6, momentum=0.0)
        >>> losses = [optimizer.step((X, X[:, :2])) for _ in range(20)]
        >>> losses[0] > 100, losses[-1] < 1e-4
        (True, True)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        params: Iterable[Any] | None = None,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 1e-2,
        every: int = 2,
        adapt: int = 1,
        decay: float = 0.95,
        samples: int = 2,
        seed: int | None = None,
    ) -> None:
        for name, value in (("momentum", momentum), ("decay", decay)):
            if not 0 <= value < 1:
                raise RangeError(name, f"got {value}, expected at least 0 and below 1")
        for name, value in (("lr", lr), ("damping", damping)):
            if not (value > 0 and math.isfinite(value)):
                raise RangeError(name, f"got {value}, expected a positive number")
        if not (weight_decay >= 0 and math.isfinite(weight_decay)):
            raise RangeError("weight_decay", f"got {weight_decay}, expected a number of at least 0")
        for name, count in (("every", every), ("adapt", adapt), ("samples", samples)):
            if count < 1:
                raise RangeError(name, f"got {count}, expected at least 1")
        objective = objective_of(loss_fn)
        if objective is None:
            raise ModelError("loss_fn", "is None; give the loss as a function of outputs and targets")
        self._model, self._objective = model, objective
        self._every, self._adapt, self._decay, self._samples = every, adapt, decay, samples
        self._seed, self._steps, self._scale = chosen_seed(seed), 0, 1.0
        self.damping = damping
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else params
        super().__init__(chosen, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        names = {id(p): name for name, p in model.named_parameters()}
        held = [p for group in self.param_groups for p in group["params"]]
        if any(id(p) not in names for p in held):
            raise ModelError("params", "has a tensor that is no parameter of the model")
        self._named = {names[id(p)]: p for p in held}

    @property
    def scale(self) -> float:
        """The length of the step, relative to the full one, that the last exact quadratic model asked for."""
        return self._scale

    def step(self, batch: Any) -> float:  # type: ignore[override]  # it needs the data, not only the gradients
        """One step.

        Args:
            batch: (inputs, targets), or a dict with "labels": one batch as `cv.hessian` takes them.

        Returns:
            The loss of the batch before the step.
        """
        (found,) = Batches([batch])
        refresh, measure = self._steps % self._every == 0, self._steps % self._adapt == 0
        with torch.enable_grad(), kept_derivatives(self._model):
            outputs = self._model(*found.arguments, **found.keywords)
            loss = self._objective(outputs, found.targets)
            if not math.isfinite(float(loss.detach())):
                raise NonFiniteError("loss", f"is {float(loss.detach())} at step {self._steps}; lower lr")
            if refresh:
                self._refresh(outputs, found.targets)
            graph = None
            if measure:
                graph = Graph(self._named, *self._objective.gradient(outputs, found.targets))
            gradients = torch.autograd.grad(
                loss, list(self._named.values()), retain_graph=measure, materialize_grads=True
            )
        self._steps += 1
        with torch.no_grad():
            steps = self._directions(dict(zip(self._named, gradients, strict=True)))
            predicted = None if graph is None else self._measured(graph, gradients, steps)
            before = [p.clone() for p in self._named.values()] if measure else []
            self._move(steps)
            if predicted is not None:
                self._judge(found, float(loss.detach()), predicted, before)
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        """The state of any optimizer, and under "gauss_newton" the damping, the scale and the number of steps."""
        own = {"damping": self.damping, "scale": self._scale, "steps": self._steps}
        return {**super().state_dict(), "gauss_newton": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of the same model."""
        own = state_dict.get("gauss_newton")
        if own is None:
            raise ModelError("state_dict", "has no 'gauss_newton': it belongs to another optimizer")
        super().load_state_dict(state_dict)
        self.damping, self._scale, self._steps = own["damping"], own["scale"], own["steps"]

    # ---- curvature

    def _refresh(self, outputs: Any, targets: Any) -> None:
        """New factors into the running means."""
        seeds = [(self._seed, self._steps * self._samples + i) for i in range(self._samples)]
        for name, new in sampled_curvature(self._objective, outputs, targets, self._named, seeds).items():
            state = self.state[self._named[name]]
            mixed = ParameterCurvature(**state["curvature"]).mixed(new, self._decay) if "curvature" in state else new
            state["curvature"] = vars(mixed.diagonalised())

    def _measured(self, graph: Graph, gradients: Sequence[Tensor], steps: dict[str, Tensor]) -> float:
        """Set the scale of the step, and return the predicted change of the loss with its weight decay."""
        product = graph.product("outer", steps, list(steps), many=False)
        slope = curvature = damped = 0.0
        for group in self.param_groups:
            decay = group["weight_decay"]
            held = {id(p) for p in group["params"]}
            for (name, p), gradient in zip(self._named.items(), gradients, strict=True):
                if id(p) in held:
                    step = steps[name].double()
                    slope += float((step * (gradient.double() + decay * p.double())).sum())
                    curvature += float((step * product.get(name, torch.zeros_like(p)).double()).sum())
                    curvature += decay * float(step.square().sum())
                    damped += float(step.square().sum())
        total = curvature + self.damping * damped
        self._scale = min(1.0, max(0.0, -slope / total)) if total > 0 else 1.0
        return self._scale * slope + self._scale**2 * curvature / 2

    def _judge(self, batch: Batch, loss: float, predicted: float, before: Sequence[Tensor]) -> None:
        """Move the damping by the ratio of actual to predicted decrease; undo a step that raised the loss."""
        after = float(self._objective(self._model(*batch.arguments, **batch.keywords), batch.targets))
        decays = {id(p): group["weight_decay"] for group in self.param_groups for p in group["params"]}
        change = after - loss
        for p, old in zip(self._named.values(), before, strict=True):
            change += decays[id(p)] / 2 * float(p.double().square().sum() - old.double().square().sum())
        if not math.isfinite(change) or change > 0:
            for p, old in zip(self._named.values(), before, strict=True):
                p.copy_(old)
                self.state[p]["mean"].zero_()
                self.state[p]["count"] = 0
            self.damping = min(_MOST, self.damping * _REJECTED)
            return
        ratio = change / predicted if predicted < 0 else 0.0
        factor = _FALL**self._adapt if ratio > _GOOD else _FALL**-self._adapt if ratio < _BAD else 1.0
        self.damping = min(_MOST, max(_LEAST, self.damping * factor))

    # ---- steps

    def _directions(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """-(A + weight_decay + damping)^-1 (mean gradient + weight_decay w) by parameter, times lr."""
        found = {}
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        for name, p in self._named.items():
            group, state = groups[id(p)], self.state[p]
            if "mean" not in state:
                state.update(mean=torch.zeros_like(p), count=0)
            state["count"] += 1
            state["mean"].lerp_(gradients[name], 1 - group["momentum"])
            mean = state["mean"] / (1 - group["momentum"] ** state["count"])
            decay = group["weight_decay"]
            known = ParameterCurvature(**state["curvature"])
            found[name] = -group["lr"] * known.solve(mean + decay * p, self.damping + decay)
        return found

    def _move(self, steps: dict[str, Tensor]) -> None:
        for name, step in steps.items():
            self._named[name].add_(step, alpha=self._scale)
