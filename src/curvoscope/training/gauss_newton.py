"""`GaussNewton`: Adam with Nesterov's momentum in the eigenbasis of KFAC's approximation of the curvature."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.autodiff.batches import BatchError, batch_of
from curvoscope.autodiff.safety import RandomStates, same_randomness
from curvoscope.errors import DtypeError, LossError, ModelError, NonFiniteError, RangeError
from curvoscope.losses import LossFunction, objective_of
from curvoscope.settings import chosen_seed
from curvoscope.training.factors import ParameterCurvature, SampledGradient, sampled_gradients

_FALL = 0.95  # of the scale, per step, if the loss falls much less than predicted
_GOOD, _BAD = 0.75, 0.25  # ratios of actual to predicted decrease

Evaluate = Callable[[], tuple[Any, Any]]  # outputs and targets


class GaussNewton(torch.optim.Optimizer):
    """Adam with Nesterov's momentum in the eigenbasis U_0 (x) U_1 of KFAC's approximation of each Gauss-Newton block.

    For the gradient G of a weight, entry by entry in that basis:

        g = U_0^T G U_1,    m = mean of g,    v = mean of g^2                running means, as in Adam
        n = beta_1 m + (1 - beta_1) g                                        Nesterov's momentum, as in NAdam
        step = -scale lr n / sqrt((v + c D) / 2),    c = sum v / sum D       turned back: U_0 step U_1^T

    D is the diagonal of the Gauss-Newton block in the basis. The noise of gradients is about proportional to it, so
    c D is a second estimate of v, with less noise. The steps divide by a root of the curvature, not by the curvature:
    with few rows per batch, full Gauss-Newton steps amplify the noise along flat directions.

    Curvature comes from random cotangents delta_t at the tokens t of a weight, whose covariance is the loss Hessian at
    the outputs: no labels are needed, and each sample costs one backward pass. U_0 and U_1 follow the eigenvectors of
    KFAC's factors sum_t x_t x_t^T and sum_t delta_t delta_t^T, running means over the samples. Parameters that multiply
    no tokens as a matrix (biases, norms) have U_0 = U_1 = 1; embeddings are matrices of a product with unit vectors.

    Samples are taken at steps 0, 1, 2, 4, ... and then every `every` steps; the bases are improved likewise every
    `bases` steps. Every `adapt` steps one more forward pass gives the ratio of the actual to the predicted change of
    the loss, -<g, s> + <s, D s> / 2 for a step -s, with the same dropout. As in Levenberg's and Marquardt's method,
    `scale` falls if the ratio is small, and rises again, up to 1, if it is near 1; a step after which the loss is not
    finite is undone. All other steps cost four small matrix products per matrix more than Adam's.

    Unlike other optimizers it runs the model itself: `step(batch)` instead of `backward()` and `step()`. A parameter
    stays where it is until a sample has found its curvature.

    Args:
        model: the module to train.
        loss_fn: `loss_fn(outputs, targets)`, a mean whose Hessian in the outputs is positive semidefinite.
        params: parameters or groups of them, as for any optimizer; None: all. Those that are frozen are left alone.
        lr: the size of a step along each direction of the basis.
        betas: decays of the running means of g and g^2.
        eps: added to the root.
        weight_decay: each step also subtracts scale lr weight_decay w.
        every: steps between samples of the curvature.
        bases: steps between better bases.
        adapt: steps between measurements of the ratio; 0: none.
        decay: of the running means of the curvature, per sample.
        seed: of the cotangents; by default that of `cv.settings`.

    Example:
        >>> import torch
        >>> from curvoscope.training import GaussNewton
        >>> _ = torch.manual_seed(0)
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(20, 3).double()
        >>> optimizer = GaussNewton(model, torch.nn.MSELoss(), lr=0.05)
        >>> losses = [optimizer.step((X, X[:, :2])) for _ in range(50)]
        >>> losses[0] > 0.5, losses[-1] < 0.01
        (True, True)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        params: Iterable[Any] | None = None,
        lr: float = 0.02,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        every: int = 10,
        bases: int = 20,
        adapt: int = 10,
        decay: float = 0.9,
        seed: int | None = None,
    ) -> None:
        for name, value in (("betas", betas[0]), ("betas", betas[1]), ("decay", decay)):
            if not 0 <= value < 1:
                raise RangeError(name, f"got {value}, expected at least 0 and below 1")
        checks.positive(lr=lr, eps=eps)
        if not 0 <= weight_decay < math.inf:
            raise RangeError("weight_decay", f"got {weight_decay}, expected a number of at least 0")
        checks.at_least(1, every=every, bases=bases)
        checks.at_least(0, adapt=adapt)
        objective = objective_of(loss_fn)
        if objective is None:
            raise ModelError("loss_fn", "is None; give the loss as a function of outputs and targets")
        if objective.reads_parameters:
            raise LossError("loss_fn", "has a penalty on the weights; give the loss alone, and weight_decay")
        self._model, self._objective = model, objective
        self._every, self._bases, self._adapt, self._decay = every, bases, adapt, decay
        self._seed, self._steps, self._scale = chosen_seed(seed), 0, 1.0
        self._names = {id(p): name for name, p in model.named_parameters()}
        chosen = list(model.parameters()) if params is None else params
        super().__init__(chosen, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @property
    def scale(self) -> float:
        """What the steps are multiplied by, at most 1: it falls while the loss falls less than predicted."""
        return self._scale

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, with settings of their own.

        Args:
            param_group: "params", and any of "lr", "betas", "eps" and "weight_decay"; the others are the optimizer's.
        """
        super().add_param_group(param_group)
        if any(id(p) not in self._names for p in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise ModelError("params", "has a tensor that is not a parameter of the model")
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in (torch.float32, torch.float64):
                self.param_groups.pop()
                raise DtypeError("params", f"{self._names[id(p)]!r} is {p.dtype}; convert the model with .float()")

    def step(self, batch: Any) -> float:  # type: ignore[override]  # it needs the data, not only the gradients
        """One step.

        Args:
            batch: (inputs, targets), or a dict with "labels": one batch as `cv.hessian` takes them. Or a function
                without arguments that runs the model and returns (outputs, targets). Every `adapt` steps it is called
                twice, with the same random numbers, and must give the same rows.

        Returns:
            The loss of the batch before the step.
        """
        evaluate = batch if callable(batch) else self._evaluation(batch)
        trained = {self._names[id(p)]: p for group in self.param_groups for p in group["params"] if p.requires_grad}
        if not trained:
            raise ModelError("params", "are all frozen; unfreeze some with requires_grad_()")
        weights, samples = list(trained.values()), dict[str, SampledGradient | Tensor]()
        measured = self._adapt > 0 and self._steps % self._adapt == 0
        randomness = RandomStates() if measured else None
        with torch.enable_grad():
            outputs, targets = self._ran(evaluate())
            loss = self._objective(outputs, targets)
            value = float(loss.detach())
            if not math.isfinite(value):
                cure = "lower lr, or check the batch" if self._steps else "check the weights and the batch"
                raise NonFiniteError("loss", f"is {value} at step {self._steps}; {cure}")
            if _is_due(self._steps, self._every):
                samples = sampled_gradients(self._objective, outputs, targets, trained, (self._seed, self._steps))
            gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
        sampled = [sample if isinstance(sample, Tensor) else sample.columns for sample in samples.values()]
        if not math.isfinite(float(torch.stack(torch._foreach_norm([*gradients, *sampled])).sum())):
            raise NonFiniteError("gradient", f"has NaN or infinity at step {self._steps}; lower lr")
        with torch.no_grad():
            self._learn(trained, samples)
            before = [p.clone() for p in weights] if measured else []
            predicted = self._move(weights, gradients, measured)
            self._steps += 1
            if randomness is not None:
                self._judge(self._loss_again(evaluate, randomness), value, predicted, weights, before)
        return value

    def state_dict(self) -> dict[str, Any]:
        """The state of any optimizer, and under "gauss_newton" the scale, the number of steps and the seed."""
        own = {"scale": self._scale, "steps": self._steps, "seed": self._seed}
        return {**super().state_dict(), "gauss_newton": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of the same model.

        Args:
            state_dict: from `state_dict` of a `GaussNewton` with the same parameter groups.
        """
        own = state_dict.get("gauss_newton")
        if own is None:
            raise ModelError("state_dict", "has no 'gauss_newton': it belongs to another optimizer")
        super().load_state_dict(state_dict)
        self._scale, self._steps, self._seed = own["scale"], own["steps"], own.get("seed", self._seed)

    def _loss_again(self, evaluate: Evaluate, randomness: RandomStates) -> float:
        """The loss of the same batch: with the same dropout, and without a trace in running statistics."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        with same_randomness():
            randomness.restore()
            loss = float(self._objective(*evaluate()))
        for buffer, old in buffers:
            buffer.copy_(old)
        return loss

    @staticmethod
    def _ran(found: Any) -> tuple[Any, Any]:
        if not (isinstance(found, tuple | list) and len(found) == 2):
            kind = type(found).__name__
            raise BatchError("batch", f"the function returned a {kind}; return (outputs, targets), not the loss")
        return found[0], found[1]

    def _evaluation(self, batch: Any) -> Evaluate:
        found = batch_of(batch)
        return lambda: (self._model(*found.arguments, **found.keywords), found.targets)

    def _learn(self, trained: Mapping[str, Tensor], samples: Mapping[str, SampledGradient | Tensor]) -> None:
        """New samples into the running means of the curvature, and better bases if they are due."""
        turn = _is_due(self._steps, self._bases)
        if not (samples or turn):
            return
        for name, p in trained.items():
            state, sample = self.state[p], samples.get(name)
            if "curvature" not in state:
                if sample is not None:
                    state["curvature"] = vars(ParameterCurvature.of(sample))
                    state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p), count=0)
                continue
            known = old = ParameterCurvature(**state["curvature"])
            known = known if sample is None else known.mixed(sample, self._decay)
            known = known.turned() if turn else known
            if known.bases is not old.bases:
                state["mean"] = known.into(old.back(state["mean"]))
            state["curvature"] = vars(known)

    def _move(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], measured: bool) -> float:
        """Step, and return the predicted change of the loss if it is to be measured."""
        groups, predicted = {id(p): group for group in self.param_groups for p in group["params"]}, 0.0
        for p, gradient in zip(weights, gradients, strict=True):
            group, state = groups[id(p)], self.state[p]
            if "curvature" not in state:
                continue
            A, (first, second) = ParameterCurvature(**state["curvature"]), group["betas"]
            state["count"] += 1
            g = A.into(gradient)
            mean, square = state["mean"].lerp_(g, 1 - first), state["square"].mul_(second)
            square.addcmul_(g, g, value=1 - second)
            c = square.sum() / A.values.sum().clamp_min(torch.finfo(p.dtype).tiny)
            root = (
                torch.addcmul(square, A.values, c).div_(2 * (1 - second ** state["count"])).sqrt_().add_(group["eps"])
            )
            rate = self._scale * group["lr"]
            s = mean.lerp(g, 1 - first).div_(root).mul_(rate / (1 - first ** (state["count"] + 1)))
            if measured:
                predicted += float((s.square() * A.values / 2 - s * g).sum())
            if group["weight_decay"]:
                p.mul_(1 - rate * group["weight_decay"])
            p.sub_(A.back(s))
        return predicted

    def _judge(
        self, after: float, loss: float, predicted: float, weights: Sequence[Tensor], before: Sequence[Tensor]
    ) -> None:
        """Move the scale by the ratio of actual to predicted decrease; undo a step to where the loss is not finite."""
        if not math.isfinite(after):
            for p, old in zip(weights, before, strict=True):
                p.copy_(old)
        elif not predicted:  # no step, as at a minimum, says nothing about its length
            return
        ratio = (after - loss) / predicted if predicted < 0 and math.isfinite(after) else 0.0
        if ratio < _BAD:
            self._scale *= _FALL**self._adapt
        elif ratio > _GOOD:
            self._scale = min(1.0, self._scale / _FALL**self._adapt)


def _is_due(step: int, every: int) -> bool:
    """At 0, 1, 2, 4, ... at first, when curvature changes fastest, and at every multiple."""
    return step % every == 0 or (step < every and step & (step - 1) == 0)
