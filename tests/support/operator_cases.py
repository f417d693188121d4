"""The definition of a term of a Kronecker sum, entry by entry."""

import torch


def term_truth(left, right, cores, axes):
    """sum_t l_t r_t^T (x) C_t as a dense matrix: `left` (T, a), `right` (T, b), `cores` (T, p, q) or one for all."""
    rows, columns = ["a", "p"], ["b", "q"]
    core = "t" if cores.ndim == 3 else ""
    names = f"t{rows[axes[0]]},t{columns[axes[1]]},{core}{rows[1 - axes[0]]}{columns[1 - axes[1]]}->apbq"
    return torch.einsum(names, left, right, cores).flatten(2).flatten(0, 1)
