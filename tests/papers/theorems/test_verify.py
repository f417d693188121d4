"""Every result of the sources holds as its verdict says, none is missing, and a wrong formula is noticed."""

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import curvoscope.papers.theorems
from curvoscope.papers.theorems import Result, attention, linear, registry, verify
from curvoscope.papers.theorems.calculus import commutation_of_lemma_b2
from curvoscope.papers.theorems.growth import DEGREES, Degrees, GrowthKey
from curvoscope.papers.theorems.registry import (
    REFUTED,
    THEOREMS,
    Fails,
    Theorem,
    largest,
    relative_error,
    relative_size,
    smallest,
)
from curvoscope.papers.theorems.results import query_key, slides
from curvoscope.papers.theorems.verify import examine, names

PAPER = """
Equation (2)|Equation (3)|Equation (4)|Section 2, square loss|Section 2, batches (footnote 1)|Section 2, linear MLP
Section 3, value block|Theorem 3.1|Theorem 3.1, proof|Theorem 3.2|Equation (21)|Lemma B.1|Equation (19)
Section 3.1, value block of a full block|Definition 3.1|Remark 3.1, Z1|Remark 3.1, Z2|Remark C.1|Lemma C.1
Equation (23)|Section 3.2, one-hot attention|Equation (5), outer|Equation (5), functional
Equation (5), large σ at fixed A|Equation (5), small σ, square loss|Equation (5), small σ, cross-entropy
Section 3.1, trend of the query block|Appendix G, deep networks|Section 4.3, Pre-LN|Section 3.3, weights
Section 4.3, temperature|Section 4.3, high temperature|Section 4.3, low temperature
Section 4.1, derivatives of linear attention|Remark 4.1, outer|Remark 4.1, functional|Table 1
Section 4.1, indefiniteness|Section 4.1, depth|Section 4.1, depth with skip connections
Section 4.1, depth of a linear MLP|Lemma 4.1|Equation (22)|Remark D.1|Appendix D, eigenvalue pairs|Lemma D.2
Lemma D.2, proof|Definition A.1|Equation (6)|Equation (7)|Equation (8)|Equation (9)|Equation (10)|Equation (11)
Equation (12)|Equation (13)|Equation (14)|Equation (15)|Equation (16)|Equation (17)|Equation (18)
Lemma B.2, equation (20)|Lemma B.3|Lemma D.1|Remark E.1|Appendix E, blocks between heads|Appendix E, sparsity
Appendix E.1, equation (24)|Appendix E.1, functional block
"""
SLIDES = """
Slides, moment table|Slides, weight table|Slides, linear attention|Slides, scalar model|Slides, attention sink
Slides, Optimal Brain Surgeon
"""
OWN = """
Section 2, linear MLP, functional blocks|Theorem 3.1, key blocks|Theorem 3.1, any value width
Theorem 3.2, key blocks|Theorem 3.2, any value width|Lemma B.1, key Jacobian|Remark 4.1, key blocks
Remark D.1, any value width|Appendix D, norms of the T-functional part|Appendix E.1, other blocks
Scalar model, any loss|Scalar model, degenerate weights|Scalar model, batch|Scalar model, outlier subspace
Scalar model, Gauss-Newton|Gauge identity, query-key|Gauge identity, value-output|Euler identity
Exact bulk, eigenvectors|Exact bulk, multiplicity|Lemma D.2, sharper|Single matrix, index form
Block paper, Theorems 2 and 3, row by row|Block paper, exact norms of LayerNorm|Block paper, lemma on Φ, other blocks
Block paper, Theorem 5, ξ_k1 and ξ_k2|Block paper, Theorem 6, sharper|Block paper, Assumption 1
Block paper, loss of a post-norm block
"""


def listed(table: str) -> set[str]:
    return {name for line in table.strip().splitlines() for name in line.split("|")}


@pytest.mark.parametrize("name", list(THEOREMS))
def test_result_holds(name: str) -> None:
    result = THEOREMS[name].examine(seed=0)
    assert result.holds, result


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_all_results_hold_for_other_seeds(seed: int) -> None:
    assert [result for result in verify(seed) if not result.holds] == []


@pytest.mark.parametrize(("source", "table"), [("paper", PAPER), ("slides", SLIDES), ("Curvoscope", OWN)])
def test_registry_is_complete(source: str, table: str) -> None:
    assert {name for name, one in THEOREMS.items() if one.source == source} == listed(table)


def test_every_erratum_is_covered() -> None:
    notes = " ".join(one.note for one in THEOREMS.values())
    assert [number for number in range(1, 14) if f"(E{number})" not in notes] == []


def test_every_erratum_refutes_the_printed_form() -> None:
    corrected = [one for one in THEOREMS.values() if one.verdict == "holds corrected"]
    results = [one.examine(seed=0) for one in corrected]
    assert len(results) >= 20
    assert [result.name for result in results if result.refuted is None or result.refuted <= REFUTED] == []


def test_examine_yields_the_results_in_the_order_of_names() -> None:
    assert [result.name for _, result in zip(range(3), examine(0), strict=False)] == names()[:3]


def test_same_seed_same_numbers() -> None:
    assert THEOREMS["Lemma 4.1"].examine(5) == THEOREMS["Lemma 4.1"].examine(5)


def test_default_dtype_does_not_matter() -> None:
    assert torch.get_default_dtype() is torch.float32
    assert THEOREMS["Theorem 3.2"].examine(0).error < 1e-12


# ---- a wrong formula is noticed


def without_last_summand(row: torch.Tensor, j: int) -> torch.Tensor:
    """Lemma C.1 without its last summand."""
    L = len(row)
    e_j = torch.eye(L, dtype=torch.float64)[:, j : j + 1]
    a = row[:, None]
    return row[j] * (2 * a @ a.T + e_j @ e_j.T - torch.diag(row) - e_j @ a.T)


MUTATIONS = {
    "commutation": (attention, "commutation", commutation_of_lemma_b2, ["Lemma B.1, key Jacobian"]),
    "key layout": (
        attention,
        "key_layout",
        lambda W_Q: torch.kron(W_Q.contiguous(), torch.eye(len(W_Q), dtype=torch.float64)),
        ["Theorem 3.1", "Theorem 3.1, key blocks", "Theorem 3.2", "Theorem 3.2, key blocks"],
    ),
    "softmax Jacobian": (
        attention,
        "softmax_jacobian",
        lambda A: torch.block_diag(*[torch.diag(row) for row in A]),
        ["Theorem 3.1", "Theorem 3.2", "Lemma B.1"],
    ),
    "softmax Hessian": (attention, "softmax_entry_hessian", without_last_summand, ["Theorem 3.2"]),
    "shuffle": (
        attention,
        "shuffle",
        lambda outputs, inputs: torch.zeros(outputs**2 * inputs, inputs, dtype=torch.float64),
        ["Theorem 3.2", "Theorem 3.2, any value width", "Remark D.1"],
    ),
    "sign of the layout": (query_key, "query_layout", lambda W_K: -attention.query_layout(W_K), ["Remark D.1"]),
    "commutation, linear attention": (linear, "commutation", commutation_of_lemma_b2, ["Remark 4.1, outer"]),
    "shuffle, linear attention": (
        linear,
        "shuffle",
        lambda outputs, inputs: torch.zeros(outputs**2 * inputs, inputs, dtype=torch.float64),
        ["Remark 4.1, functional", "Remark 4.1, key blocks"],
    ),
    "outliers of the scalar model": (
        slides,
        "outlier_matrix",
        lambda *arguments: torch.eye(3, dtype=torch.float64),
        ["Slides, scalar model", "Scalar model, batch"],
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_formula_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, replacement, affected = MUTATIONS[mutation]
    monkeypatch.setattr(module, attribute, replacement)
    for name in affected:
        result = THEOREMS[name].examine(seed=0)
        assert result.error > 0.1, name
        assert not result.holds


@pytest.mark.parametrize(
    "part",
    [
        ("outer", "Q", "K"),
        pytest.param(("functional", "K", "K"), marks=pytest.mark.slow),
        pytest.param(("logit", "Q", "K"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("scale", Degrees._fields)
def test_wrong_degree_is_noticed(part: GrowthKey, scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    degrees = DEGREES[part]
    monkeypatch.setitem(DEGREES, part, degrees._replace(**{scale: getattr(degrees, scale) + 1}))
    assert THEOREMS["Equation (5), outer"].examine(0).holds == (part[0] != "outer" or scale not in ("X", "s"))
    assert THEOREMS["Slides, weight table"].examine(0).holds == (scale == "X")


def test_commutation_convention_of_the_theorems_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "commutation", commutation_of_lemma_b2)
    for name in ("Theorem 3.1", "Theorem 3.1, key blocks", "Theorem 3.2", "Remark D.1"):
        assert THEOREMS[name].examine(seed=0).error > 0.1, name


def test_nan_out_of_a_formula_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = attention.z1

    def poisoned(X: torch.Tensor, dA: torch.Tensor) -> torch.Tensor:
        Z1 = original(X, dA)
        Z1[0, 0] = math.nan
        return Z1

    monkeypatch.setattr(attention, "z1", poisoned)
    result = THEOREMS["Theorem 3.1"].examine(seed=0)
    assert math.isnan(result.error)
    assert not result.holds


# ---- the verdicts


def result_of(*errors: float, **options: Any) -> Result:
    return Theorem("name", "paper", lambda seed: errors, **options).examine(seed=0)


def test_holds_within_the_tolerance_only() -> None:
    assert result_of(1e-11).holds
    assert not result_of(1e-9).holds
    assert result_of(1e-9, tolerance=1e-8).holds


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_nan_and_infinity_never_hold(error: float) -> None:
    assert not result_of(error).holds
    assert not result_of(error, Fails(1.0), verdict="holds corrected").holds


def test_erratum_fails_when_the_printed_form_holds_after_all() -> None:
    assert result_of(0.0, Fails(1.8), verdict="holds corrected").holds
    assert not result_of(0.0, Fails(1e-12), verdict="holds corrected").holds
    assert not result_of(0.0, Fails(math.nan), verdict="holds corrected").holds


def test_false_stands_while_the_printed_form_fails() -> None:
    assert result_of(0.5, verdict="false", tolerance=REFUTED).holds
    assert not result_of(1e-12, verdict="false", tolerance=REFUTED).holds
    assert not result_of(math.nan, verdict="false", tolerance=REFUTED).holds


def test_the_worst_draw_counts() -> None:
    result = result_of(1e-12, 1e-3, Fails(1.0), Fails(2.0))
    assert (result.error, result.refuted) == (1e-3, 1.0)
    assert result_of(0.0, Fails(0.0), Fails(2.0), somewhere=True).refuted == 2.0
    assert result_of(0.5, 1e-12, verdict="false", tolerance=REFUTED).error == 1e-12


def test_note_says_how_far_the_other_form_is_off() -> None:
    assert result_of(0.0, Fails(1.84), note="twice as large (E0)").note == (
        "twice as large (E0); printed form off by 1.8"
    )
    assert result_of(0.0, Fails(math.inf)).note == "printed form has the wrong shape"


def test_shapes_that_do_not_fit_are_infinitely_wrong() -> None:
    result = Theorem("name", "paper", lambda seed: torch.zeros(2, 3) @ torch.zeros(2, 3)).examine(seed=0)
    assert math.isinf(result.error)
    assert not result.holds
    assert "shapes" in result.note


def test_two_results_cannot_share_a_name() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        registry.PAPER.holds("Theorem 3.1")(lambda seed: [0.0])


# ---- the measure of error


def test_relative_error_is_largest_deviation_over_largest_entry() -> None:
    assert relative_error(torch.tensor([1.0, -3.0]), torch.tensor([1.0, -4.0])) == 0.25
    assert relative_error(torch.tensor([1.0]), torch.tensor([2.0]), scale=torch.tensor([-10.0])) == 0.1
    assert relative_size(torch.tensor([0.0, -2.0]), torch.tensor([8.0])) == 0.25


def test_relative_error_where_the_reference_is_zero() -> None:
    zero = torch.zeros(2)
    assert relative_error(zero, zero) == 0
    assert math.isinf(relative_error(torch.ones(2), zero))
    assert math.isnan(relative_error(torch.tensor([0.0, math.nan]), zero))


def test_relative_error_of_other_shapes_is_infinite() -> None:
    assert math.isinf(relative_error(torch.zeros(2, 1), torch.zeros(2)))


@pytest.mark.parametrize("where", [0, 1])
def test_relative_error_keeps_nan(where: int) -> None:
    pair = [torch.ones(3), torch.ones(3)]
    pair[where][1] = math.nan
    assert math.isnan(relative_error(*pair))


@pytest.mark.parametrize("errors", [[0.0, math.nan], [math.nan, 0.0], [math.inf, math.nan]])
def test_largest_and_smallest_keep_nan(errors: list[float]) -> None:
    assert math.isnan(largest(errors))
    assert math.isnan(smallest(errors))


def test_no_comparison_is_no_agreement() -> None:
    with pytest.raises(ValueError, match="no comparison"):
        largest([])


# ---- independence


def test_nothing_of_the_package_is_used() -> None:
    folder = Path(curvoscope.papers.theorems.__file__).parent
    used = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                used.add(node.module or "")
            elif isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
    own = {module for module in used if module.startswith("curvoscope")}
    assert {module for module in own if not module.startswith("curvoscope.papers.theorems")} == set()
