"""docs/audit.md is what the stored results say."""

import json

import pytest
from benchmarks.audit_page import page, table_of
from benchmarks.audit_study import RESULTS

import curvoscope as cv
from curvoscope.papers import tasks
from curvoscope.papers.networks import GPT2
from fences import DOCS

FOUND = json.loads(RESULTS.read_text())


def test_it_is_the_page_of_the_results():
    assert (DOCS / "audit.md").read_text() == page(FOUND)


def test_a_stored_number_is_that_of_the_dense_block():
    """KFAC of the value weight of the addition network."""
    model, tokens = GPT2(16).eval(), tasks.addition(64)
    blocks = cv.blocks_of(model).select("h.0.attn.V")
    H = cv.hessian(model, cv.losses.CrossEntropy(), [(tokens[:, :-1], tasks.answer_targets(tokens))], blocks)
    truth, A = H.outer["h.0.attn.V"].dense(), cv.approximations.kfac(H, "h.0.attn.V").dense()
    cosine = float((truth * A).sum() / (truth.norm() * A.norm()))
    stored = table_of(FOUND["addition"]).row("h.0.attn.V", "kfac").best_scale_error
    assert stored == pytest.approx((1 - cosine**2) ** 0.5, rel=1e-3)
