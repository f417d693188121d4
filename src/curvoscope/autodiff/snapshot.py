"""A model evaluated at the weights that it had, and a first look at its loss on all batches."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.autodiff.batches import Batch, BatchError
from curvoscope.autodiff.graph import Operation, operations
from curvoscope.autodiff.hooks import Written
from curvoscope.autodiff.safety import WeightWatch, can_be_watched, check_reads, in_modes, rewritten_by, within
from curvoscope.blocks import Blocks
from curvoscope.distributed.ranks import Ranks
from curvoscope.errors import CurvoscopeError, DeviceError, EmptyError, LossError, ModelError, NonFiniteError
from curvoscope.losses import MSE, CrossEntropy
from curvoscope.losses.counting import ROWS, SUM, conclude
from curvoscope.losses.objectives import BinaryCrossEntropy, Objective, logits_of
from curvoscope.losses.outputs import change, flatten

_SAME_LOSS = 1e-5  # relative: models may add up in another order, and in float32
_ROUNDING = 64  # times epsilon: what two identical calls may differ by, with threads adding in different orders


class Snapshot:
    """The model at the weights that it has now, on one device, in the precision of the computation.

    The precision is that of the widest parameter of the blocks, float32 at least. Weights that have it already are
    shared with the model, unless `copied`: `check` raises once they have changed.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, device: torch.device, copied: bool = False) -> None:
        self._model, self.device = model, device
        named = dict(model.named_parameters())
        structural = list(nn.Module.named_parameters(model, remove_duplicate=True))
        places = {id(tensor): path for path, tensor in structural}
        # All places of each, whatever names the model gives: tied tensors are replaced in all of them.
        self._ties = {path: places[id(t)] for path, t in nn.Module.named_parameters(model, remove_duplicate=False)}
        buffers = {id(tensor): path for path, tensor in nn.Module.named_buffers(model)}
        self._ties |= {path: buffers[id(t)] for path, t in nn.Module.named_buffers(model, remove_duplicate=False)}
        # Where parameters stand in the tree of modules, by the names that the model gives them; mostly the same.
        self.paths = {name: places[id(tensor)] for name, tensor in named.items() if id(tensor) in places}
        self.dtype = torch.float32
        for name in blocks.parameters:
            self.dtype = torch.promote_types(self.dtype, named[name].dtype)
        self._labelled = False  # whether targets are given to the model as `labels`, too
        rewritten = rewritten_by(model)
        shared = {path for path, tensor in structural if self._is_fit(tensor) and id(tensor) not in rewritten}
        shared -= shared if copied else set()
        self.weights = {path: t.detach() if path in shared else self._copy(t) for path, t in structural}
        self._watch = WeightWatch({path: self.weights[path] for path in sorted(shared)})
        self._buffers = {path: self._copy(tensor) for path, tensor in nn.Module.named_buffers(model)}
        self._modes = {module: module.training for module in model.modules()}

    def check(self) -> None:
        """Raise if the model has changed weights that are shared with it, or if autocast would round what is asked."""
        if self.dtype != torch.float64 and torch.is_autocast_enabled(self.device.type):
            kind = torch.get_autocast_dtype(self.device.type)
            cure = "make the Hessian and ask it outside of autocast"
            raise ModelError("model", f"torch.autocast is on, and would round numbers to {kind}; {cure}")
        self._watch.check()

    def steady(self) -> AbstractContextManager[None]:
        """Inside, `check` need not read all weights: that is done when it begins and when it ends."""
        return self._watch.steady()

    def copies(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of some parameters by path: what is made of them outlives a change of the model."""
        return {self.paths[name]: self.weight(name).clone() for name in names}

    def weight(self, name: str) -> Tensor:
        """A parameter."""
        return self.weights[self.paths[name]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that the model's function depends on, by path."""
        return {**self.weights, **self._buffers}

    def moved(self, batch: Batch) -> Batch:
        """The batch where the weights are."""
        return batch.to(self.device, self.dtype)

    def leaves(self, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All weights by path, and those of `names`, which alone have derivatives."""
        chosen = {self.paths[name] for name in names}
        weights = {path: tensor.detach().requires_grad_(path in chosen) for path, tensor in self.weights.items()}
        return weights, {name: weights[self.paths[name]] for name in names}

    def parameters(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights by the names that the model gives them."""
        return {name: weights[path] for name, path in self.paths.items()}

    def labelled(self) -> "Snapshot":
        """The same model, called with the targets as its `labels`."""
        found = copy.copy(self)
        found._labelled = True
        return found

    def __call__(self, weights: Mapping[str, Tensor], batch: Batch) -> Any:
        """The model's outputs at these weights. Tied parameters are one."""
        return self._explaining(batch, partial(self._run, weights))

    def as_it_is(self, batch: Batch) -> Any:
        """The outputs of the model at the weights that it has at this moment."""
        return self._explaining(batch, lambda arguments, keywords: self._model(*arguments, **keywords))

    def detached(self, outputs: Any) -> Any:
        """Outputs without a graph. Raise if the model's own parameters are in it, not the weights in their place."""
        derived = [leaf for leaf in flatten(outputs)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not derived:
            return outputs
        check_reads(self._model, derived)
        return change(outputs, Tensor.detach)

    def _explaining(self, batch: Batch, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        keywords = {**batch.keywords, "labels": batch.targets} if self._labelled else batch.keywords
        with in_modes(self._modes):
            return call(self._model, batch.arguments, keywords, run)

    def _run(self, weights: Mapping[str, Tensor], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return within(self._model, self.placed(weights), lambda: self._model(*arguments, **keywords))

    def placed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights, and copies of the buffers, which a run may change, by the paths of all their places."""
        tensors = {**weights, **{path: buffer.clone() for path, buffer in self._buffers.items()}}
        return {path: tensors[first] for path, first in self._ties.items()}

    def _is_fit(self, tensor: Tensor) -> bool:
        """Whether a parameter can be used as it is."""
        ready = tensor.device == self.device and (tensor.dtype == self.dtype or not tensor.is_floating_point())
        return ready and can_be_watched(tensor)

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to(self.device, copy=True)
        return copy.to(self.dtype) if copy.is_floating_point() else copy


def call(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None,
) -> Any:
    """What the model returns, and what to do about its errors if that is known. `run`: how it is called."""
    try:
        return model(*arguments, **keywords) if run is None else run(arguments, keywords)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        explained = _explained(error, model, keywords)
        if explained is None:
            raise
        raise explained from error


def _explained(error: Exception, model: nn.Module, keywords: Mapping[str, Any]) -> CurvoscopeError | None:
    """What to do about an error of the model's forward pass, if that is known."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, ValueError) and _lacks_decoder_inputs(model, keywords) and "labels" not in keywords:
        return BatchError(
            "batches",
            f"the model needs decoder_input_ids ({said}); put them into the dict of inputs, or give dicts with "
            "'labels', from which the model makes them itself",
        )
    unknown = next((name for name in keywords if f"unexpected keyword argument '{name}'" in said), None)
    if isinstance(error, TypeError) and unknown not in (None, "labels"):
        return BatchError("batches", f"the model takes no {unknown!r}; leave it out of the batches ({said})")
    if isinstance(error, IndexError) and "index out of range in self" in said:
        cure = "compare the largest with the sizes of the tables"
        return BatchError("batches", f"a token or a position lies outside of a table of the model ({said}); {cure}")
    grouped = any(word in said for word in ("grouped_mm", "mat_a", "multiple of 16 bytes"))
    if grouped and hasattr(model, "set_experts_implementation"):
        return ModelError(
            "model",
            f"its experts run in a kernel that does not take this precision or width ({said}); call "
            'model.set_experts_implementation("eager") first',
        )
    return None


def _lacks_decoder_inputs(model: nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Whether the model is an encoder-decoder and nothing is given for its decoder to read."""
    decoding = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return decoding and all(keywords.get(key) is None for key in ("decoder_input_ids", "decoder_inputs_embeds"))


@dataclass(frozen=True)
class LossSummary:
    """The loss, the mean over all terms, and the number of terms of each micro-batch.

    `total` is their sum, over those of other processes too. `written`: bytes that the forward pass of the largest
    micro-batch writes. `summed`: the loss is a sum, not a mean. `losses`: of each micro-batch. `operations`: those of
    the loss function, if G is found by differentiating it. `outputs`: numbers that the model returns for all batches.
    `full_precision`: no tensor of a forward pass has half precision, as far as is known.
    """

    loss: float
    terms: tuple[float, ...]
    total: float
    written: int = 0
    summed: bool = False
    losses: tuple[float, ...] = ()
    operations: frozenset[Operation] = frozenset()
    outputs: int = 0
    full_precision: bool = False

    @property
    def weights(self) -> list[float]:
        """Share of each micro-batch in the loss."""
        return [float(bool(count)) if self.summed else count / self.total for count in self.terms]


class Losses:
    """The losses of this process's micro-batches, and what they are means of."""

    def __init__(self, objective: Objective) -> None:
        self._objective, self._inquiry = objective, objective.inquiry()
        self.values: list[float] = []
        self._counts, self._indices = list[float](), list[int]()
        self.operations, self.outputs = frozenset[Operation](), 0

    def add(self, outputs: Any, seen: Any, batch: Batch) -> float:
        """One more micro-batch: what the model returned, and what the loss reads of it. The loss is returned."""
        count = 1.0 if self._inquiry is not None else float(self._objective.terms(seen, batch.targets))
        value = self._loss(seen, batch.targets) if count else 0.0
        if count and not self.values:
            node = self._objective.node(seen, batch.targets)
            self.operations = frozenset() if node is None else operations([node])
        if self._inquiry is not None:
            self._inquiry.add(outputs, batch.targets)
        elif not math.isfinite(value):
            raise _non_finite(value, batch.index)
        self.outputs += sum(tensor.numel() for tensor in flatten(outputs)[0] if isinstance(tensor, Tensor))
        self.values.append(value)
        self._counts.append(count)
        self._indices.append(batch.index)
        return value

    def again(self, seen: Any, batch: Batch) -> float:
        """The loss of a micro-batch, which is not counted."""
        return self._loss(seen, batch.targets) if self._counts[-1] else 0.0

    def _loss(self, seen: Any, targets: Any) -> float:
        found = self._objective(seen, targets)
        if found.requires_grad:
            raise LossError(
                "loss_fn",
                "uses parameters directly, not through the model's outputs: let the model return them, or use "
                "cv.losses.Regularised(loss, penalty)",
            )
        return float(found)

    def conclude(self, ranks: Ranks) -> tuple[Objective, list[float], list[float]]:
        """The objective with its terms counted, and losses and numbers of terms."""
        objective, counts = self._objective, self._counts
        if self._inquiry is not None:
            with ranks.together():
                evidence = self._inquiry.evidence(alone=ranks.size == 1)
            count = conclude(ranks.exchange(evidence))
            objective = objective.counted_by(count)
            by = ROWS if count == SUM else count
            counts = [float(batch.tally.number(by) or 0.0) for batch in evidence.batches]
        values = [value if number else 0.0 for value, number in zip(self.values, counts, strict=True)]
        with ranks.together():
            for value, index in zip(values, self._indices, strict=True):
                if not math.isfinite(value):
                    raise _non_finite(value, index)
        return objective, values, counts


def _non_finite(value: float, index: int) -> NonFiniteError:
    return NonFiniteError("loss_fn", f"the loss is {value} on batch {index}")


def summary(
    objective: Objective,
    values: Sequence[float],
    counts: Sequence[float],
    ranks: Ranks,
    losses: Losses,
    written: Written | None = None,
) -> LossSummary:
    """The survey of all ranks from the losses of each."""
    summed = sum(v * (float(bool(c)) if objective.summed else c) for v, c in zip(values, counts, strict=True))
    precise = written is not None and not written.half
    shares = ranks.exchange((summed, sum(counts), precise))
    total = float(sum(count for _, count, _ in shares))
    if not total:
        raise EmptyError("batches", "every target is ignored, or no rank has batches: the mean has no terms")
    loss = sum(share for share, *_ in shares) / (1.0 if objective.summed else total)
    found = tuple(values), losses.operations, losses.outputs, all(one for *_, one in shares)
    return LossSummary(loss, tuple(counts), total, written.most if written else 0, objective.summed, *found)


def survey(
    model: Snapshot, objective: Objective, batches: Iterable[Batch], ranks: Ranks
) -> tuple[LossSummary, Objective]:
    """The losses of all micro-batches, of those of the other ranks too, and the objective with its terms counted.

    The first micro-batch is run twice, to see whether its loss changes.
    """
    losses = Losses(objective)
    with ranks.together(), Written() as written:  # both runs: operations that torch has fused round otherwise inside
        for position, batch in enumerate(batches):
            batch = model.moved(batch)
            written.begin()
            outputs, seen = evaluate(model, objective, batch)
            value = losses.add(outputs, seen, batch)
            written.begin()
            if position == 0:
                check_same(value, losses.again(evaluate(model, objective, batch, again=True)[1], batch), model.dtype)
            del outputs, seen
    objective, values, counts = losses.conclude(ranks)
    return summary(objective, values, counts, ranks, losses, written), objective


def evaluate(model: Snapshot, objective: Objective, batch: Batch, again: bool = False) -> tuple[Any, Any]:
    """The outputs for a batch, without a graph, and what the loss reads of them. `again`: the batch has been seen; this
    time parameters that the model does not read from its modules are looked for."""
    with torch.set_grad_enabled(again):
        outputs = model.detached(model(model.weights, batch))
    return outputs, objective.seen(outputs, model.parameters(model.weights))


def check_same(value: float, again: float, dtype: torch.dtype) -> None:
    """Raise if the loss of two identical calls differs by more than rounding."""
    if abs(again - value) > _ROUNDING * torch.finfo(dtype).eps * abs(value):
        raise LossError(
            "model",
            f"two identical calls gave the losses {value:.8g} and {again:.8g}; call model.eval(), and remove any "
            "randomness",
        )


def check_unchanged(model: Snapshot, objective: Objective, batch: Batch, value: float, known: float) -> None:
    """Raise if the loss of a micro-batch is no longer the `known` one: model or loss have become other functions."""
    epsilon = torch.finfo(model.dtype).eps
    if abs(value - known) <= epsilon**0.5 * abs(known):
        return
    again = float(objective(evaluate(model, objective, batch)[1], batch.targets))  # rounded as it was then
    if not abs(again - known) <= _ROUNDING * epsilon * abs(known):
        raise ModelError(
            "model",
            f"its loss on batch {batch.index} is {again:.8g}, and was {known:.8g} when the Hessian was made, at the "
            "same weights: a module, a hook, a setting or the loss function has changed. Make a new Hessian",
        )


def objective_of_model(model: Snapshot, batch: Batch) -> tuple[Objective, bool]:
    """The objective that agrees with the loss which the model itself computes from its labels, and whether it needs the
    labels for its outputs, too: an encoder-decoder makes the inputs of its decoder from them."""
    batch = model.moved(batch)
    with torch.no_grad():
        try:
            outputs = model.labelled()(model.weights, batch)
        except TypeError as error:
            message = f"is None, and the model takes no `labels` ({error}); give loss_fn(outputs, targets)"
            raise LossError("loss_fn", message) from error
        expected = getattr(outputs, "loss", None)
        if not isinstance(expected, Tensor):
            raise LossError("loss_fn", "is None, and the model returns no `loss`; give loss_fn(outputs, targets)")
        errors: dict[Objective, float] = {}
        known = CrossEntropy(shift=True), CrossEntropy(), MSE(squeeze=True), BinaryCrossEntropy()
        for candidate in known:
            try:
                value = candidate(outputs, batch.targets)
            except (ValueError, TypeError, RuntimeError):  # targets of another kind
                continue
            errors[candidate] = abs(float(value) - float(expected))
        needs_labels = not _same_outputs(model, batch, outputs)
    ranked = sorted(errors, key=errors.__getitem__)
    size = abs(float(expected))
    # Before training all words are nearly alike, and so are the losses of different targets: one must stand out.
    if not ranked or errors[ranked[0]] > _SAME_LOSS * size:
        raise LossError("loss_fn", "is None, and the model's loss is not a known one; give loss_fn(outputs, labels)")
    if len(ranked) > 1 and errors[ranked[1]] <= 10 * max(errors[ranked[0]], torch.finfo(torch.float32).eps * size):
        raise LossError("loss_fn", "is None, and two losses agree with the model's here; give CrossEntropy(...)")
    return ranked[0], needs_labels


def _same_outputs(model: Snapshot, batch: Batch, labelled: Any) -> bool:
    """Whether the model gives the same logits without its labels."""
    try:
        plain = logits_of(model(model.weights, batch))
    except (CurvoscopeError, ValueError, TypeError, RuntimeError):  # it cannot run without
        return False
    found = logits_of(labelled)
    limit = _ROUNDING * torch.finfo(found.dtype).eps * float(found.abs().max())
    return plain.shape == found.shape and float((plain - found).abs().max()) <= limit


def decodes_labels(model: nn.Module, batch: Batch) -> bool:
    """Whether the model is an encoder-decoder that is to make the inputs of its decoder from the labels."""
    return batch.labelled and _lacks_decoder_inputs(model, batch.keywords)


def keywords_for(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What the model is called with: also the labels, if it is to make the inputs of its decoder from them."""
    return {**batch.keywords, "labels": batch.targets} if decodes_labels(model, batch) else batch.keywords


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device given, otherwise the one that holds all parameters."""
    found = {tensor.device for tensor in model.parameters()}
    if any(tensor.is_inference() for tensor in model.parameters()):
        raise ModelError("model", "was made in torch.inference_mode(), without derivatives; load it outside of that")
    if len(found) > 1 and device is None:
        seen = ", ".join(sorted(map(str, found)))
        raise DeviceError("model", f"has parameters on {seen}; move it with model.to(...), or give device=")
    if torch.device("meta") in found:
        raise DeviceError("model", "has parameters on the meta device, with no data; load its weights first")
    if device is None:
        return found.pop()
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise DeviceError("device", f"got {device!r}, which torch does not have here") from error
