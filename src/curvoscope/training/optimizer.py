"""`BlockCurvature`: SGD or Adam with a step size for each block of the model, from the curvature of that block."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.safety import undisturbed
from curvoscope.blocks import Blocks
from curvoscope.curvature import hessian, trainable
from curvoscope.errors import ModelError, RangeError, ShapeError
from curvoscope.estimate import lanczos
from curvoscope.families.block_maps import blocks_of
from curvoscope.losses.objectives import LossFunction
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.compositions import DiagonallyScaled
from curvoscope.settings import chosen_seed

BASES = ("sgd", "adam")


@dataclass(frozen=True)
class _Known:
    """What was measured: λ_max and its eigenvector by block, the coupling and its, and how many steps were made."""

    steps: int = 0
    curvatures: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    coupling: float = 1.0
    joint: Tensor | None = None


class BlockCurvature(torch.optim.Optimizer):
    """SGD with momentum, or Adam, with a step size for each block: r_b / max(1, μ) in block b.

        r_b = min(lr, safety · κ/λ_b),   λ_b = λ_max(P^-½ H_bb P^-½)      the limit of the block alone
        μ = λ_max(R^½ P^-½ H P^-½ R^½) / (safety · κ),   R = diag(r_b)    the coupling of the blocks

    H is the Hessian of the probe's loss. For "sgd" P = 1 and κ = 2 (1 + β), β the momentum; for "adam" P =
    diag(sqrt(v) + eps), the preconditioner, and κ = 2 (1 + β₁)/(1 - β₁). On a quadratic, with constant P, the step with
    the matrix η = R / max(1, μ) is stable below λ_max(η^½ P^-½ H P^-½ η^½) = κ, and here that is at most safety · κ:
    `safety` is the share of the stable step size, exactly so if μ >= 1. Without μ, blocks each at their own limit
    may be unstable together: the largest eigenvalue of a positive matrix is up to the sum of those of its diagonal
    blocks. `lr` is a cap, and the step size of a block without positive curvature; schedulers change it as they do for
    any optimizer. A lower cap keeps the step stable, a higher one is accounted for in μ at the next measurement.

    Limits: a step size from λ_max makes no progress along directions of small curvature, and the curvature of one probe
    knows nothing of the noise of the gradients. Whether it trains faster than one well-tuned learning rate must be
    measured: `curvoscope reproduce optimizers`.

    Args:
        model, loss_fn, probe: as in `cv.hessian`; the curvature is that of the model in evaluation mode on the probe.
        lr: the cap of the step size.
        blocks: must hold every trainable parameter once; None: `cv.blocks_of(model)`.
        base: "sgd" or "adam".
        momentum: β of "sgd".
        betas, eps: of "adam".
        safety: the share of the stable step size to take.
        every: steps between measurements. The first ones come after 1, 2, 4, ... steps, when curvature changes fastest.
        matvecs: products per measurement for each block, and for μ; Lanczos starts from the last eigenvector.
        seed: for Lanczos.

    Example:
        >>> import torch
        >>> from curvoscope.training import BlockCurvature
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> probe = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.ones(2, 1))]
        >>> optimizer = BlockCurvature(model, torch.nn.MSELoss(), probe, lr=10.0, momentum=0.0)
        >>> {name: round(value, 3) for name, value in optimizer.measure().items()}
        {'weight': 4.0}
        >>> {name: round(value, 3) for name, value in optimizer.learning_rates.items()}  # half of 2/λ_max
        {'weight': 0.25}
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        probe: Iterable[Any],
        lr: float = 1.0,
        blocks: Blocks | None = None,
        *,
        base: str = "sgd",
        momentum: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        safety: float = 0.5,
        every: int = 50,
        matvecs: int = 4,
        seed: int | None = None,
    ) -> None:
        checks.choice("base", base, BASES)
        for name, value in (("momentum", momentum), ("betas", betas[0]), ("betas", betas[1])):
            if not 0 <= value < 1:
                raise RangeError(name, f"got {value}, expected at least 0 and below 1")
        checks.positive(lr=lr, safety=safety, eps=eps)
        if every < 1:
            raise RangeError("every", f"got {every}, expected at least 1 step")
        if matvecs < 2:
            raise RangeError("matvecs", f"got {matvecs}, expected at least 2 products")
        self._model, self._loss_fn, self._probe = model, loss_fn, probe
        self._generators = Batches(probe).generators
        self._blocks = blocks if blocks is not None else trainable(model, blocks_of(model))
        self._blocks.check(model)
        named = dict(model.named_parameters())
        self._members = _members(self._blocks, named)
        self._every, self._matvecs, self._seed = every, matvecs, chosen_seed(seed)
        defaults = {"lr": lr, "base": base, "momentum": momentum, "betas": betas, "eps": eps, "safety": safety}
        self._known = _Known()
        super().__init__([named[name] for name in self._members], defaults)

    @property
    def curvatures(self) -> dict[str, float]:
        """λ_max per block as last measured, with its residual added: of H_bb, or of its preconditioned form."""
        return dict(self._known.curvatures)

    @property
    def coupling(self) -> float:
        """μ as last measured, with its residual added; all step sizes are divided by it if it is above 1."""
        return self._known.coupling

    @property
    def learning_rates(self) -> dict[str, float]:
        """The step size of each block."""
        shrunk = max(1.0, self._known.coupling)
        return {name: rate / shrunk for name, rate in self._alone(self._known.curvatures).items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step from the gradients in `.grad`, or from those that the closure computes.

        Args:
            closure: clears the gradients, computes the loss and its gradients, and returns the loss.

        Returns:
            The loss of the closure; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        directions = self._directions()
        steps = self._known.steps + 1
        self._known = replace(self._known, steps=steps)
        early = steps < self._every and steps & (steps - 1) == 0
        if early or steps % self._every == 0:
            self.measure()
        rates = self.learning_rates
        named = dict(self._model.named_parameters())
        for name, direction in directions.items():
            named[name].sub_(self._rates(name, named[name], rates) * direction)
        return loss

    def measure(self, batches: Iterable[Any] | None = None) -> dict[str, float]:
        """Measure the curvature of each block now.

        Args:
            batches: the data to measure on; None: the probe.

        Returns:
            λ_max per block.
        """
        curvatures, vectors, roots = dict[str, float](), dict[str, Tensor](), self._roots()
        with undisturbed(self._model, self._generators):
            for module in self._model.modules():
                module.training = False
            data = self._probe if batches is None else batches
            H = hessian(self._model, self._loss_fn, data, self._blocks, method="autodiff")
            for name in self._blocks:
                own = None if roots is None else self._blocks[name].gather(roots)
                curvatures[name], vectors[name] = self._largest(H.total[name], own, self._known.vectors.get(name))
            rates = self._alone(curvatures)
            sizes = self._blocks.sizes
            scale = torch.cat([vectors[name].new_full((sizes[name],), rates[name] ** 0.5) for name in self._blocks])
            whole = scale if roots is None else scale * self._blocks.gather(roots).to(scale.dtype)
            largest, joint = self._largest(H.total, whole, self._known.joint)
        self._known = _Known(self._known.steps, curvatures, vectors, largest / self._limit(), joint)
        return dict(curvatures)

    def state_dict(self) -> dict[str, Any]:
        """The state of any optimizer, and under "curvature" what was measured of the blocks."""
        known = self._known
        measured = {name: getattr(known, name) for name in ("steps", "curvatures", "vectors", "coupling", "joint")}
        return {**super().state_dict(), "curvature": measured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of the same model and blocks."""
        found = state_dict.get("curvature")
        if found is None:
            raise ModelError("state_dict", "has no 'curvature': it belongs to another optimizer")
        sizes = {name: len(vector) for name, vector in found["vectors"].items()}
        if sizes and sizes != self._blocks.sizes:
            raise ModelError(
                "state_dict", "belongs to another model or other blocks; create the optimizer as in that run"
            )
        super().load_state_dict(state_dict)
        self._known = _Known(**found)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise, except during construction: the blocks hold everything that is trained."""
        if self.param_groups:
            raise ModelError("param_group", "cannot be added: create the optimizer again, with blocks that contain it")
        super().add_param_group(param_group)

    # ---- curvature

    def _limit(self) -> float:
        """safety · κ: how large the curvature times the step size may be."""
        group = self.param_groups[0]
        return float(group["safety"] * _stability(group))

    def _alone(self, curvatures: Mapping[str, float]) -> dict[str, float]:
        """r_b: the step size of each block alone; the cap if no curvature is known."""
        cap, found = float(self.param_groups[0]["lr"]), {}
        for name in self._blocks:
            curvature = curvatures.get(name, 0.0)
            found[name] = min(cap, self._limit() / curvature if curvature > 0 else math.inf)
        return found

    def _largest(self, H: LinearOperator, diagonal: Tensor | None, start: Tensor | None) -> tuple[float, Tensor]:
        """λ_max of D H D and its eigenvector. The residual is added: few products find a value below λ_max.

        The error bar is not: from four products it is several times λ_max, and would stop the training.
        """
        found = lanczos(
            H if diagonal is None else DiagonallyScaled(H, diagonal),
            1,
            "LA",
            matvecs=self._matvecs,
            seed=self._seed + self._known.steps,
            start=start,
            vectors=True,
        )
        assert found.vectors is not None
        return found[0].value + found.residuals[0], found.vectors[:, 0]

    def _roots(self) -> dict[str, Tensor] | None:
        """P^-½ by parameter; None for P = 1."""
        group = self.param_groups[0]
        if group["base"] == "sgd":
            return None
        named = dict(self._model.named_parameters())
        return {name: _preconditioner(self.state[named[name]], named[name], group).rsqrt() for name in self._members}

    # ---- steps

    def _directions(self) -> dict[str, Tensor]:
        """By parameter, what is subtracted times the step size; updates the running means of the base."""
        group, named = self.param_groups[0], dict(self._model.named_parameters())
        found = {}
        for name in self._members:
            parameter = named[name]
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise ModelError(name, "has a sparse gradient; use a dense embedding")
            state = self.state[parameter]
            if group["base"] == "sgd":
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                found[name] = state["momentum"].mul_(group["momentum"]).add_(gradient)
                continue
            first, second = group["betas"]
            if "step" not in state:
                state.update(step=torch.zeros(()), mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
            state["step"] += 1
            state["mean"].lerp_(gradient, 1 - first)
            state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            corrected = state["mean"] / (1 - first ** float(state["step"]))
            found[name] = corrected / _preconditioner(state, parameter, group)
        return found

    def _rates(self, name: str, parameter: Tensor, rates: Mapping[str, float]) -> Tensor | float:
        """The step size of a parameter: a number, or one per entry if it holds several blocks."""
        members = self._members[name]
        if len(members) == 1:
            return rates[members[0]]
        found = torch.empty_like(parameter)
        for member in members:
            for piece in self._blocks[member].pieces:
                if piece.parameter == name:
                    piece.of(found).fill_(rates[member])
        return found


def _stability(group: Mapping[str, Any]) -> float:
    """κ: on a quadratic of curvature λ, after preconditioning, the iteration is stable for step sizes below κ/λ."""
    if group["base"] == "sgd":
        return float(2 * (1 + group["momentum"]))
    first = group["betas"][0]
    return float(2 * (1 + first) / (1 - first))


def _preconditioner(state: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """sqrt(v) + eps, v the bias-corrected mean square of the gradients; 1 before the first gradient."""
    if "square" not in state:
        return torch.ones_like(parameter)
    corrected = state["square"] / (1 - group["betas"][1] ** float(state["step"]))
    return corrected.sqrt().add_(group["eps"])


def _members(blocks: Blocks, named: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """The blocks that make up each trainable parameter; an error if some entry is in no block or in two."""
    members: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for name, block in blocks.items():
        for piece in block.pieces:
            held = members.setdefault(piece.parameter, [])
            if name not in held:
                held.append(name)
            sizes[piece.parameter] = sizes.get(piece.parameter, 0) + piece.size
    for name, parameter in named.items():
        if parameter.requires_grad and sizes.get(name) != parameter.numel():
            raise ShapeError(
                "blocks",
                f"hold {sizes.get(name, 0)} of the {parameter.numel()} entries of {name!r}; each trainable entry must "
                "be in exactly one block: freeze what is not to be trained, or leave `blocks` out",
            )
    return members
