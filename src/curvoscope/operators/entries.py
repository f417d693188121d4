"""The entries of a Kronecker sum, each computed once and written to its place.

Entries are one matrix product over the tokens for each term, never a loop over them: sum_t l_t[a] r_t[b] C_t[p, q] is
the product of the pairs (a b, T) of the vectors with the cores (T, p q). Terms with the same vectors, such as those of
the outer and of the functional part, share one product if they are `merged` first.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from curvoscope.operators.strips import row_strips, write_transposed
from curvoscope.operators.terms import Single, Term


def write_entries(out: Tensor, terms: Sequence[Term | Single], symmetric: bool, mirror: Tensor | None = None) -> None:
    """Write the sum of the terms to `out`, a view (r0, r1, c0, c1) into some larger matrix; `mirror` (c0, c1, r0, r1)
    gets the transpose."""
    strips = None if symmetric else _strips(terms)
    if strips is not None:
        for rows, values in zip(row_strips(tuple(out.shape)), strips, strict=True):
            out[rows] = values
            if mirror is not None:
                mirror[:, :, rows] = values.permute(2, 3, 0, 1)
        for term in terms:
            if term.summed is None:  # often few entries, as of an identity
                term.write(out, add=True)
                if mirror is not None:
                    term.T.write(mirror, add=True)
        return
    if not terms:
        out.zero_()
    for number, term in enumerate(terms):
        term.write(out, add=number > 0)
    if _is_symmetrised(terms, symmetric):
        out.copy_((out + out.permute(2, 3, 0, 1)).mul_(0.5))
    if mirror is not None:
        write_transposed(mirror, out)


def _strips(terms: Sequence[Term | Single]) -> Iterator[Tensor] | None:
    """The terms that are sums over tokens, added up strip by strip; None if there are none, or memory is short."""
    sums = [term for each in terms if (term := each.summed) is not None]
    streams = [strips for term in sums if (strips := term.strips()) is not None]
    if not streams or len(streams) < len(sums):
        return None
    return (_added(values) for values in zip(*streams, strict=True))


def _added(values: Sequence[Tensor]) -> Tensor:
    """The sum, in the memory of the first."""
    first, *others = values
    for other in others:
        first += other
    return first


def _is_symmetrised(terms: Sequence[Term | Single], symmetric: bool) -> bool:
    """Whether the sum is symmetric though a term is not."""
    return symmetric and not all(term.symmetric for term in terms)


def workspace(terms: Sequence[Term | Single], symmetric: bool, room: int) -> int:
    """What `write_entries` needs in addition to the entries, when `room` is left: moments, and chunks of tokens."""
    needed = [term.workspace(room) for term in terms]
    return max([*needed, terms[0].entry_bytes if _is_symmetrised(terms, symmetric) else 0])
