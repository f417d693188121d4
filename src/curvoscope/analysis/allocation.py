"""Choosing a format for each tensor under a size budget, by second-order costs with their interactions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.analysis.changes import Change, changed_state, displacement
from curvoscope.analysis.expansion import Expansion, Move, engine_of
from curvoscope.analysis.ledger import Ledger
from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError, RangeError
from curvoscope.families.block_maps import chosen_blocks
from curvoscope.losses import LossFunction

_MOST_STEPS = 10_000  # of one local search; each lowers the cost
_KICKS = 32  # local searches that start from a disturbed optimum
_KICKED = 3  # blocks that get another format then
_SLACK = 1e-9  # of the size, for rounding
KEPT, CHANGED = "kept", "changed"


@dataclass(frozen=True, eq=False)
class Menu:
    """The second-order cost of every format f for every block b: Σ_b g·d_bf + Σ_bc ½ d_bf·H_bc d_cg for a choice.

    Made by `cv.analysis.menu`, or from a ledger.

    Args:
        names: of the n blocks.
        sizes: entries of each block.
        formats: names of the F formats.
        bits: per entry, of each format.
        first: g_b·d_bf, (n, F).
        second: ½ d_bf·H_bc d_cg, (n, F, n, F).

    Example:
        >>> import torch, curvoscope as cv
        >>> first, second = torch.zeros(2, 2).double(), torch.zeros(2, 2, 2, 2).double()
        >>> second[0, 1, 0, 1], second[1, 1, 1, 1] = 3.0, 1.0  # what int4 costs in a and in b
        >>> menu = cv.analysis.Menu(("a", "b"), (10, 10), ("kept", "int4"), (16.0, 4.0), first, second)
        >>> cv.analysis.allocate(menu, 10.0).formats
        {'a': 'kept', 'b': 'int4'}
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    formats: tuple[str, ...]
    bits: tuple[float, ...]
    first: Tensor
    second: Tensor

    @classmethod
    def of_ledger(cls, ledger: Ledger, bits: float, kept: float = 16.0) -> "Menu":
        """Two formats for each block that changes: "kept" as it is, or "changed" as in the ledger.

        Args:
            ledger: from `cv.analysis.sensitivity`.
            bits: per entry, of a changed block.
            kept: per entry, of a block that is kept.

        Returns:
            The costs of the blocks that the ledger's change moves.
        """
        places = [i for i, norm in enumerate(ledger.norms) if norm]
        count = len(places)
        first, second = torch.zeros(count, 2).double(), torch.zeros(count, 2, count, 2).double()
        first[:, 1] = (ledger.units.weights @ ledger.units.first)[places]
        second[:, 1, :, 1] = ledger.pairs.matrix[places][:, places]
        names, sizes = tuple(ledger.names[i] for i in places), tuple(ledger.sizes[i] for i in places)
        return cls(names, sizes, (KEPT, CHANGED), (kept, bits), first, second)

    def without_interactions(self) -> "Menu":
        """The same with ½ d_bf·H_bb d_bf alone."""
        count = len(self.names)
        same = torch.eye(count, dtype=self.second.dtype).view(count, 1, count, 1)
        return Menu(self.names, self.sizes, self.formats, self.bits, self.first, self.second * same)

    def without_gradient(self) -> "Menu":
        """The same with the second order alone.

        After training the gradient is near zero; on a small probe it is not, and formats that follow it fit the probe.
        """
        return Menu(self.names, self.sizes, self.formats, self.bits, torch.zeros_like(self.first), self.second)

    def scored(self, costs: Mapping[str, Mapping[str, float]]) -> "Menu":
        """The same formats with other costs, without interactions, such as those of `cv.analysis.scores`.

        Args:
            costs: {format: {block: cost}}; a block that is not named costs 0.

        Returns:
            A menu with these costs as `first`, and `second` zero.
        """
        own = torch.tensor([[costs[f].get(name, 0.0) for f in self.formats] for name in self.names]).double()
        return Menu(self.names, self.sizes, self.formats, self.bits, own, torch.zeros_like(self.second))

    def choice(self, formats: Mapping[str, str]) -> Tensor:
        """A choice of formats as numbers, as `cost` and `average_bits` take it.

        Args:
            formats: the name of a format for every block.

        Returns:
            The index of each block's format, (n,), in the order of `names`.
        """
        return torch.tensor([self.formats.index(formats[name]) for name in self.names])

    def cost(self, choice: Tensor) -> float:
        """The predicted change of the loss, to second order.

        Args:
            choice: the index of each block's format, (n,), as from `choice`.

        Returns:
            The sum of the first-order and second-order costs.
        """
        blocks = torch.arange(len(self.names))
        chosen = self.second[blocks, choice][:, blocks, choice]
        return float(self.first[blocks, choice].sum() + chosen.sum())

    def average_bits(self, choice: Tensor) -> float:
        """Bits per entry, averaged over all entries of the blocks.

        Args:
            choice: the index of each block's format, (n,), as from `choice`.

        Returns:
            The average.
        """
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        return float(sizes @ torch.tensor(self.bits, dtype=torch.float64)[choice] / sizes.sum())


@dataclass(frozen=True)
class Allocation:
    """A format for each block.

    Args:
        formats: by block.
        bits: average over all entries of the blocks.
        predicted: change of the loss to second order.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(4, 3).double(), torch.eye(4).double()
        >>> ledger = cv.analysis.sensitivity(model, torch.nn.MSELoss(), [(X, X[:, :3])], cv.analysis.recipes.int4)
        >>> cv.analysis.allocate(cv.analysis.Menu.of_ledger(ledger, bits=4), 4.0).formats
        {'weight': 'changed'}
    """

    formats: dict[str, str]
    bits: float
    predicted: float

    def changes(self, formats: Mapping[str, Change | None]) -> dict[str, Change]:
        """The change to make to each block, as `cv.analysis.recipes.mix` takes it.

        Args:
            formats: the change of each format by name; None: no change.

        Returns:
            The change of each block; blocks whose format changes nothing are left out.
        """
        found = {block: formats[name] for block, name in self.formats.items()}
        return {block: change for block, change in found.items() if change is not None}


def menu(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    formats: Mapping[str, tuple[Change | None, float]],
    *,
    blocks: Blocks | None = None,
    device: torch.device | str | None = None,
) -> Menu:
    """The costs of all formats of all blocks, and of all pairs of them: one product for each block and format.

    Args:
        model, loss_fn, batches, device: as in `hessian`.
        formats: for each name the change that it makes (as `changed` of `sensitivity`; None: no change) and its bits
            per entry.
        blocks: those to choose formats for; None: all that a format changes.

    Returns:
        The costs. Batches run whole; the Hessian is that of all of them.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
        >>> data = [(torch.randn(16, 4).double(), torch.zeros(16, 3).double())]
        >>> formats = {"int3": (cv.analysis.recipes.int3, 3.0), "int8": (cv.analysis.recipes.int8, 8.0)}
        >>> menu = cv.analysis.menu(model, torch.nn.MSELoss(), data, formats)
        >>> menu.names, tuple(menu.second.shape)
        (('0.weight', '2.weight'), (2, 2, 2, 2))
    """
    if not formats:
        raise EmptyError("formats", "there are none; give at least one")
    deltas = {
        name: None if change is None else displacement(model, changed_state(model, change))
        for name, (change, _) in formats.items()
    }
    everything = chosen_blocks(model, blocks)
    everything.check(model)
    vectors = {
        (block, name): delta_of
        for block in everything
        for name, delta in deltas.items()
        if delta is not None and bool((delta_of := everything[block].gather(delta)).any())
    }
    names = [block for block in everything if blocks is not None or any((block, name) in vectors for name in formats)]
    moving = [block for block in names if any((block, name) in vectors for name in formats)]
    if not moving:
        raise EmptyError("formats", "no format changes a block of the menu; give other blocks")
    engine, _ = engine_of(model, loss_fn, batches, Blocks(everything[block] for block in moving), "batch", device)
    places = [(b, f) for b, block in enumerate(names) for f, name in enumerate(formats) if (block, name) in vectors]
    listed = list(formats)
    expansion = Expansion(engine, [Move(everything[names[b]], vectors[names[b], listed[f]]) for b, f in places])
    first = torch.zeros(len(names), len(formats), dtype=torch.float64)
    second = torch.zeros(len(names), len(formats), len(names), len(formats), dtype=torch.float64)
    b, f = torch.tensor(places).T
    slopes, pairs = expansion.forms(expansion.first, expansion.pairs)
    first[b, f] = expansion.weights @ slopes
    second[b[:, None], f[:, None], b, f] = torch.einsum("i,ijk->jk", expansion.weights, pairs)
    sizes = tuple(everything[block].size for block in names)
    return Menu(tuple(names), sizes, tuple(formats), tuple(float(bits) for _, bits in formats.values()), first, second)


def allocate(menu: Menu, budget: float) -> Allocation:
    """The formats with the least predicted loss whose average size is within the budget.

    min Σ_b first[b, f_b] + Σ_bc second[b, f_b, c, f_c] subject to Σ_b size_b bits[f_b] ≤ budget Σ_b size_b, a
    quadratic integer problem. Searches start from each format for all blocks, reduced greedily until it fits: single
    blocks and pairs of blocks change formats as long as the cost falls. Then three blocks of the best choice get random
    formats, and the search starts again, 32 times. The result is a local optimum: on problems small enough to try every
    choice it was the best one, but there is no bound for larger ones.

    Args:
        menu: the costs, from `cv.analysis.menu` or `Menu.of_ledger`.
        budget: bits per entry.

    Returns:
        The allocation.

    Example:
        >>> import torch, curvoscope as cv
        >>> first, second = torch.tensor([[0.1, 0], [0.2, 0], [0.3, 0]]).double(), torch.zeros(3, 2, 3, 2).double()
        >>> menu = cv.analysis.Menu(("a", "b", "c"), (1, 1, 1), ("int4", "int8"), (4, 8), first, second)
        >>> found = cv.analysis.allocate(menu, 6.0)
        >>> found.formats, round(found.predicted, 6)
        ({'a': 'int4', 'b': 'int4', 'c': 'int8'}, 0.3)
    """
    checks.positive(budget=budget)
    search = _Search(menu, budget)
    if min(menu.bits) * sum(menu.sizes) > search.limit:
        raise RangeError("budget", f"got {budget:g} bits, the smallest format has {min(menu.bits):g}")
    starts = [torch.full((len(menu.names),), f) for f in range(len(menu.formats))]
    best = min((search.improved(search.reduced(start)) for start in starts), key=menu.cost)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_KICKS):
        best = min(best, search.improved(search.reduced(search.kicked(best, generator))), key=menu.cost)
    names = {block: menu.formats[f] for block, f in zip(menu.names, best.tolist(), strict=True)}
    return Allocation(names, menu.average_bits(best), menu.cost(best))


class _Search:
    """Changes of the cost and of the size for all single moves and all pairs of moves from a choice (n,)."""

    def __init__(self, menu: Menu, budget: float) -> None:
        self.menu = menu
        self._blocks = torch.arange(len(menu.names))
        self._sizes = torch.tensor(menu.sizes, dtype=torch.float64)
        self._bits = torch.tensor(menu.bits, dtype=torch.float64)
        self.limit = budget * float(self._sizes.sum()) * (1 + _SLACK)

    def size(self, choice: Tensor) -> float:
        return float(self._sizes @ self._bits[choice])

    def kicked(self, choice: Tensor, generator: torch.Generator) -> Tensor:
        """Some blocks with random formats."""
        choice = choice.clone()
        places = torch.randperm(len(choice), generator=generator)[:_KICKED]
        choice[places] = torch.randint(len(self.menu.formats), (len(places),), generator=generator)
        return choice

    def reduced(self, choice: Tensor) -> Tensor:
        """Greedily the least cost per bit saved until the budget is kept."""
        choice = choice.clone()
        while self.size(choice) > self.limit:
            cost, size = self._single(choice)
            worth = torch.where(size < 0, cost / -size, torch.inf)
            block, choice_of_block = divmod(int(worth.argmin()), len(self.menu.formats))
            choice[block] = choice_of_block
        return choice

    def improved(self, choice: Tensor) -> Tensor:
        """From a choice within the budget, the best single move or pair of moves, as long as the cost falls."""
        choice, count = choice.clone(), len(self.menu.formats)
        for _ in range(_MOST_STEPS):
            cost, size = (one.flatten() for one in self._single(choice))
            room = self.limit - self.size(choice)
            both = cost[:, None] + cost + 2 * self._coupling(choice)
            owner = self._blocks.repeat_interleave(count)
            allowed = (size[:, None] + size <= room) & (owner[:, None] != owner)
            both = torch.where(allowed, both, torch.inf)
            alone = torch.where(size <= room, cost, torch.inf)
            best = min(float(both.min()), float(alone.min()))
            if best >= -1e-12 * abs(self.menu.cost(choice)) or best == 0:
                return choice
            moves = [int(alone.argmin())] if float(alone.min()) <= best else divmod(int(both.argmin()), len(cost))
            for move in moves:
                choice[move // count] = move % count
        return choice

    def _single(self, choice: Tensor) -> tuple[Tensor, Tensor]:
        """What each move alone changes: cost and size, (n, F)."""
        menu, blocks = self.menu, self._blocks
        with_others = menu.second[:, :, blocks, choice].sum(-1) - menu.second[blocks, :, blocks, choice]
        own = menu.second.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1)
        value = menu.first + 2 * with_others + own
        size = self._sizes[:, None] * self._bits
        return value - value[blocks, choice][:, None], size - size[blocks, choice][:, None]

    def _coupling(self, choice: Tensor) -> Tensor:
        """What two moves change beyond the sum of both, halved, (nF, nF)."""
        second, blocks = self.menu.second, self._blocks
        here = second[:, :, blocks, choice][..., None]  # (n, F, n, 1)
        change = second - here
        change = change - change[blocks, choice][:, None]
        return change.flatten(2).flatten(0, 1)
