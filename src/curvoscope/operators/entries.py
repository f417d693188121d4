"""The entries of a Kronecker sum: one matrix product over the tokens for each term, never a loop over them.

sum_t l_t[a] r_t[b] C_t[p, q] is the product of the pairs (a b, T) of the vectors with the cores (T, p q). The sum comes
in parts (the outer and the functional one, say), and what is written is the sum of what each part alone would be, to
the bit. Tokens stand last in the pairs, for long inner loops.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvoscope.operators.terms import Axes, Single, Term, pair_numbers

TermGroup = Sequence[Term | Single]


def write_entries(out: Tensor, parts: Sequence[TermGroup], symmetric: bool) -> None:
    """Write the sum of the parts to `out`, a view (r0, r1, c0, c1) into some larger matrix."""
    parts = [part for part in parts if part]
    if not parts:
        out.zero_()
    elif symmetric and (alike := _alike(parts)):
        _write_symmetric(out, alike)
    else:
        for number, part in enumerate(parts):
            symmetrise = symmetric and not all(term.symmetric for term in part)
            at_once = number == 0 or (len(part) == 1 and not symmetrise)
            if at_once:
                _write_part(out, part, add=number > 0)
                target = out
            else:
                target = _new_part(part)
            if symmetrise:
                target.copy_((target + target.permute(2, 3, 0, 1)).mul_(0.5))
            if not at_once:
                out += target


def _view(out: Tensor, axes: Axes) -> Tensor:
    """`out` (r0, r1, c0, c1) with the axes of the vectors first and those of the core last."""
    return out.permute(axes[0], 2 + axes[1], 1 - axes[0], 3 - axes[1])


# ---- what it takes, in bytes


def workspace(parts: Sequence[TermGroup], symmetric: bool, room: int) -> int:
    """What `write_entries` needs beside the entries, when `room` is left: moments, and chunks of tokens."""
    parts, needed = [part for part in parts if part], [0]
    alike = symmetric and bool(_alike(parts))
    for number, part in enumerate(parts):
        first, *others = (term.workspace(room) for term in part)
        entries, symmetrised = part[0].entry_bytes, symmetric and not all(term.symmetric for term in part)
        apart = number > 0 and not alike and (len(part) > 1 or symmetrised)  # its sum is made beside the entries
        beside = entries if apart else 0
        needed += [first, *(beside + other for other in others), *([beside + entries] if symmetrised else [])]
    return max(needed)


def _alike(parts: Sequence[TermGroup]) -> list[Term]:
    """The terms, if each part is one symmetric term and all stand on the same axes: their moments can be added."""
    terms = [term for part in parts if len(part) == 1 and (term := part[0].summed) is not None and term.symmetric]
    return terms if len(terms) == len(parts) and len({term.axes for term in terms}) == 1 else []


def _write_symmetric(out: Tensor, terms: Sequence[Term]) -> None:
    moments = terms[0].pair_moments()
    for term in terms[1:]:
        moments += term.pair_moments()
    _view(out, terms[0].axes).copy_(moments[pair_numbers(terms[0].left.shape[1], out.device)])


def _write_part(out: Tensor, terms: TermGroup, add: bool) -> None:
    for term in terms:
        term.write(_view(out, term.axes), add)
        add = True


def _new_part(terms: TermGroup) -> Tensor:
    """The sum of the terms, (r0, r1, c0, c1), in the memory of the first one's moments."""
    first, *rest = terms
    order = _view(torch.empty(0, 1, 2, 3), first.axes).shape  # which axis of the block stands where
    values = first.moments().permute([order.index(axis) for axis in range(4)])
    _write_part(values, rest, add=True)
    return values
