"""`curvoscope audit`: the numbers are those of the library, exact or sampled; table, figures, report."""

import json

import pytest

import curvoscope as cv
from curvoscope.commands.subject import Request, subject_of

SMALL = ("--d", "4", "--sequences", "2", "--blocks", "h.0.attn.[QV]")
TWO = ("--approximations", "kfac", "--approximations", "diagonal")


@pytest.fixture
def audit(call, tmp_path, undrawn):
    def run(*arguments):
        out = tmp_path / "out"
        code, stdout, stderr = call("audit", *arguments, "--out", out, "--json")
        assert (code, stderr) == (0, "")
        return json.loads(stdout), out

    return run


def test_exact(audit):
    document, out = audit(*SMALL, *TWO)
    subject = subject_of(Request("addition", 0, sequences=2, d=4))
    blocks = subject.blocks.select("h.0.attn.[QV]")
    H = cv.hessian(subject.model, subject.loss, [subject.batch], blocks)
    expected = cv.analysis.audit(H, blocks.names, ["kfac", "diagonal"])
    assert document["samples"] is None and document["command"].startswith("curvoscope audit addition")
    for row, own in zip(document["rows"], expected, strict=True):
        assert (row["block"], row["approximation"], row["floats"]) == (own.block, own.approximation, own.floats)
        assert row["error"]["value"] == pytest.approx(own.error) and row["error"]["method"] == "exact"
        assert row["step_error"]["value"] == pytest.approx(own.step_error)
    outside = cv.analysis.block_diagonal_error(H, blocks.names)
    assert document["outside_diagonal_blocks"]["value"] == pytest.approx(outside)
    assert json.loads((out / "audit.json").read_text()) == document


@pytest.mark.parametrize("samples", [(), ("--samples", "32")], ids=["exact", "sampled"])
def test_queries_keys_and_values_as_one_weight(audit, samples):
    document, out = audit("--d", "4", "--sequences", "2", "--blocks", "h.0.attn.[QKV]", *TWO, *samples)
    names = [(row["block"], row["approximation"]) for row in document["groups"]]
    group = "h.0.attn.Q + h.0.attn.K + h.0.attn.V"
    assert names == [(group, name) for name in ("kfac", "kfac/layers", "layers")]
    assert "One kfac for each of Q, K and V instead of one for all of them" in document["answer"]
    report = (out / "report.md").read_text()
    assert "Q, K and V as one weight" in report and "h.0.attn.Q+K+V" in report
    if not samples:
        subject = subject_of(Request("addition", 0, sequences=2, d=4))
        H = cv.hessian(subject.model, subject.loss, [subject.batch], subject.blocks.select("h.0.attn.[QKV]"))
        error = cv.analysis.block_diagonal_error(H, H.names)
        assert document["groups"][2]["error"]["value"] == pytest.approx(error)


def test_sampled(audit):
    document, _ = audit(*SMALL, *TWO, "--samples", "32")
    assert document["samples"] == 32
    assert all(row["error"]["stderr"] > 0 and row["step_error"] is None for row in document["rows"])
    assert document["missing"]


def test_what_a_reader_sees(call, tmp_path):
    out = tmp_path / "out"
    code, stdout, _ = call("audit", "--d", "4", "--sequences", "2", *TWO, "--out", out)
    assert code == 0
    assert "Take kfac: its error is" in stdout.replace("\n", " ") or "Take diagonal" in stdout
    assert "diagonal blocks together" in stdout.replace("\n", " ")
    report = (out / "report.html").read_text()
    assert "at best scale" in report and "What all diagonal blocks together miss" in report
    assert (out / "audit_errors.png").stat().st_size > 0
    before = (out / "report.md").read_text()
    code, *_ = call("report", out)
    assert code == 0 and (out / "report.md").read_text() == before
