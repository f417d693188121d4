"""The entries of a Kronecker sum, each computed once and written to its place.

Entries are one matrix product over the tokens for each term, never a loop over them: sum_t l_t[a] r_t[b] C_t[p, q] is
the product of the pairs (a b, T) of the vectors with the cores (T, p q). The sum comes in parts (the outer and the
functional one, say), and what is written is the sum of what each part alone would be, to the bit.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from curvoscope.operators.strips import row_strips, write_transposed
from curvoscope.operators.terms import Single, Term

TermGroup = tuple[Term | Single, ...]


def write_entries(out: Tensor, parts: Sequence[TermGroup], symmetric: bool, mirror: Tensor | None = None) -> None:
    """Write the sum of the parts to `out`, a view (r0, r1, c0, c1) into some larger matrix; `mirror` (c0, c1, r0, r1)
    gets the transpose."""
    parts = [part for part in parts if part]
    strips = None if symmetric or not parts else _strips(parts)
    if strips is not None:
        for rows, values in zip(row_strips(tuple(out.shape)), strips, strict=True):
            out[rows] = values
            if mirror is not None:
                mirror[:, :, rows] = values.permute(2, 3, 0, 1)
        return
    if not parts:
        out.zero_()
    elif symmetric and (alike := _alike(parts)):
        moments = alike[0].upper_moments()
        for term in alike[1:]:
            moments += term.upper_moments()
        alike[0].write_upper(out, moments, add=False)
    else:
        _write_parts(out, parts, symmetric)
    if mirror is not None:
        write_transposed(mirror, out)


def _strips(parts: Sequence[TermGroup]) -> Iterator[Tensor] | None:
    """The sum of the parts, strip by strip; None if a term cannot be had in strips."""
    streams = [[strips for term in part if (strips := term.strips()) is not None] for part in parts]
    if any(len(some) < len(part) for some, part in zip(streams, parts, strict=True)):
        return None
    sums = [(_added(values) for values in zip(*some, strict=True)) for some in streams]
    return (_added(values) for values in zip(*sums, strict=True))


def _added(values: Sequence[Tensor]) -> Tensor:
    """The sum, in the memory of the first."""
    first, *others = values
    for other in others:
        first += other
    return first


def _write_parts(out: Tensor, parts: Sequence[TermGroup], symmetric: bool) -> None:
    """Write the sum of the parts, each of them made symmetric if the sum is."""
    for number, part in enumerate(parts):
        symmetrise = symmetric and not all(term.symmetric for term in part)
        at_once = number == 0 or (len(part) == 1 and not symmetrise)
        target = out if at_once else out.new_empty(out.shape)
        for place, term in enumerate(part):
            term.write(target, add=place > 0 or (at_once and number > 0))
        if symmetrise:
            target.copy_((target + target.permute(2, 3, 0, 1)).mul_(0.5))
        if not at_once:
            out += target


def _alike(parts: Sequence[TermGroup]) -> list[Term]:
    """The terms, if each part is one symmetric term and all stand on the same axes: their moments can be added."""
    terms = [term for part in parts if len(part) == 1 and (term := part[0].summed) is not None and term.symmetric]
    return terms if len(terms) == len(parts) and len({term.axes for term in terms}) == 1 else []


def workspace(parts: Sequence[TermGroup], symmetric: bool, room: int) -> int:
    """What `write_entries` needs in addition to the entries, when `room` is left: moments, and chunks of tokens."""
    parts, needed = [part for part in parts if part], [0]
    alike = symmetric and bool(_alike(parts))
    for number, part in enumerate(parts):
        first, *others = (term.workspace(room) for term in part)
        entries, symmetrised = part[0].entry_bytes, symmetric and not all(term.symmetric for term in part)
        apart = number > 0 and not alike and (len(part) > 1 or symmetrised)  # its sum is made beside the entries
        beside = entries if apart else 0
        needed += [first, *(beside + other for other in others), *([beside + entries] if symmetrised else [])]
    return max(needed)
