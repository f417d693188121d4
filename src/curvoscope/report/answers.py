"""The answer of a run in three sentences, and the advice that its numbers support."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from curvoscope.analysis.advice import Findings, advice
from curvoscope.analysis.ledger import Ledger
from curvoscope.analysis.measurements import Extremes, Measurement
from curvoscope.analysis.spectra import BlockSpectrum, Distances
from curvoscope.estimate import Estimate
from curvoscope.report.cells import amount
from curvoscope.report.model_tables import with_error
from curvoscope.sweep import Sweep
from curvoscope.training.records import Record

Conclusion = dict[str, Any]
"""question, answer and advice: what a document of a run says in words."""


def of_blocks(
    name: str, rows: Sequence[Measurement], rounding: float, ends: Extremes, scales: Mapping[str, float]
) -> Conclusion:
    """Of the blocks of any model; `scales` are those of the layers' inputs."""
    norms = [(row.block, row.frobenius_norm.value) for row in rows if row.part == "total"]
    sizes = {(row.block, row.part): row.frobenius_norm.value for row in rows}
    larger = sum(sizes[block, "functional"] > max(sizes[block, "outer"], rounding) for block, _ in norms)
    others = ", the outer part in the others" if 0 < larger < len(norms) else ""
    sentences = (
        _apart(norms, rounding),
        f"The functional part has the larger norm in {larger} of {len(norms)} blocks{others}.",
        _reach(ends),
    )
    # what is zero to rounding, or smaller than its error, was not measured
    known = [
        row
        for row in rows
        if row.frobenius_norm.value > rounding and row.largest_eigenvalue.value > row.largest_eigenvalue.stderr
    ]
    question = f"Where is the curvature of {name}, and how large a step does it allow?"
    return _answer(question, " ".join(sentences), Findings(rows=known, extremes=ends, input_scales=scales))


def of_sweep(name: str, sweep: Sweep, largest: Estimate | None) -> Conclusion:
    """Of a sweep; `largest`: the largest eigenvalue of the whole Hessian, if it was measured."""
    sizes = [(block, float(sweep.frobenius_norm(block))) for block in sweep.names]
    sentences = [_apart(sizes, 0.0, "Gauss-Newton norm"), _query_and_value(sweep)]
    if largest is not None and largest > 0:
        rate = Estimate(2 / largest, 2 / largest * (largest.stderr / largest), largest.matvecs, largest.method)
        sentences.append(
            f"The largest eigenvalue of the whole Hessian is {_told(largest)}, so plain gradient descent needs a "
            f"learning rate below {_told(rate)}."
        )
    question = f"Where is the curvature of {name}?"
    return {"question": question, "answer": " ".join(filter(None, sentences)), "advice": []}


def largest_block(sizes: Sequence[tuple[str, float]]) -> str:
    """The largest and the smallest block as a title."""
    return _apart(sizes, 0.0, "Gauss-Newton norm")


def _query_and_value(sweep: Sweep) -> str:
    """In how many layers the query block is smaller than the value block, beyond the errors of both."""
    pairs = [
        (sweep.frobenius_norm(name), sweep.frobenius_norm(f"{name.removesuffix('.Q')}.V"))
        for name in sweep.names
        if name.endswith(".attn.Q") and f"{name.removesuffix('.Q')}.V" in sweep.names
    ]
    if not pairs:
        return ""
    smaller = sum(query.interval()[1] < value.interval()[0] for query, value in pairs)
    larger = sum(query.interval()[0] > value.interval()[1] for query, value in pairs)
    ratios = sorted(float(value) / float(query) for query, value in pairs if query > 0)
    middle = f"; the median ratio of value to query is {amount(ratios[len(ratios) // 2])}" if ratios else ""
    layers = "layer" if len(pairs) == 1 else "layers"
    return (
        f"By 95 % intervals, the query block is smaller than the value block in {smaller} of {len(pairs)} {layers} and "
        f"larger in {larger}{middle}."
    )


def of_spectra(name: str, spectra: Sequence[BlockSpectrum], apart: Distances, ends: Extremes) -> Conclusion:
    """Of the spectral densities of any model's blocks."""
    tops = [(one.block, one.largest.value) for one in spectra]
    sentences = (_apart(tops, 0.0, "λ max"), _farthest(apart), _reach(ends))
    question = f"How differently are the blocks of {name} curved?"
    return _answer(question, " ".join(sentences), Findings(extremes=ends, distances=apart))


def of_ledger(name: str, words: str, ledger: Ledger) -> Conclusion:
    """Of a change of the weights; `words` name the change."""
    sentences = [
        f"{words} changes the loss by {_told(ledger.measured)} (measured). The second-order prediction is "
        f"{_told(ledger.predicted)}; the remaining {_told(ledger.remainder)} is of higher order."
    ]
    rows = sorted(ledger.changed, key=lambda row: -abs(row.first + row.second))
    if ledger.predicted:
        sentences.append(f"{rows[0].block} contributes most, {rows[0].share:.0%} of the predicted change.")
    if ledger.units.pairs is not None and len(rows) > 1:
        matrix = ledger.pairs.matrix
        apart, between = float(matrix.diagonal().sum()), float(matrix.sum() - matrix.diagonal().sum())
        sentences.append(
            f"Of the second-order change, {apart:.3g} comes from single blocks, {between:.3g} from their interactions."
        )
    return {"question": f"What does this change cost {name}?", "answer": " ".join(sentences), "advice": []}


def of_training(records: Sequence[Record], momentum: float | None) -> Conclusion:
    """Of a watched training run; momentum: that of SGD, None if the steps are those of another optimizer."""
    first, last = records[0], records[-1]
    tops = [one.largest_eigenvalue.value for one in records]
    if len(records) == 1:
        course = (
            f"One measurement only, at step {first.step}: the loss on the probe was {first.probe_loss:.3g} and λ max "
            f"{_told(first.largest_eigenvalue)}; more steps or a larger budget show how they change."
        )
    else:
        course = (
            f"From step {first.step} to step {last.step} the loss on the probe went from {first.probe_loss:.3g} to "
            f"{last.probe_loss:.3g}, and λ max from {_told(first.largest_eigenvalue)} to "
            f"{_told(last.largest_eigenvalue)}, with a maximum of {max(tops):.3g}."
        )
    sentences = (course, _edge(records), _shares(records))
    sharpness = {one.step: one.largest_eigenvalue.value for one in records}
    norms = [one.gradient_norm for one in records]
    findings = Findings(gradient_norms=norms)
    if momentum is not None and last.lr:
        ends = None
        if last.details is not None:
            ends = Extremes(1, last.largest_eigenvalue, last.details.smallest_eigenvalue)
        findings = Findings(
            extremes=ends, sharpness=sharpness, gradient_norms=norms, learning_rate=last.lr, momentum=momentum
        )
    question = "How did the curvature change during training, and how close was it to the edge?"
    return _answer(question, " ".join(sentences), findings)


def of_figures(figures: Sequence[Mapping[str, Any]]) -> Conclusion:
    """Of reproduced figures, with their verdicts."""
    verdicts = [(one["name"], verdict) for one in figures for verdict in one["verdicts"]]
    told = [(name, verdict) for name, verdict in verdicts if verdict["agrees"] is not None]
    wrong = [(name, verdict) for name, verdict in told if not verdict["agrees"]]
    sentences = [
        f"Of {len(told)} predictions in {len(figures)} {'figure' if len(figures) == 1 else 'figures'}, "
        f"{len(told) - len(wrong)} agree with the measurements."
    ]
    if wrong:
        some = "; ".join(f"{name}: {verdict['statement']}" for name, verdict in wrong[:3])
        sentences.append(f"Contradicted: {some}{' and others' if len(wrong) > 3 else ''}.")
    else:
        sentences.append("None is contradicted.")
    others = len(verdicts) - len(told)
    sentences.append(
        f"{others} more measured {'number has' if others == 1 else 'numbers have'} no prediction."
        if others
        else "Every measured number has a prediction."
    )
    question = "Do the papers' predictions hold?"
    if len(figures) == 1:
        question = figures[0]["question"]
    return {"question": question, "answer": " ".join(sentences), "advice": []}


def _edge(records: Sequence[Record]) -> str:
    """Where λ_max was, of the edge 2/lr."""
    known = [(one.edge_ratio, one.step) for one in records if one.edge_ratio is not None]
    if not known:
        return "No learning rate was given, so there is no edge to compare with."
    beyond = sum(ratio > 1 for ratio, _ in known)
    ratio, step = max(known)
    if len(known) == 1:
        return f"λ max was {ratio:.2g} of the edge of plain gradient descent, 2/lr."
    often = f"above it in {beyond} of {len(known)} measurements" if beyond else "never above it"
    return f"λ max was at most {ratio:.2g} of the edge of plain gradient descent, 2/lr (step {step}), and {often}."


def _shares(records: Sequence[Record]) -> str:
    """The functional share, first and last."""
    known = [
        (share, one.step)
        for one in records
        if one.details is not None and (share := one.details.functional_share) is not None
    ]
    if not known:
        return "The share of the functional part was not measured."
    (before, start), (now, end) = known[0], known[-1]
    if start == end:
        return f"The functional part had {now:.0%} of the blocks' squared norms at step {end}."
    words = f"The functional part had {before:.0%} of the blocks' squared norms at step {start}"
    return f"{words}, and {now:.0%} at step {end}."


def _told(estimate: Estimate) -> str:
    """A number inside a sentence, with its error: an exponent only if the number is very large or small."""
    return with_error(estimate, ".3g")


def _answer(question: str, words: str, findings: Findings) -> Conclusion:
    return {"question": question, "answer": words, "advice": [dataclasses.asdict(one) for one in advice(findings)]}


def _apart(sizes: Sequence[tuple[str, float]], zero: float, what: str = "Frobenius norm") -> str:
    """The largest and the smallest block, of those that are not zero."""
    seen = sorted((size, name) for name, size in sizes if size > zero)
    if not seen:
        return f"No block has a positive {what}."
    (least, low), (most, high) = seen[0], seen[-1]
    if len(seen) == 1:
        return f"{high} has a {what} of {most:.3g}."
    smallest = f"smallest{' above zero' if len(seen) < len(sizes) else ''}"
    return (
        f"Of {len(sizes)} blocks, {high} has the largest {what}, {most:.3g}, and {low} the {smallest}, {least:.3g}: a "
        f"factor of {most / least:{',.0f' if most >= 9.95 * least else '.2g'}}."
    )


def _farthest(apart: Distances) -> str:
    """The two spectra that are farthest apart."""
    if len(apart.names) < 2:
        return "There is no second spectrum to compare with."
    i, j = divmod(int(apart.values.argmax()), len(apart.names))
    distance = float(apart.values[i, j])
    if distance == 0:
        return "No two spectra can be distinguished at this resolution."
    return (
        f"The spectra of {apart.names[i]} and {apart.names[j]} are farthest apart, by a Jensen-Shannon distance of at "
        f"least {distance:.2f}, on a scale from 0 (equal) to 1 (disjoint)."
    )


def _reach(ends: Extremes) -> str:
    """The ends of the whole spectrum, and the step that they allow."""
    span = f"The eigenvalues of the whole Hessian run from {_told(ends.smallest)} to {_told(ends.largest)}"
    rate = ends.critical_learning_rate
    if rate is None:
        return f"{span}: none is positive, so no learning rate is critical."
    return f"{span}, so plain gradient descent needs a learning rate below 2/λ max = {_told(rate)}."
