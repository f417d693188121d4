"""The ranks that the parameters of a sharded model are spread over."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from curvoscope import checks
from curvoscope.distributed.ranks import Group, RankError, collective, ranks_of
from curvoscope.errors import CurvoscopeError, NonFiniteError


class Mesh(Group):
    """The ranks that parameters are spread over. Products sum over all ranks by themselves.

    Inside `together`, a short collective precedes every other one: in it each rank reports whether it has failed. If
    the model fails on one rank in the middle of a pass, the others learn of it at their next collective, and the group
    stays usable.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._depth = 0  # of `together`
        self._known: Exception | None = None  # the failure that all ranks know of

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that all ranks do, with or without collectives; if it fails on one, it fails on all."""
        self._depth += 1
        try:
            yield
            self.meet()
        except Exception as failure:
            if failure is not self._known and not (isinstance(failure, RankError) and failure.gone):
                self.meet(failure)
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._known = None

    def meet(self, failure: Exception | None = None) -> None:
        """Check that no rank has failed, if one could have; raise if one has, unless it is this rank."""
        if not self._depth:
            return
        try:
            if not super().least(0 if failure is None else -1):
                return
            told = super().exchange(None if failure is None else f"{type(failure).__name__}: {failure}")
        except RankError:
            if failure is None:
                raise
            return
        rank = next(rank for rank, message in enumerate(told) if message is not None)
        self._known = failure or RankError("process_group", f"rank {rank} failed with {told[rank]}")
        if failure is None:
            raise self._known

    def exchange(self, value: Any) -> list[Any]:
        """All ranks' values."""
        self.meet()
        return super().exchange(value)

    def add(self, summand: Tensor) -> Tensor:
        """The sum of all ranks' tensors of one shape."""
        self.meet()
        return super().add(summand)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        self.meet()
        return super().least(number)

    def swap(self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]]) -> None:
        """Send other ranks their tensors, and receive theirs, each list by rank: straight from and to where they lie,
        which takes gloo a third of the time of its own gather and scatter."""
        self.meet()
        operations = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=rank)
            for operation, tensors in ((dist.irecv, received), (dist.isend, sent))
            for rank in range(self.size)
            for tensor in tensors[rank]
            if rank != self.rank and tensor.numel()
        ]
        with collective():
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def sum(self, question: object, vectors: Tensor, height: int, compute: Callable[[], Tensor]) -> Tensor:
        """Apply `compute` to this rank's part of the vectors, after checking that all ranks ask the same."""
        self._ask(question, vectors, failed=not checks.all_finite(vectors))
        with self.together():
            found = compute()
        bad = found.new_zeros(()) if checks.all_finite(found) else (~torch.isfinite(found)).sum().to(found)
        wrong = int(self.add(bad))
        if wrong:
            raise NonFiniteError("operator", f"{wrong} entries of a product are NaN or infinite")
        return found

    def refuse(self, failure: CurvoscopeError, vectors: Tensor) -> None:
        """Raise `failure` here, and tell the ranks that continue with a product."""
        try:
            self._ask("refused", vectors, failed=True)
        except RankError:
            raise failure from None

    def _ask(self, question: object, vectors: Tensor, failed: bool) -> None:
        self.check_notes(question, vectors.new_zeros(len(vectors), 0), failed)


def sharded_ranks(mesh: DeviceMesh, process_group: object) -> Mesh:
    """The ranks that a model's parameters are spread over: those of its mesh; another group is an error."""
    try:
        group = mesh.get_group()
        ranks, members = Mesh(group), dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError) as error:
        raise RankError("model", f"its parameters lie on {mesh}, whose process group is destroyed") from error
    if process_group is not None:
        given = ranks_of(process_group)
        if not isinstance(given, Group) or dist.get_process_group_ranks(given.group) != members:
            raise RankError(
                "process_group", f"its ranks are not {members}, over which the model is sharded; leave it out"
            )
    return ranks
