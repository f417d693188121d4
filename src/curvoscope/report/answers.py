"""The answer of a run in three sentences, and the advice that its numbers bear out."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from curvoscope.analysis.advice import Findings, advice
from curvoscope.analysis.heterogeneity import BlockRow, times, verdict
from curvoscope.analysis.measurements import Extremes, Measurement
from curvoscope.analysis.spectra import BlockSpectrum, Distances
from curvoscope.estimate import Estimate
from curvoscope.report.model_tables import with_error

Answer = dict[str, Any]
"""question, answer and advice: what a document of a run says in words."""


def of_pairs(rows: Sequence[BlockRow]) -> Answer:
    """Of the exact Hessian of one Transformer block. Its own λ max is not the model's: no cap of the learning rate."""
    diagonal = [row for row in rows if row.diagonal]
    words = f"{verdict(rows)} {_apart([(row.row, row.frobenius_norm) for row in diagonal if row.part == 'total'], 0.0)}"
    found = [
        Measurement(row.row, row.part, (0, 0), "exact", *map(_exact, (row.frobenius_norm, row.trace, top)))
        for row in diagonal
        if (top := row.largest_eigenvalue) is not None and top > (row.eigenvalue_tolerance or 0.0)
    ]
    question = "Why do the query block and the value block of a Transformer's Hessian differ in size?"
    return _answer(question, words, Findings(rows=found))


def of_blocks(name: str, rows: Sequence[Measurement], rounding: float, ends: Extremes) -> Answer:
    """Of the blocks of any model."""
    norms = [(row.block, row.frobenius_norm.value) for row in rows if row.part == "total"]
    sizes = {(row.block, row.part): row.frobenius_norm.value for row in rows}
    larger = sum(sizes[block, "functional"] > max(sizes[block, "outer"], rounding) for block, _ in norms)
    sentences = (
        _apart(norms, rounding),
        f"The functional part has the larger norm in {larger} of {len(norms)} blocks, the outer part in the others.",
        _reach(ends),
    )
    # what is zero to rounding, or smaller than its error, was not measured
    known = [
        row
        for row in rows
        if row.frobenius_norm.value > rounding and row.largest_eigenvalue.value > row.largest_eigenvalue.stderr
    ]
    question = f"Where is the curvature of {name}, and how large a step does it allow?"
    return _answer(question, " ".join(sentences), Findings(rows=known, extremes=ends))


def of_spectra(name: str, spectra: Sequence[BlockSpectrum], apart: Distances, ends: Extremes) -> Answer:
    """Of the spectral densities of any model's blocks."""
    tops = [(one.block, one.largest.value) for one in spectra]
    sentences = (_apart(tops, 0.0, "λ max"), _farthest(apart), _reach(ends))
    question = f"How differently are the blocks of {name} curved?"
    return _answer(question, " ".join(sentences), Findings(extremes=ends, distances=apart))


def _answer(question: str, words: str, findings: Findings) -> Answer:
    return {"question": question, "answer": words, "advice": [dataclasses.asdict(one) for one in advice(findings)]}


def _apart(sizes: Sequence[tuple[str, float]], zero: float, what: str = "Frobenius norm") -> str:
    """The largest and the smallest block, of those that are not zero."""
    seen = sorted((size, name) for name, size in sizes if size > zero)
    if not seen:
        return f"No block has a positive {what}."
    (least, low), (most, high) = seen[0], seen[-1]
    if len(seen) == 1:
        return f"{high} has a {what} of {most:.2e}."
    return (
        f"Of {len(sizes)} blocks {high} has the largest {what}, {most:.2e}, {times(most / least)} "
        f"that of {low}, {least:.2e}, the smallest{' above zero' if len(seen) < len(sizes) else ''}."
    )


def _farthest(apart: Distances) -> str:
    """The two spectra that are farthest apart."""
    if len(apart.names) < 2:
        return "There is no second spectrum to compare it with."
    i, j = divmod(int(apart.values.argmax()), len(apart.names))
    distance = float(apart.values[i, j])
    if distance == 0:
        return "No two spectra can be told apart at this resolution."
    return (
        f"The spectra of {apart.names[i]} and {apart.names[j]} are farthest apart, by a Jensen-Shannon distance of at "
        f"least {distance:.2f}, where 0 is alike and 1 has nothing in common."
    )


def _reach(ends: Extremes) -> str:
    """The ends of the whole spectrum, and the step that they allow."""
    span = f"The eigenvalues of the whole Hessian run from {with_error(ends.smallest)} to {with_error(ends.largest)}"
    rate = ends.critical_learning_rate
    if rate is None:
        return f"{span}: none is positive, and no learning rate is critical."
    return f"{span}, so that plain gradient descent needs a learning rate below 2/λ max = {with_error(rate)}."


def _exact(value: float | None) -> Estimate:
    assert value is not None  # diagonal blocks have all numbers
    return Estimate(value, 0.0, 0, "exact")
