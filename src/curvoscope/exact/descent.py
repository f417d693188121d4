"""Hessian back-propagation: from S at a layer's output to S at its input, with both of its parts.

    S_in = J^T S J + <G, d²F/dx²>          J = dF/dx, or I + dF/dx with a residual connection

The Gauss-Newton part carries J^T S_gn J from the loss down; the functional part J^T S_f J collects what every layer on
the way adds. Tokens stay apart until the first attention layer from above, then those of a sequence are coupled.
"""

from collections.abc import Iterator

from curvoscope.errors import MemoryLimitError
from curvoscope.exact.chain import Chain
from curvoscope.exact.grouped import Grouped, fits
from curvoscope.exact.links import AttentionLink, Link

Parts = tuple[Grouped, Grouped | None]  # Gauss-Newton and functional; None where nothing above is curved


class Descent:
    """S at the output of every link of a chain (-1: at its input), computed from the top as far down as asked."""

    def __init__(self, chain: Chain, budget: int | None = None) -> None:
        self._chain, self._budget = chain, budget
        self._known: dict[int, Parts] = {}
        self._steps = self._descend()
        self._too_large: MemoryLimitError | None = None

    def at(self, number: int) -> Parts:
        """Both parts of S at the output of a link; `MemoryLimitError` if they do not fit."""
        while number not in self._known:
            if self._too_large is not None:
                raise self._too_large
            try:
                found, outer, bent = next(self._steps)
            except MemoryLimitError as error:
                self._too_large = error
                raise
            self._known[found] = (outer, bent)
        return self._known[number]

    def fits_at(self, number: int) -> bool:
        """Whether S at the output of a link fits into memory."""
        try:
            self.at(number)
        except MemoryLimitError:
            return False
        return True

    def _descend(self) -> Iterator[tuple[int, Grouped, Grouped | None]]:
        chain = self._chain
        outer, bent = Grouped.of(chain.loss.curvature, chain.output), None
        number = len(chain.links)
        for links, residual in reversed(chain.branches):
            here, bent_here = outer, bent
            inside: Grouped | None = None  # what the layers of the branch add
            way: Grouped | None = None  # the Jacobian from here to the end of the branch
            for position, each in reversed(list(enumerate(links))):
                number -= 1
                yield number, here, bent_here
                self._check(each, here)
                jacobian, own = each.input_jacobian, each.input_curvature
                way = jacobian if way is None else way.after(jacobian)
                inside = own if inside is None else jacobian.sandwich(inside).plus(own)
                if position > 0 or not residual:
                    here = jacobian.sandwich(here)
                    bent_here = own if bent_here is None else jacobian.sandwich(bent_here).plus(own)
            outer, bent = here, bent_here
            if residual:
                assert way is not None and inside is not None
                last_outer, last_bent = self._known[number + len(links) - 1]
                whole = way.plus_identity()
                outer = whole.sandwich(last_outer)
                bent = inside if last_bent is None else whole.sandwich(last_bent).plus(inside)
        yield -1, outer, bent

    def _check(self, each: Link, curvature: Grouped) -> None:
        tokens, length = self._chain.tokens, each.X.shape[1]
        size = max(curvature.size, length if isinstance(each, AttentionLink) else 1)
        width = max(each.X.shape[2], each.output.shape[2])
        fits(tokens, size, width, width, each.X, self._budget)
