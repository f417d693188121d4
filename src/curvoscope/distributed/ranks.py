"""One Hessian over several processes (ranks): each has batches of its own, and products are summed over all of them.

The loss is the mean over the n terms of all ranks, L = sum_r (n_r / n) L_r, and so H v = sum_r (n_r / n) H_r v: each
rank makes its own summand, and one all-reduce adds them up. Every rank holds whole vectors, and makes the same calls in
the same order with the same vectors; probes have seeds, so the estimators do that by themselves. This is checked: a
short note of what was asked travels while each rank computes, so that a mistake raises an error on all ranks instead of
adding up unrelated products. Who failed is told beside the sum, not before it.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from curvoscope.errors import CurvoscopeError, EmptyError, ModelError
from curvoscope.losses import CrossEntropy, MeanLoss, Objective

Facts = Mapping[str, Mapping[str, str]]  # argument -> what it consists of -> a description or a hash of it

_MOST_NAMED = 3
_CUT = 4096  # entries of the pieces that a vector's note is made of


class RankError(CurvoscopeError, RuntimeError):
    """Ranks that do not fit together, or one that has ended (`gone`): then no collective operation works any more."""

    gone = False


class Ranks:
    """This process alone; `Group` is the same for several."""

    size, rank = 1, 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Local work that all ranks do; if it fails on one, it fails on all."""
        yield

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        return [value]

    def agree(self, facts: Facts) -> None:
        """Raise on all ranks if they differ in `facts`."""

    def sum(self, question: object, vectors: Tensor, height: int, compute: Callable[[], Tensor]) -> Tensor:
        """The sum over ranks of what `compute` makes of the vectors (n, C), (n, height); `question` says what it is."""
        return compute()


class Group(Ranks):
    """The ranks of a process group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._on_cpu = "gloo" in dist.get_backend(group)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Local work without collectives, after which all ranks learn whether it succeeded everywhere."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        try:
            told = self.exchange(None if failure is None else f"{type(failure).__name__}: {failure}")
        except RankError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        for rank, message in enumerate(told):
            if message is not None:
                raise RankError("process_group", f"rank {rank} failed with {message}")

    def exchange(self, value: Any) -> list[Any]:
        """All ranks' values, which must be picklable."""
        found: list[Any] = [None] * self.size
        with collective():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, facts: Facts) -> None:
        """Compare all ranks with rank 0: each of them sees all differences, and raises the same error."""
        first, *others = self.exchange({argument: dict(items) for argument, items in facts.items()})
        for argument in first:
            unlike: dict[str, list[int]] = {}
            for rank, other in enumerate(others, 1):
                for item in {**first[argument], **other[argument]}:
                    if first[argument].get(item) != other[argument].get(item):
                        unlike.setdefault(item, []).append(rank)
            if unlike:
                raise RankError(argument, _difference(argument, unlike, first[argument], others))

    def sum(self, question: object, vectors: Tensor, height: int, compute: Callable[[], Tensor]) -> Tensor:
        """One all-reduce; the note of what is asked is exchanged while the ranks compute. One that fails adds zeros."""
        failure: Exception | None = None
        check = self._exchange_notes(question, vectors, failed=False)
        try:
            found = compute().contiguous()
        except Exception as error:
            failure, found = error, vectors.new_zeros(len(vectors), height)
        try:
            check()
            unwell = self._add_up(found, failure is not None)
        except RankError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        _check_well(unwell)
        return found

    def _add_up(self, found: Tensor, failed: bool) -> list[int]:
        """Add up the tensors of all ranks in place, and return the ranks that failed."""
        flags = torch.zeros(self.size, device="cpu" if self._on_cpu else found.device)
        flags[self.rank] = failed
        with collective():
            works = [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in (found, flags)]
            for work in works:
                work.wait()
        return flags.nonzero().flatten().tolist()

    def add(self, summand: Tensor) -> Tensor:
        """The sum of all ranks' tensors of one shape."""
        found = summand.contiguous().clone()
        if found.numel():
            with collective():
                dist.all_reduce(found, group=self.group)
        return found

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        found = torch.tensor([number], device="cpu" if self._on_cpu else "cuda")
        with collective():
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found)

    def check_notes(self, question: object, vectors: Tensor, failed: bool) -> None:
        """Raise on all ranks if one failed, asked another question, or multiplied with other vectors (n, C)."""
        self._exchange_notes(question, vectors, failed)()

    def _exchange_notes(self, question: object, vectors: Tensor, failed: bool) -> Callable[[], None]:
        """Begin `check_notes`; the function that is returned waits for the notes of the others, and checks them."""
        note = _note(question, vectors, failed).to("cpu" if self._on_cpu else vectors.device)
        notes = [torch.empty_like(note) for _ in range(self.size)]
        rounding = torch.finfo(vectors.dtype).eps ** 0.5  # ranks on unlike machines may round differently
        with collective():
            work = dist.all_gather(notes, note, group=self.group, async_op=True)

        def check() -> None:
            with collective():
                work.wait()
            _compare(torch.stack(notes).cpu(), rounding)

        return check


def _compare(table: Tensor, rounding: float) -> None:
    """Raise if the notes of the ranks, one per row, differ."""
    _check_well(table[:, 0].nonzero().flatten().tolist())
    unlike = (table[:, 1] != table[0, 1]).nonzero().flatten().tolist()
    if unlike:
        raise RankError(
            "process_group",
            f"{_ranks(unlike)} asked for another product than rank 0; all ranks must make the same calls in the "
            "same order, with the same memory limit",
        )
    # A sum of entries of one sign is larger than the norm, and so is its error.
    scale = table[0, 2] + table[0, 2:].abs()
    unlike = ((table - table[0])[:, 2:].abs() > rounding * scale).any(1).nonzero().flatten().tolist()
    if unlike:
        raise RankError(
            "process_group",
            f"{_ranks(unlike)} used different vectors from rank 0; use the same seed on every rank",
        )


def _check_well(unwell: Sequence[int]) -> None:
    """Raise if a rank failed."""
    if unwell:
        there = "that rank" if len(unwell) == 1 else "those ranks"
        raise RankError("process_group", f"{_ranks(unwell)} failed in a product; see the error on {there}")


def ranks_of(process_group: object) -> Ranks:
    """The ranks of a process group, or of the default one for "world"; None: this process alone."""
    if process_group is None:
        return Ranks()
    cure = "call torch.distributed.init_process_group first"
    if not dist.is_available():
        raise RankError("process_group", "this torch was built without torch.distributed")
    if not dist.is_initialized():
        raise RankError("process_group", f"got {process_group!r}, and torch.distributed is not initialised: {cure}")
    if process_group == "world":
        process_group = dist.group.WORLD
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RankError("process_group", "this rank is not a member of the group; only its members may call")
    if not isinstance(process_group, dist.ProcessGroup):
        name = type(process_group).__name__
        raise RankError("process_group", f'got a {name}, expected "world" or a group from torch.distributed.new_group')
    try:
        return Group(process_group)
    except (RuntimeError, ValueError) as error:
        raise RankError("process_group", f"the group is not initialised, or destroyed: {cure}") from error


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh that the model's parameters are spread over; None if they are not."""
    if "torch.distributed.tensor" not in sys.modules:
        return None  # nobody has made a DTensor, and to load it takes as long as this package
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass the outermost module still has its parameters whole
    found = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if not found:
        return None
    meshes = {p.device_mesh for p in found.values()}
    mesh = meshes.pop()
    if meshes or mesh.ndim > 1:
        raise ModelError("model", f"lies on {mesh} and others, or on several axes of it; expected one mesh of one axis")
    for name, p in found.items():
        (placement,) = p.placements
        if not isinstance(placement, Shard):
            raise ModelError(name, f"is placed as {placement}, expected Shard: use fully_shard alone")
        local, step = p.to_local().shape[placement.dim], -(-p.shape[placement.dim] // mesh.size())
        if local > step:
            raise ModelError(name, f"has {local} of {p.shape[placement.dim]} rows here, expected {step} at most")
    return mesh


def hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A hash of each tensor: its shape, its dtype and all its numbers."""
    found = {}
    for name, tensor in tensors.items():
        digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        found[name] = digest.hexdigest()
    return found


def describe(objective: Objective | None) -> str:
    """A description of a loss that is the same in each process."""
    if isinstance(objective, CrossEntropy):
        options = f"ignore_index={objective.ignore_index}, shift={objective.shift}, axis={objective.axis}"
        return f"CrossEntropy({options})"
    if isinstance(objective, MeanLoss):
        function = objective.function
        return f"MeanLoss({getattr(function, '__qualname__', type(function).__qualname__)})"
    return type(objective).__name__


def common(objectives: Sequence[Objective | None]) -> Objective:
    """The loss that the ranks with batches found in the model."""
    found = {describe(objective): objective for objective in objectives if objective is not None}
    if not found:
        raise EmptyError("batches", "no rank has any")
    if len(found) > 1:
        raise RankError("loss_fn", f"is None, and the ranks found {' and '.join(sorted(found))}; give one of them")
    return next(iter(found.values()))


def _note(question: object, vectors: Tensor, failed: bool) -> Tensor:
    """(4,): whether it failed, a hash of the question, and two numbers that tell vectors (n, C) apart."""
    digest = hashlib.blake2b(repr((question, tuple(vectors.shape))).encode(), digest_size=6).digest()  # 48 of 53 bits
    count, size = vectors.shape
    cuts, whole = size // _CUT, size - size % _CUT
    within = _weights(_CUT, vectors)
    pieces = vectors[:, :whole].unflatten(1, (cuts, _CUT)) @ within  # one pass over the vectors
    rest = vectors[:, whole:] @ within[: size - whole]
    each = torch.cat([pieces, rest[:, None]], 1).double()
    number = _weights(count, each) @ each @ _weights(cuts + 1, each)
    numbers = [float(vectors.norm()), float(number)]
    return torch.tensor([float(failed), float(int.from_bytes(digest, "big")), *numbers], dtype=torch.float64)


def _weights(length: int, like: Tensor) -> Tensor:
    """Numbers from 1 to 2, neighbours unlike: the multiples of the golden ratio, without their integer parts."""
    multiples = torch.arange(length, dtype=torch.float64, device=like.device) * (5**0.5 - 1) / 2
    return (1 + multiples.frac()).to(like.dtype)


def _difference(argument: str, unlike: Mapping[str, list[int]], first: Mapping[str, str], others: Any) -> str:
    lines = []
    for item, ranks in list(unlike.items())[:_MOST_NAMED]:
        other = others[ranks[0] - 1][argument].get(item)
        if item not in first or other is None:
            where = _ranks(ranks) if item in first else "rank 0"
            lines.append(f"{item!r} is missing on {where}")
        elif argument == "model":
            lines.append(f"{item!r} has other numbers on {_ranks(ranks)}")
        else:
            lines.append(f"{item!r} is {first[item]} on rank 0 and {other} on {_ranks(ranks)}")
    if len(unlike) > _MOST_NAMED:
        lines.append(f"and {len(unlike) - _MOST_NAMED} more")
    cure = "load the same weights on all, or broadcast those of rank 0" if argument == "model" else "give all the same"
    return f"differs between ranks: {'; '.join(lines)}. Must be alike: {cure}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextmanager
def collective() -> Iterator[None]:
    """Turn what torch raises when a rank is gone or does not answer in time into a `RankError`."""
    try:
        yield
    except RuntimeError as error:
        failure = RankError(
            "process_group",
            "another rank is gone, failed, or did not answer within the timeout of the group "
            f"({str(error).strip().splitlines()[0]})",
        )
        failure.gone = True
        raise failure from error
