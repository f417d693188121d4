"""The entries of a Kronecker sum: one matrix product over the tokens for each term, never a loop over them.

sum_t l_t[a] r_t[b] C_t[p, q] is the product of the pairs (a b, T) of the vectors with the cores (T, p q). The sum comes
in parts (the outer and the functional one, say), and what is written is the sum of what each part alone would be, to
the bit. Tokens stand last in the pairs, for long inner loops.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.operators.terms import Axes, Single, Term

TermGroup = Sequence[Term | Single]

_CHUNK = 2**28  # bytes for the tokens taken at once: more gain nothing


def write_entries(out: Tensor, parts: Sequence[TermGroup], symmetric: bool) -> None:
    """Write the sum of the parts to `out`, a view (r0, r1, c0, c1) into some larger matrix."""
    parts = [part for part in parts if part]
    if not parts:
        out.zero_()
    elif symmetric and _alike(parts):
        _write_symmetric(out, [term for part in parts for term in part if isinstance(term, Term)])
    else:
        for number, part in enumerate(parts):
            symmetrise = symmetric and not all(term.symmetric for term in part)
            at_once = number == 0 or (len(part) == 1 and not symmetrise)
            if at_once:
                _write_part(out, part, add=number > 0)
                target = out
            else:
                target = _new_part(out, part)
            if symmetrise:
                target.copy_((target + target.permute(2, 3, 0, 1)).mul_(0.5))
            if not at_once:
                out += target


def _view(out: Tensor, axes: Axes) -> Tensor:
    """`out` (r0, r1, c0, c1) with the axes of the vectors first and those of the core last."""
    return out.permute(axes[0], 2 + axes[1], 1 - axes[0], 3 - axes[1])


def _ranges(term: Term) -> list[tuple[int, int]]:
    return term.chunks(_at_once(term, checks.memory_budget()), extra=_pairs(term))


# ---- what it takes, in bytes


def workspace(parts: Sequence[TermGroup], symmetric: bool, room: int) -> int:
    """What `write_entries` needs beside the entries, when `room` is left: moments, and chunks of tokens."""
    parts, needed = [part for part in parts if part], [0]
    alike = symmetric and bool(parts) and _alike(parts)
    for number, part in enumerate(parts):
        first, *others = (_moments_and_chunk(term, room) for term in part)
        entries, symmetrised = _entries(part[0]), symmetric and not all(term.symmetric for term in part)
        apart = number > 0 and not alike and (len(part) > 1 or symmetrised)  # its sum is made beside the entries
        beside = entries if apart else 0
        needed += [first, *(beside + other for other in others), *([beside + entries] if symmetrised else [])]
    return max(needed)


def _moments_and_chunk(term: Term | Single, room: int) -> int:
    if isinstance(term, Single):
        return 0 if _is_diagonal(term.core) else _entries(term)
    one_token = (term.core.workspace + _pairs(term)) * term.left.element_size()
    chunk = min(term.tokens * one_token, max(one_token, _at_once(term, room)))
    return max(_beside(term), _entries(term) // (2 if term.symmetric else 1) + chunk)


def _pairs(term: Term) -> int:
    """Numbers a token for the pairs of its vectors: of a symmetric term half of them, and their factors."""
    return term.left.shape[1] * term.right.shape[1] * (3 if term.symmetric else 2) // 2


def _entries(term: Term | Single) -> int:
    vectors = term.outer if isinstance(term, Single) else term.left
    pairs = term.outer.numel() if isinstance(term, Single) else term.left.shape[1] * term.right.shape[1]
    return pairs * term.core.shape[0] * term.core.shape[1] * vectors.element_size()


def _beside(term: Term) -> int:
    """The moments, and beside them, of a symmetric term, the half that determines them."""
    return _entries(term) * (3 if term.symmetric else 2) // 2


def _at_once(term: Term, room: int) -> int:
    """For a chunk of tokens."""
    return max(0, min(_CHUNK, room // 4, room - _beside(term)))


# ---- symmetric blocks: only pairs a <= b of the vectors, each used twice, so that symmetry is exact


def _alike(parts: Sequence[TermGroup]) -> bool:
    """Whether each part is one symmetric term and all stand on the same axes: then their moments can be added."""
    if any(len(part) > 1 or not part[0].symmetric or isinstance(part[0], Single) for part in parts):
        return False
    return len({part[0].axes for part in parts}) == 1


def _write_symmetric(out: Tensor, terms: Sequence[Term]) -> None:
    moments = _pair_moments(terms[0])
    for term in terms[1:]:
        moments += _pair_moments(term)
    _view(out, terms[0].axes).copy_(moments[_pair_numbers(terms[0].left.shape[1], out.device)])


def _pair_moments(term: Term) -> Tensor:
    """The moments of a symmetric term for pairs a <= b, each a symmetric matrix: (pairs, p, p)."""
    width, inner = term.left.shape[1], term.core.shape[0]
    i, j = torch.triu_indices(width, width, device=term.left.device)
    result: Tensor | None = None
    for start, stop in _ranges(term):
        left = term.left[start:stop].T.contiguous()
        pairs, cores = left[i] * left[j], term.core.dense(start, stop).flatten(1)
        result = pairs @ cores if result is None else result.addmm_(pairs, cores)
    assert result is not None  # a term has at least one token
    result = result.view(-1, inner, inner)
    return (result + result.mT).mul_(0.5)


def _pair_numbers(width: int, device: torch.device) -> Tensor:
    """The number of the pair at every place of a symmetric matrix, (width, width)."""
    numbers = torch.empty(width, width, dtype=torch.int64, device=device)
    first, second = torch.triu_indices(width, width, device=device)
    counted = torch.arange(len(first), device=device)
    numbers[first, second] = counted
    numbers[second, first] = counted
    return numbers


# ---- other blocks


def _write_part(out: Tensor, terms: TermGroup, add: bool) -> None:
    for term in terms:
        target = _view(out, term.axes)
        if isinstance(term, Single):
            _put_single(target, term, add)
        elif add:
            target += _moments(term)
        else:
            target.copy_(_moments(term))
        add = True


def _new_part(like: Tensor, terms: TermGroup) -> Tensor:
    """The sum of the terms, (r0, r1, c0, c1), in the memory of the first one's moments where it has any."""
    first = terms[0]
    if isinstance(first, Single):
        values, rest = like.new_zeros(like.shape), terms
    else:
        order = _view(torch.empty(0, 1, 2, 3), first.axes).shape  # which axis of the block stands where
        values, rest = _moments(first).permute([order.index(axis) for axis in range(4)]), terms[1:]
    _write_part(values, rest, add=True)
    return values


def _put_single(target: Tensor, term: Single, add: bool) -> None:
    """outer (x) core; a diagonal core, such as the identity, only where it is not zero."""
    outer, core = term.outer[:, :, None, None], term.core
    if _is_diagonal(core):
        if not add:
            target.zero_()
        target.diagonal(dim1=2, dim2=3).add_(outer[..., 0] * core.diagonal())
    elif add:
        target += outer * core
    else:
        target.copy_(outer * core)


def _is_diagonal(core: Tensor) -> bool:
    return core.shape[0] == core.shape[1] and torch.equal(core, core.diagonal().diag())


def _moments(term: Term) -> Tensor:
    """sum_t l_t[a] r_t[b] C_t[p, q], (a, b, p, q)."""
    if term.symmetric:
        return _pair_moments(term)[_pair_numbers(term.left.shape[1], term.left.device)]
    result: Tensor | None = None
    for start, stop in _ranges(term):
        left, right = term.left[start:stop].T.contiguous(), term.right[start:stop].T.contiguous()
        pairs, cores = (left[:, None] * right).flatten(0, 1), term.core.dense(start, stop).flatten(1)
        result = pairs @ cores if result is None else result.addmm_(pairs, cores)
    assert result is not None  # a term has at least one token
    return result.view(term.left.shape[1], term.right.shape[1], *term.core.shape)
