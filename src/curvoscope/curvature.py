"""`hessian`: the loss Hessian of any torch model over named blocks."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from curvoscope import checks
from curvoscope.approximations.enumeration import enumerated, sampled
from curvoscope.approximations.gradients import GradientSource
from curvoscope.approximations.stand_ins import ModelStandIns
from curvoscope.autodiff.batches import BatchError, Batches
from curvoscope.autodiff.compiled import Compiled
from curvoscope.autodiff.coupled import Coupled
from curvoscope.autodiff.differences import Differences, differentiable_twice
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.graph import SecondDerivativeError
from curvoscope.autodiff.matrix import AutodiffMatrix, AutodiffParts
from curvoscope.autodiff.output_jacobian import output_jacobian
from curvoscope.blocks import Block, Blocks
from curvoscope.closed.closed_forms import ClosedForms
from curvoscope.closed.gauge import Gauge, factors_of
from curvoscope.closed.layer_curvatures import CurvatureAtOutput, layer_curvatures
from curvoscope.closed.layers import ClosedFormLayers
from curvoscope.closed.plan import Choice, Plan, PlannedBlock
from curvoscope.distributed.mesh import Mesh, sharded_ranks
from curvoscope.distributed.ranks import RankError, mesh_of, ranks_of
from curvoscope.distributed.sharded import Aligned, Sharded, ShardedDifferences
from curvoscope.distributed.sharded_operators import ShardedMatrix, ShardedParts
from curvoscope.errors import CompileWarning, ModelError
from curvoscope.estimate.products import DEFAULT_MATVECS
from curvoscope.families.adapters import adapters_of
from curvoscope.families.block_maps import blocks_of, trainable
from curvoscope.losses import MSE, CrossEntropy, LossFunction, MeanLoss, objective_of
from curvoscope.losses.objectives import Objective
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import PARTS, BlockHessian
from curvoscope.settings import chosen_seed, settings

__all__ = [
    "BatchError",
    "CrossEntropy",
    "MeanLoss",
    "MeanSquaredError",
    "ModelHessian",
    "Plan",
    "RankError",
    "SecondDerivativeError",
    "blocks_of",
    "hessian",
    "trainable",
]

MeanSquaredError = MSE  # its name in this module before layers and models shared their losses


class ModelHessian(BlockHessian):
    """The Hessian of a model's loss: `total`, `outer` and `functional` from the same kept graphs.

    The total is a double backward pass of its own, not the sum of the two parts: it costs less than they do. Single
    blocks are in closed form if one is known, products with the whole matrix always take one pass of autodiff.
    Made by `cv.hessian`. To ask for a block (`H["h.0.attn.Q"]`) or for the `plan` computes nothing; what a block is
    asked does, and what was computed is kept.

    Args:
        engine: the model, the loss and the batches, ready for products.
        closed: the blocks in closed form, if any.
        why: the plan's reason for blocks without one.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(3, 2).double()
        >>> data = torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [data])
        >>> H.names, H.shape, H.method_of("bias")
        (['weight', 'bias'], (8, 8), 'autodiff')
    """

    def __init__(self, engine: Autodiff, closed: ClosedForms | None = None, why: str = "method='autodiff'") -> None:
        known = None if closed is None else closed.block
        self._stand_ins = cache(lambda: ModelStandIns(engine))
        self.outer, self.functional, self.total = (
            ShardedMatrix(engine, part, engine.blocks)
            if isinstance(engine, Sharded)
            else AutodiffMatrix(engine, part, engine.blocks, known, self._stand_ins)
            for part in PARTS
        )
        self.loss = engine.survey.loss
        self.terms = engine.survey.total
        self._blocks, self._engine, self._closed, self._why = engine.blocks, engine, closed, why
        self._plan: tuple[tuple[int, str], Plan] | None = None

    @property
    def stand_ins(self) -> ModelStandIns:
        """Preconditioners of its blocks, made of approximations."""
        return self._stand_ins()

    @property
    def plan(self) -> Plan:
        """How each block and part is computed, why, and at what cost; `print(H.plan)` for a table. Nothing is computed
        for it; what was found out by computing is in it."""
        known = 0 if self._closed is None else self._closed.verified, self._engine.note
        if self._plan is None or self._plan[0] != known:
            rows = (self._planned(name, part) for name in self._blocks for part in PARTS)
            self._plan = known, Plan(tuple(rows))
        return self._plan[1]

    def _planned(self, name: str, part: str) -> PlannedBlock:
        block = self._blocks[name]
        choice = Choice(False, self._why) if self._closed is None else self._closed.planned(block, part)
        if choice.exact:
            return PlannedBlock(name, part, "exact", choice.reason, choice.products, choice.bytes)
        products = min(block.size, DEFAULT_MATVECS)
        reason = "; ".join(filter(None, (choice.reason, self._engine.note)))
        return PlannedBlock(name, part, self._engine.method, reason, products, self._engine.product_bytes)

    def method_of(self, name: str, part: str = "total") -> str:
        """How a diagonal block is computed: "exact", "autodiff" or "difference".

        A closed form is verified first, if it has not been yet, which runs the model; `plan` says without a run what
        will be tried.

        Args:
            name: of the block.
            part: "outer", "functional" or "total".

        Returns:
            The method.
        """
        checks.choice("part", part, PARTS)
        checks.block_named("block", name, self._blocks)
        exact = self._closed is not None and self._closed.reason(self._blocks[name], part) is None
        return "exact" if exact else self._engine.method

    def stacked(self, column: str, rows: Sequence[str] | None = None) -> LinearOperator:
        """The outer and the functional part of a column of blocks, one below the other: both from one pass.

        A product with it costs little more than one with the total, and gives all three parts: H v is the sum of the
        two halves.

        Args:
            column: the name of the block of the columns.
            rows: names of the blocks of the rows; None: the diagonal block alone.

        Returns:
            (2R, C): R entries in all rows, C in the column.

        Example:
            >>> import torch, curvoscope as cv
            >>> model = torch.nn.Linear(3, 2).double()
            >>> data = torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
            >>> H = cv.hessian(model, torch.nn.MSELoss(), [data])
            >>> H.stacked("bias", H.names).shape
            (16, 2)
        """
        names = [column] if rows is None else list(rows)
        for name in [column, *names]:
            checks.block_named("block", name, self._blocks)
        several, engine = [self._blocks[name] for name in names], self._engine
        if isinstance(engine, Sharded):
            return ShardedParts(engine, several, self._blocks[column])
        return AutodiffParts(engine, several, self._blocks[column])

    @property
    def weights(self) -> Tensor:
        """The weights at which the Hessian was taken, (P,), in the order of `names`."""
        snapshot = self._engine.snapshot
        snapshot.check()
        return self._blocks.gather({name: snapshot.weight(name) for name in self._blocks.parameters})

    @property
    def objective(self) -> Objective:
        """The loss, with its terms counted."""
        return self._engine.objective

    def output_jacobian(self, inputs: Any) -> Tensor:
        """The derivative of the model's outputs in the weights, one backward pass for each output.

        Args:
            inputs: what the model is called with: a tensor, a tuple or a dict.

        Returns:
            (rows, outputs per row, P), for a model whose output is a tensor or has `logits`; rows must not meet in it.
        """
        return output_jacobian(self._engine, inputs)

    def gradient_source(self, name: str, samples: int | None = None, seed: int = 0) -> GradientSource:
        """Gradients gamma of a block whose sum of gamma gamma^T is H, its Gauss-Newton part: what `cv.approximations`
        are made of.

        Args:
            name: of the block, or of a head of it.
            samples: random gradients, one backward pass each, down to the layer of the block; the mean of
                gamma gamma^T is H in expectation. None: all gradients, one backward pass for each direction of the
                loss Hessian, so for small models.
            seed: of the random gradients.

        Returns:
            The gradients.
        """
        checks.whole(1, samples=samples)
        seed, block = chosen_seed(seed), self._block(name)
        return enumerated(self._engine, block) if samples is None else sampled(self._engine, block, samples, seed)

    def _block(self, name: str) -> Block:
        whole, _, number = name.rpartition(".")
        if name not in self._blocks and whole in self._blocks and number.isdecimal() and self._blocks[whole].heads:
            return self._blocks[whole].head(int(number))
        checks.block_named("block", name, self._blocks)
        return self._blocks[name]

    def gauge(self) -> Gauge:
        """The directions along which low-rank adapters move and the model does not: (A, B) -> (A S, S^-1 B).

        Of each adapter whose A and B are blocks of this Hessian.

        Returns:
            A `Gauge`: the directions, their number, and the Hessian without them, `H.gauge().projected(H.total)`.
        """
        if isinstance(self._engine, Sharded):
            raise ModelError("model", "is sharded: no rank has the whole of an adapter")
        self._engine.snapshot.check()
        weights = self._engine.snapshot.parameters(self._engine.snapshot.weights)
        found = factors_of(adapters_of(self._engine.model), self._blocks, self.total.ranges, weights)
        return Gauge(self.shape[0], found)

    @property
    def difference_error(self) -> float | None:
        """The relative error of the worst product so far, as estimated; None if products are exact, or not yet
        made."""
        return self._engine.error

    def layer_curvatures(self) -> Iterator[CurvatureAtOutput]:
        """The Hessian S of the loss at the output of each attention and feed-forward layer, with its functional part,
        the layer's Jacobian and its attention moments. For one batch, as S has the shape of the layer's output."""
        if self._engine.ranks.size > 1:
            raise ModelError("process_group", "layer_curvatures runs in one process; omit process_group")
        layers = ClosedFormLayers(self._engine.model, self._blocks.whole, blocks_of(self._engine.model))
        return layer_curvatures(ClosedForms(self._engine, layers, limited=False))


def hessian(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    blocks: Blocks | None = None,
    method: str = "auto",
    split: str = "model",
    micro_batch: int | None = None,
    device: torch.device | str | None = None,
    memory_limit: int | None = None,
    process_group: object = None,
    hvp: str = "autodiff",
    copy: bool = False,
    recompute: str | None = None,
    compile: bool = False,
) -> ModelHessian:
    """The Hessian of the mean loss over all batches, at the weights that the model has now.

    Args:
        model: any module, in the mode in which its loss is deterministic (`model.eval()`). It is left as it is.
        loss_fn: `loss_fn(outputs, targets)`, a mean over loss terms. Batches are weighted by their numbers of terms,
            so that the result does not depend on how the data is cut: `CrossEntropy` (and torch's) counts the targets
            that are not ignored, `cv.losses.MSE` (and torch's) the entries. For any other function the number is
            found by comparing batches with parts of themselves (a sum over rows stays a sum); a function that no
            number explains is refused, unless there is one batch: give `cv.losses.MeanLoss(function, terms)`, or
            `cv.losses.Contrastive(function)` if rows meet in it. `cv.losses.Regularised(loss, penalty)` adds a penalty
            on the parameters. None: the loss that a Hugging Face model has for its labels.
        batches: a list, a DataLoader without shuffling, or any iterable that can be walked again, of
            (inputs, targets), the model being called as model(inputs), model(*inputs) for a tuple, model(**inputs)
            for a dict; or of dicts with "labels", the model being called with the other entries. An encoder-decoder
            without decoder_input_ids is called with the labels, from which it makes them. Or a `datasets.Dataset` with
            a column "labels" or "label", which is read into memory; texts in it are left out.
        blocks: named parameters, from `blocks_of(model)`, no entry in two of them; None: all that are not frozen.
        method: how single blocks are computed. "autodiff": by products, with estimates. "exact": in closed form,
            which attention and feed-forward layers have if all their blocks are named, which `blocks_of(model, batch)`
            does for most models; an error for any other block. "auto":
            in closed form if there is one, and if the loss Hessian at the layer's output costs less than the products
            it saves; a part that needs none is always in closed form. `H.plan` says which block and part gets what.
        split: where outer | functional is cut: at the "model"'s output (Gauss-Newton), or at the output of the "layer"
            that each block belongs to. There the parts exist within one layer only, and the functional part needs the
            gradient at the layer's output alone.
        micro_batch: rows at a time; None: a batch at a time.
        device: where to compute; None: where the model is.
        memory_limit: bytes for the graphs kept between products; graphs that do not fit are recomputed in each product.
            None: a part of the free memory.
        process_group: the processes whose batches count, a group of torch.distributed, or "world" for its default one.
            Each of them gives batches of its own, as many as it has (also none), for the same model and blocks, and
            then makes the same calls: products and closed forms are summed over all, every answer is the same
            everywhere. A call fails on all when it fails on one. None: this process alone; so is
            `torch.distributed.group.WORLD` before it is initialised, where "world" is an error. A `DistributedSampler`
            repeats rows to give all ranks as many: those would count twice. For a sharded model: see below.
        hvp: how products are made. "autodiff": exactly, by a second derivative. "difference": by central differences
            of gradients, for models that have no second derivative in autograd (torch's fused attention kernels, own
            functions that are `once_differentiable`); the step is searched for each vector, and `difference_error`
            tells how far off the products are. Nothing is computed in closed form then. "auto": one product by autodiff
            tells which of the two it is to be; `method_of` says "autodiff" or "difference".
        copy: whether to copy the weights. Otherwise the Hessian shares them with the model: once they have changed, as
            by an optimizer, it raises a `ChangedWeightsError`. A copy keeps it as it is.
        recompute: "layer" keeps the inputs of the model's layers (of its `nn.ModuleList`) instead of all activations,
            and recomputes the inside of each layer in every product, which takes about twice as long.
        compile: whether `torch.compile` turns the product with all blocks into one program, when the first one is
            computed. Compiling takes as long as many products, a minute for some models; on a CPU it needs a C++
            compiler. The program must agree with the eager product. If it does not, or torch cannot compile it,
            products stay eager, and a `CompileWarning` says why. `H.plan` reports the outcome.

    Half-precision weights are converted: operators, vectors and sums are float32, and the weights are copied.

    A model whose parameters are DTensors (`torch.distributed.fsdp.fully_shard`) is known by them, and the ranks are
    those of its mesh; each gives batches of its own. Vectors are spread like the parameters: `H @ v` takes and gives,
    block by block, the entries whose parameters the rank holds, and no rank ever holds a whole vector. Parameters are
    gathered module by module, as they are for training; second derivatives are exact. Traces, norms, eigenvalues and
    densities are Estimates, the same on all ranks and, to rounding, the same as of the model in one piece; `dense()`,
    `diagonal()` and closed forms raise. Should the model fail on one rank in the middle of a pass, or that process end,
    the others raise a RankError at once; should it hang, when the timeout of the group is over.

    Returns:
        The Hessian over the blocks, (P, P) with P their entries in all. The model has run on every batch, for the loss;
        everything else is computed when it is asked for.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
        >>> X, Y = torch.randn(2, 3, 5, 4, dtype=torch.float64)
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)], blocks=cv.blocks_of(model).select("*.attn.[QKV]"))
        >>> H.names
        ['h.0.attn.Q', 'h.0.attn.K', 'h.0.attn.V']
        >>> H["h.0.attn.Q"].shape, (H @ torch.ones(48, dtype=torch.float64)).shape
        ((16, 16), torch.Size([48]))
        >>> float(H["h.0.attn.Q"].frobenius_norm()) > 0, H.method_of("h.0.attn.Q")
        (True, 'exact')
    """
    checks.choice("method", method, ("auto", "exact", "autodiff"))
    checks.choice("hvp", hvp, ("autodiff", "difference", "auto"))
    checks.choice("recompute", recompute or "layer", ("layer",))
    checks.module(model)
    if isinstance(model, DistributedDataParallel):
        raise ModelError("model", "is wrapped in DistributedDataParallel; give model.module, and process_group")
    mesh = mesh_of(model)
    ranks = ranks_of(process_group) if mesh is None else sharded_ranks(mesh, process_group)
    with ranks.together(), settings(memory_limit=memory_limit):
        budget = checks.memory_budget()
    with ranks.together():
        everything = blocks_of(model)
        if blocks is not None and not isinstance(blocks, Blocks):
            hint = "expected cv.blocks_of(model), or some of it by .select(pattern, ...)"
            raise ModelError("blocks", f"got {type(blocks).__name__}, {hint}")
        if blocks is None:
            blocks = trainable(model, everything)
        layers = ClosedFormLayers(model, *([blocks.whole] if blocks.whole.covers(model) else []), everything)
        found = Batches(batches, micro_batch, may_be_empty=ranks.size > 1)
        objective = objective_of(loss_fn)
        products_only = mesh is not None or hvp == "difference"
        coupled = objective is not None and objective.couples_rows and micro_batch is not None
        _check_together(method, recompute, compile, products_only, coupled)
    walked = Aligned(found, ranks) if isinstance(ranks, Mesh) else found
    arguments = model, objective, walked, blocks, split, device, budget, layers.sites, ranks, copy, recompute
    exact, by_gradients = (Sharded, ShardedDifferences) if isinstance(ranks, Mesh) else (Autodiff, Differences)
    exact = Coupled if coupled else Compiled if compile else exact
    make = by_gradients if hvp == "difference" else exact
    with nullcontext() if isinstance(ranks, Mesh) else layers.measuring():
        engine: Autodiff = make(*arguments)
    if hvp == "auto" and not differentiable_twice(engine):
        engine = by_gradients(*arguments)
        if compile:
            said = "compile: got True, but products are differences of gradients, which are not compiled"
            warnings.warn(said, CompileWarning, stacklevel=2)
    why = _products_alone(engine, mesh is not None, coupled)
    if why is not None and method == "exact":
        raise ModelError("method", f"got 'exact', but {why}; use 'auto'")
    if why is not None or method == "autodiff":
        return ModelHessian(engine) if why is None else ModelHessian(engine, why=why)
    closed = ClosedForms(engine, layers, limited=method == "auto")
    if method == "exact":
        closed.require(blocks)
    return ModelHessian(engine, closed)


def _products_alone(engine: Autodiff, sharded: bool, coupled: bool) -> str | None:
    """Why there is no closed form, whatever the layers; None if there may be one."""
    if sharded:
        return "the model is sharded"
    if engine.method == "difference":
        return "products are differences of gradients"
    if coupled or engine.objective.reads_parameters:  # no closed form sees the loss through one layer's output
        return f"{type(engine.objective).__name__} has products only"
    return None


def _check_together(method: str, recompute: str | None, compile: bool, products_only: bool, coupled: bool) -> None:
    """Options of `hessian` that exclude each other."""
    others = "sharded models and differences"
    for argument, is_wrong, message in (
        ("method", method == "exact" and products_only, f"got 'exact', but {others} have products only"),
        ("recompute", recompute and products_only, f"got 'layer', but {others} have their own; leave it out"),
        ("compile", compile and products_only, f"got True, but {others} are not compiled"),
        ("compile", compile and recompute, "got True, but products with recompute are not compiled"),
        ("compile", compile and coupled, "got True, but the loss compares rows; leave micro_batch out"),
        ("micro_batch", coupled and products_only, f"the loss compares rows: {others} need whole batches"),
    ):
        if is_wrong:
            raise ModelError(argument, message)
