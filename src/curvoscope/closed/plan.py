"""The plan of a Hessian: how each block is computed, why, and what that takes. Nothing is computed for it.

What a closed form of a layer costs follows from sizes. The loss Hessian S at its output takes one product through the
tail of the network for each entry of F that it couples, and cores and norms of the blocks are made of it. It saves the
products of the four usual questions (norm, trace, diagonal, extreme eigenvalues) to each block of the layer. Both are
counted in floating-point operations; a byte that is moved counts as a few of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from curvoscope import checks
from curvoscope.blocks import Block
from curvoscope.closed.layers import BlockPlace, ModelLayer, OutputSize
from curvoscope.errors import BlockNameError
from curvoscope.estimate.products import DEFAULT_MATVECS
from curvoscope.operators.block_matrix import PARTS
from curvoscope.text_table import ShownAsTable, TextTable

_QUESTIONS = 4
_PER_WEIGHT = 8  # operations of a product for a weight and a token: two for each of four passes
_PER_BYTE = 4  # operations that take as long as moving a byte
_CHEAP = 2**33  # operations of a fraction of a second: what takes no more is exact, whatever an estimate costs
_SCORES = 4  # matrices of the scores' size while a closed form of attention is made
_KEPT_SCORES = 2  # those that it keeps: A, and the gradient at the scores
_HIDDEN = 6  # vectors of the hidden units that a feed-forward layer keeps


@dataclass(frozen=True)
class Choice:
    """Whether a part of a block is computed in closed form, why (not), and what that takes."""

    exact: bool
    reason: str
    products: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class PlannedBlock:
    """One row of a plan: a diagonal block and a part of it.

    Attributes:
        block: its name.
        part: "outer", "functional" or "total".
        method: "exact", "autodiff" or "difference".
        reason: why this method.
        products: products with the Hessian, each of them one pass over all batches. "exact": those that find the loss
            Hessian at the layer's output, once for all blocks of the layer; none if the part needs the gradient there
            alone. Otherwise: those of each estimate by default.
        bytes: memory, by sizes. "exact": of the loss Hessian at the layer's output, or of the closed form if that needs
            the gradient alone. Otherwise: of the graph of a product.

    Example:
        >>> import torch, curvoscope as cv
        >>> data = torch.ones(4, 3), torch.zeros(4, 2)
        >>> row = cv.hessian(torch.nn.Linear(3, 2), torch.nn.MSELoss(), [data]).plan["weight", "outer"]
        >>> row.method, row.reason
        ('autodiff', 'no closed form is known for it')
    """

    block: str
    part: str
    method: str
    reason: str
    products: int
    bytes: int


@dataclass(frozen=True)
class Plan(ShownAsTable, Mapping[tuple[str, str], PlannedBlock]):
    """How a Hessian computes its diagonal blocks: `plan[name, part]` is a row, `print(plan)` a table of all.

    It follows from the structure of the model and from sizes alone. Whether a closed form gives the output of its layer
    is verified when a block is first computed with, or when `H.method_of(name)` is asked; should it not, the block is
    left to autodiff, and from then on `H.plan` says so and why.

    Args:
        rows: one for each block and part.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(torch.ones(4, 3), torch.zeros(4, 2))])
        >>> print(H.plan)
        block     part   method  products   memory  reason
        0.weight   all autodiff         6 ...  B  no closed form is known for it
        0.bias     all autodiff         2 ...  B  no closed form is known for it
        >>> H.plan["0.weight", "outer"].method
        'autodiff'
    """

    rows: tuple[PlannedBlock, ...]

    def __getitem__(self, key: tuple[str, str]) -> PlannedBlock:
        for row in self.rows:
            if (row.block, row.part) == key:
                return row
        raise BlockNameError("plan", f"there is no {key!r}; expected (block, part) with a part of {', '.join(PARTS)}")

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((row.block, row.part) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _shown(self) -> TextTable:
        """The rows as text; parts that differ in nothing stand in one row."""
        cells: list[tuple[str, ...]] = []
        for name, several in groupby(self.rows, key=lambda row: row.block):
            found: dict[tuple[str, ...], list[str]] = {}
            for row in several:
                key = row.method, f"{row.products:,}", checks.readable_size(row.bytes), row.reason
                found.setdefault(key, []).append(row.part)
            for what, parts in found.items():
                cells.append((name, "all" if len(parts) == len(PARTS) else ", ".join(parts), *what))
        header = ("block", "part", "method", "products", "memory", "reason")
        return TextTable(header, cells, right=("products", "memory"))

    def __repr__(self) -> str:
        return str(self._shown())


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one layer.

    Args:
        layer: the layer.
        held: those of its blocks that the Hessian has, with their places.
        size: of its largest output in a pass.
        batches: number of micro-batches.
        weights: numbers of weights behind the layer, and of those in the whole model.
        product_bytes: what a product with the whole Hessian moves.
        itemsize: bytes of a number.
    """

    layer: ModelLayer
    held: Sequence[tuple[BlockPlace, Block]]
    size: OutputSize
    batches: int
    weights: tuple[int, int]
    product_bytes: int
    itemsize: int

    @property
    def _tokens(self) -> int:
        return self.batches * self.size.tokens

    @property
    def _heads(self) -> int:
        return self.layer.blocks["Q"].heads or 1 if self.layer.attends else 1

    @property
    def _widest(self) -> int:
        return max(max(block.shape) for block in self.layer.blocks.values())

    # ---- from G alone

    @property
    def record_bytes(self) -> int:
        """X and F of the passes that verify the layer, and G."""
        return 4 * self._tokens * max(self.size.width, self.layer.input_width) * self.itemsize

    @property
    def gradient_bytes(self) -> int:
        """What a closed form takes that needs G and no S."""
        numbers = 0
        if self.layer.attends:
            scores = self._heads * self.size.length
            numbers = scores * (_SCORES * self.size.tokens + _KEPT_SCORES * self._tokens)
        else:
            numbers = _HIDDEN * self._tokens * self._widest
        return numbers * self.itemsize + self.record_bytes

    # ---- with S

    def products(self, coupled: int) -> int:
        """Products that S takes when it couples so many tokens."""
        return coupled * self.size.width

    def curvature_bytes(self, coupled: int) -> int:
        """What S and the cores made of it take, for all tokens."""
        width = self._widest if coupled > 1 else self.size.width
        return 2 * self._tokens * coupled * width**2 * self.itemsize

    @property
    def products_saved(self) -> int:
        """Those of the usual questions to the blocks of the Hessian."""
        return _QUESTIONS * sum(min(block.size, DEFAULT_MATVECS) for _, block in self.held)

    @property
    def saved(self) -> float:
        """What those cost, in operations."""
        own = sum(block.size for block in self.layer.blocks.values())
        return self.products_saved * self._product(self.weights[0] + own)

    def closed(self, coupled: int) -> float:
        """What a closed form costs, in operations: the products for S, the cores and the norms."""
        summands = self._tokens * coupled
        made = 0
        for place, block in self.held:
            for name in place.weights:
                core = self._core_width(name, block if place.adapter is None else self.layer.weight(name))
                made += 2 * summands * core * self.size.width * (core + self.size.width)
            core = core if place.adapter is None else block.shape[1]
            made += 2 * min((summands * core) ** 2, summands * block.size**2)
        moved = _PER_BYTE * self.curvature_bytes(coupled)
        return self.products(coupled) * self._product(self.weights[0]) + made + moved

    def pays_formed(self, block: Block, coupled: int) -> bool:
        """Whether all columns of a block, if its closed form gives products only, cost less than an estimate, or next
        to nothing."""
        own = sum(block.size for block in self.layer.blocks.values())
        column = _PER_WEIGHT * self._tokens * (own + self.size.length * self._widest if self.layer.attends else own)
        column += 2 * self._tokens * coupled * self.size.width**2
        estimate = min(block.size, DEFAULT_MATVECS) * self._product(self.weights[0] + own)
        return block.size * column <= max(_CHEAP, estimate)

    def _product(self, weights: int) -> float:
        """One product through so many weights, in operations."""
        moved = self.product_bytes * weights / max(1, self.weights[1])
        return _PER_WEIGHT * weights * self._tokens + _PER_BYTE * moved

    def _core_width(self, name: str, block: Block) -> int:
        """The cores of a block are square: of the outputs of its weight, or of the inputs for the keys of each head."""
        if name.removeprefix("b_")[0] != "K":
            return block.shape[1]
        return block.shape[0] * (1 if "." in name else self._heads)
