"""`sweep`: the Gauss-Newton part of every block of a model, from sampled backward passes."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from curvoscope import checks
from curvoscope.approximations.gradients import GradientSource
from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.layer_calls import NotRepeatableError, without_cache
from curvoscope.blocks import Blocks
from curvoscope.distributed.ranks import mesh_of, ranks_of
from curvoscope.errors import ModelError, NonFiniteError
from curvoscope.estimate.progress import Ticker
from curvoscope.families.block_maps import chosen_blocks
from curvoscope.losses import LossFunction, objective_of
from curvoscope.settings import chosen_seed
from curvoscope.sweep.plan import CHUNK, MOST, SweepPlan, planned
from curvoscope.sweep.result import Sweep
from curvoscope.sweep.statistics import LEAST
from curvoscope.sweep.walk import SampleDraw, UnlikeHeadsError, UnseenUseError, Walk

_AGREE = 2e-2  # relative difference of a squared length that is found in two ways
_SHARE = 0.5  # of the memory that a chunk may use
KEPT = 2**28  # bytes of samples that are kept without being asked for


def sweep(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    blocks: Blocks | None = None,
    tolerance: float = 0.05,
    samples: int | None = None,
    seed: int | None = None,
    micro_batch: int | None = None,
    device: torch.device | str | None = None,
    process_group: object = None,
    earlier: Sweep | None = None,
    tell: Callable[[Sweep], None] | None = None,
    keep: Sequence[str] | None = None,
    observe: Callable[[int, GradientSource], None] | None = None,
    plan: Callable[[SweepPlan], None] | None = None,
) -> Sweep:
    """Traces, norms and effective ranks of the Gauss-Newton part of every block, from a few dozen backward passes.

    With S = d2l/dz2 at the model's output z, draw g with E[g g^T] = S. One backward pass of g gives the cotangent delta
    at the output of every layer; the gradient of a weight is gamma_b = X^T delta, and E[gamma_b gamma_c^T] = H_bc, the
    Gauss-Newton block, for all b and c at once. The answers follow from the Gram matrices K_b[i, j] = <gamma_b^i,
    gamma_b^j> = <X X^T delta^i, delta^j>: no gradient of a weight is formed, so a sample costs a third of a gradient.

    Args:
        model: any module, in the mode in which its loss is deterministic (`model.eval()`). It is left as it is.
        loss_fn: as for `cv.hessian`; its Hessian in the outputs must be positive semidefinite.
        batches: as for `cv.hessian`. Each sample takes one of them, drawn with its share of the loss as probability.
        blocks: named parameters; None: all that are not frozen. Heads are swept with them.
        tolerance: samples are drawn, 64 at a time, until half of the norms have a relative standard error below this,
            and 95 % of them below twice this, or until there are 1,024.
        samples: their number, instead of a tolerance.
        seed: of the samples; by default that of `cv.settings`.
        micro_batch: rows at a time; None: a batch at a time.
        device: where to compute; None: where the model is.
        process_group: the processes whose batches count, as for `cv.hessian`: each gives batches of its own, walks the
            samples of these, and has the same answers in the end.
        earlier: a sweep of the same model to continue: its samples are kept, new ones are added.
        tell: called with the sweep so far whenever another block is known. Ctrl-C ends `cv.sweep`; what was told
            stays.
        keep: shell patterns of blocks whose samples, X and delta, stay in the sweep, for `cv.approximations` and
            `cv.analysis.audit`. They take the memory of the layer's activations times the number of samples. None:
            those of all linear layers if they take at most 256 MiB and a quarter of the memory at hand, with those
            of `earlier`; otherwise none, and none if `observe` is given.
        observe: called with the number of the chunk of samples and the samples of a block, as soon as they are known.
            They need not be kept: this is how a large model is audited.
        plan: called once, after the first backward pass, with the number of samples and the time that they will take.

    Returns:
        The sweep, which answers `trace(name)`, `frobenius_norm(name, other)`, `effective_rank(name)`,
        `largest_eigenvalue(name)`, `norms()` and `table()`.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        >>> X, labels = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
        >>> sweep = cv.sweep(model, torch.nn.CrossEntropyLoss(), [(X, labels)], samples=256)
        >>> truth = cv.hessian(model, torch.nn.CrossEntropyLoss(), [(X, labels)]).outer
        >>> low, high = sweep.frobenius_norm("0.weight", "2.weight").interval(0.999)
        >>> bool(low < truth["0.weight", "2.weight"].dense().norm() < high)
        True
    """
    seed = chosen_seed(seed) % 2**63
    checks.module(model)
    checks.at_least(LEAST, samples=samples)  # pairs of samples need an error bar
    checks.positive(tolerance=tolerance)
    if isinstance(model, DistributedDataParallel):
        raise ModelError("model", "is wrapped in DistributedDataParallel; give model.module")
    if mesh_of(model) is not None:
        raise ModelError("model", "is sharded, and a sweep needs it in one piece; use cv.hessian(...).outer")
    ranks = ranks_of(process_group)
    with ranks.together():
        blocks = chosen_blocks(model, blocks)
        found = Batches(batches, micro_batch, may_be_empty=ranks.size > 1)
    with without_cache(model):
        engine = Autodiff(model, objective_of(loss_fn), found, blocks, device=device, ranks=ranks)
        return _Sweeping(engine, seed, earlier, tell, keep, observe, plan).until(tolerance, samples)


class _Sweeping:
    """A sweep that is being made."""

    def __init__(
        self,
        engine: Autodiff,
        seed: int,
        earlier: Sweep | None,
        tell: Callable[[Sweep], None] | None,
        keep: Sequence[str] | None = None,
        observe: Callable[[int, GradientSource], None] | None = None,
        plan: Callable[[SweepPlan], None] | None = None,
    ) -> None:
        self._engine, self._seed, self._tell, self._observe, self._plan = engine, seed, tell, observe, plan
        self._keep = set(engine.blocks.select(*keep)) if keep else set()
        self._room = KEPT if keep is None and observe is None else 0  # bytes for samples of any linear layer
        self._rows = engine.blocks.per_head()
        self._batches = [  # of all ranks: the rank, the number there, and the share in the loss
            (rank, number, weight)
            for rank, weights in enumerate(engine.ranks.exchange(engine.survey.weights))
            for number, weight in enumerate(weights)
        ]
        self._weights = torch.tensor([weight for _, _, weight in self._batches], dtype=torch.float64)
        if earlier is not None and not isinstance(earlier, Sweep):
            raise ModelError("earlier", f"got a {type(earlier).__name__}, expected what cv.sweep has returned")
        chunks, kept = ([], []) if earlier is None else (earlier.chunks, earlier.kept)
        self._kept = [dict(chunk) for chunk in kept]  # of all chunks; `earlier` keeps its own
        self.sweep = Sweep(engine.blocks, chunks, engine.survey.loss, self._kept)
        if earlier is not None and earlier.blocks.sizes != engine.blocks.sizes:
            raise ModelError("earlier", "is a sweep of other blocks")
        if earlier is not None and abs(earlier.loss - self.sweep.loss) > _AGREE * abs(self.sweep.loss):
            raise ModelError("earlier", f"has the loss {earlier.loss:.6g}, not {self.sweep.loss:.6g}: of other data?")
        self._first = len(self.sweep.chunks)  # the chunk whose first sample is checked
        self._cut, self._apart = True, True
        self._surveyed = False  # whether to look at all batches of a chunk first: they use different parameters
        self._about = ""  # how many samples there will be

    def until(self, tolerance: float, samples: int | None) -> Sweep:
        """Add chunks until there are enough samples."""
        self._examine()
        if self._plan is not None:
            known = self.sweep.samples
            self._plan(planned(tolerance, samples, known, self._gradient_seconds, len(self._batches)))
        wanted = MOST if samples is None else samples
        if samples is not None:
            self._about = f" of {samples}"
        while self.sweep.samples < wanted:
            if samples is None and self.sweep.samples:
                needed = self.sweep.needed(tolerance)
                if needed <= self.sweep.samples:
                    break
                self._about = f" of about {min(needed, MOST)}"
            left = wanted - self.sweep.samples
            count = min(self._at_once, left)
            if 0 < left - count < LEAST:  # a chunk that is too small has no pairs to speak of
                count = left if left <= 2 * LEAST else left - LEAST
            self._add(count)
        return self.sweep

    def _examine(self) -> None:
        """Run the model whole, once, and see how many samples fit into the memory."""
        scale = float(self._weights.sum()) ** 0.5
        with self._engine.running():
            shown = self._take if self._keep or self._room or self._observe is not None else None
            self._walk = Walk(self._engine, self._rows, scale, self._cut, self._apart, shown)
            draws, _ = self._draws(1, self._first)
            start = time.perf_counter()
            self._lengths, one = self._walk.examine(draws)
            self._gradient_seconds = max(self._engine.ranks.exchange(time.perf_counter() - start))
        budget = min(self._engine.ranks.exchange(int(_SHARE * checks.memory_budget())))
        checks.fits(
            LEAST * one,
            budget,
            f"{LEAST} samples of the widest layer",
            "give shorter sequences or a smaller micro_batch=",
        )
        self._room = min(self._room, budget // 2)  # the other half is for the samples of a layer
        self._at_once = max(LEAST, min(CHUNK, budget // max(one, 1)))

    def _draws(self, count: int, chunk: int) -> tuple[list[SampleDraw], list[int]]:
        """The samples of a chunk that this rank has the batches of, by micro-batch, numbered so that those of a batch
        follow each other; and where each sample of the chunk was drawn."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + chunk) % 2**63)
        drawn = torch.multinomial(self._weights, CHUNK, replacement=True, generator=generator)[:count].tolist()
        order = sorted(range(count), key=drawn.__getitem__)
        own = {
            number: place for place, (rank, number, _) in enumerate(self._batches) if rank == self._engine.ranks.rank
        }
        wanted = {number for number, place in own.items() if place in drawn}
        found = {own[i]: SampleDraw(batch) for i, batch in enumerate(self._engine.micro_batches()) if i in wanted}
        for number, draw in enumerate(order):
            if drawn[draw] in found:
                found[drawn[draw]].samples.append(number)
                found[drawn[draw]].seeds.append((self._seed, chunk * CHUNK + draw))
        return list(found.values()), order

    def _take(self, source: GradientSource) -> None:
        """The samples of a block in this chunk."""
        # mixed, so that the halves have nothing in common with the draws; torch reads 32 bits of a seed
        mixed = np.random.SeedSequence((self._seed, len(self.sweep.chunks))).generate_state(1)
        source = replace(source, seed=int(mixed[0]))
        if source.name in self._keep or (self._room and source.parts[0].inputs is not None):
            self._kept[-1][source.name] = source
        if self._room and sum(one.bytes for chunk in self._kept for one in chunk.values()) > self._room:
            self._room = 0
            for chunk in self._kept:
                chunk.clear()
            self._walk.show_no_more()
        if self._observe is not None:
            self._observe(len(self.sweep.chunks), source)

    def _add(self, count: int) -> None:
        """One more chunk; of the whole model at once, if its layers cannot be run alone."""
        done = False
        while not done:
            try:
                self._add_chunk(count)
                done = True
            except NotRepeatableError as error:
                self._kept.pop()
                if isinstance(error, UnlikeHeadsError) and self._apart:
                    self._apart = False
                elif isinstance(error, UnseenUseError) and not self._surveyed:
                    self._surveyed = True
                elif self._cut:
                    self._cut = False
                else:
                    raise
                self._examine()

    def _add_chunk(self, count: int) -> None:
        chunk, grams = len(self.sweep.chunks), dict[str, Tensor]()
        kept: dict[str, GradientSource] = {}
        self._kept.append(kept)
        so_far = Sweep(self._engine.blocks, [*self.sweep.chunks, grams], self.sweep.loss, self._kept)
        done = self.sweep.samples
        ticker = Ticker(f"sweep, samples {done + 1} to {done + count}{self._about}", len(self._rows))

        def tell(name: str, gram: Tensor) -> None:
            bad = (~gram.diagonal().isfinite()).nonzero().flatten().tolist()
            if bad:
                own = next((draw.batch.index for draw in draws if bad[0] in draw.samples), None)
                where = "a batch of another rank" if own is None else f"batch {own}"
                raise NonFiniteError("batches", f"the sampled gradient of {name!r} is not finite on {where}")
            grams[name] = checks.finite(name, gram)
            ticker.advance(1)
            if self._tell is not None:
                self._tell(so_far)

        with self._engine.running():
            draws, order = self._draws(count, chunk)
        try:
            with self._engine.running():
                if self._surveyed:
                    self._walk.survey(draws)
                self._walk.run(draws, count, tell)
        finally:
            ticker.close()
        if chunk == self._first:
            self._check(grams, order.index(0))
        self.sweep = so_far

    def _check(self, grams: dict[str, Tensor], sample: int) -> None:
        """The squared length of the sample drawn first must be that of a plain backward pass."""
        largest = max(self._lengths.values(), default=0.0)
        for name, expected in self._lengths.items():
            found = float(grams[name][sample, sample])
            if abs(found - expected) > _AGREE * expected + 1e-6 * largest:
                raise NotRepeatableError(
                    "model", f"a sampled gradient of {name!r} has the squared length {found:.6g}, not {expected:.6g}"
                )
