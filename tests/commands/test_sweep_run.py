"""`curvoscope analyze --parts outer`: the numbers are those of `cv.sweep`, what is known is written, runs go on."""

import json
from types import SimpleNamespace

import pytest
import torch

import curvoscope as cv
from curvoscope.commands import sweep_run
from curvoscope.commands.subject import Request, select, subject_of
from curvoscope.sweep import run
from curvoscope.sweep.walk import Walk

pytest.importorskip("transformers")

MODEL = ("gpt2-tiny", "--sequences", "2", "--length", "8", "--tolerance", "0.3")


@pytest.fixture
def analyze(call, tmp_path, undrawn):
    """The JSON of a run that succeeds."""

    def run(*arguments):
        out = tmp_path / "out"
        code, stdout, stderr = call("analyze", *MODEL, "--parts", "outer", *arguments, "--out", out, "--json")
        assert (code, stderr) == (0, "")
        return json.loads(stdout), out

    return run


def test_the_numbers_are_those_of_the_library(analyze):
    document, out = analyze("--fast")
    subject = subject_of(Request("gpt2-tiny", 0, sequences=2, length=8))
    blocks = select(subject.blocks, ())
    sweep = cv.sweep(subject.model, subject.loss, [subject.batch], blocks, tolerance=0.3, seed=0, micro_batch=1)
    assert document["samples"] == sweep.samples
    assert [row["block"] for row in document["rows"]] == sweep.names
    for row in document["rows"]:
        assert row["trace"]["value"] == pytest.approx(float(sweep.trace(row["block"])), rel=1e-4)
        norm = sweep.frobenius_norm(row["block"])
        assert row["frobenius_norm"]["value"] == pytest.approx(float(norm), rel=1e-4)
    value = torch.tensor(document["pairs"]["frobenius_norm"])
    assert value.shape == (len(sweep.names), len(sweep.names))
    assert torch.allclose(value, value.T)
    assert {row["block"] for row in document["heads"]} <= set(sweep.names)
    assert document["hessian"] is None
    assert json.loads((out / "table.json").read_text()) == document
    assert not (out / "samples.pt").exists()


def test_what_a_reader_sees(call, tmp_path, monkeypatch):
    clock = iter([0.0, 2.0])  # a gradient of one of the two rows takes two seconds
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    code, stdout, _ = call("analyze", *MODEL, "--parts", "outer", "--out", tmp_path / "out")
    assert code == 0
    plan = "Plan: 64 samples, about 64 seconds; then the largest eigenvalue of the whole Hessian, about 2 minutes. ("
    assert stdout.index("parameters in float32") < stdout.index(plan) < stdout.index("h.0.attn.Q")
    assert "one gradient of one row, which took 2 s" in stdout
    assert stdout.index("parameters in float32") < stdout.index("h.0.attn.Q") < stdout.index("Gauss-Newton part, ")
    assert "smaller than the value block in" in stdout
    report = (tmp_path / "out" / "report.html").read_text()
    assert "effective rank" in report
    assert "--parts all" in report
    for name in ("sweep_pairs.png", "sweep_depth.png", "sweep_heads.png", "report.md", "table.json"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    code, stdout, _ = call("report", tmp_path / "out")
    assert code == 0


@pytest.mark.slow
def test_an_interrupted_run_is_written_and_continued(analyze, monkeypatch):
    whole, _ = analyze("--fast", "--tolerance", "0.03")
    assert whole["samples"] > 64
    real = sweep_run.sweep

    def interrupted(*arguments, tell, **options):
        def stop(so_far):
            tell(so_far)
            if len(so_far.chunks) == 2 and len(so_far.chunks[1]) == 3:
                raise KeyboardInterrupt

        return real(*arguments, tell=stop, **options)

    monkeypatch.setattr(sweep_run, "sweep", interrupted)
    half, out = analyze("--fast", "--tolerance", "0.03")
    assert any("interrupted" in sentence for sentence in half["missing"])
    assert (out / "samples.pt").exists()
    monkeypatch.setattr(sweep_run, "sweep", real)
    continued, _ = analyze("--fast", "--tolerance", "0.03")
    assert continued["samples"] == whole["samples"]
    for one, other in zip(continued["rows"], whole["rows"], strict=True):
        assert one["trace"]["value"] == pytest.approx(other["trace"]["value"], rel=1e-4)
    assert not (out / "samples.pt").exists()


def test_an_interrupt_during_the_last_product_keeps_the_sweep(analyze, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    real = sweep_run._largest
    monkeypatch.setattr(sweep_run, "_largest", interrupted)
    document, out = analyze()
    assert document["hessian"] is None and document["rows"] and (out / "samples.pt").exists()
    monkeypatch.setattr(sweep_run, "_largest", real)
    monkeypatch.setattr(Walk, "run", interrupted)  # no sample is drawn again
    again, _ = analyze()
    assert again["rows"] == document["rows"] and again["hessian"]["largest_eigenvalue"]["value"] > 0
    assert not (out / "samples.pt").exists()


def test_a_broken_file_of_samples_is_ignored(analyze, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "samples.pt").write_bytes(b"no checkpoint")
    document, _ = analyze("--fast")
    assert document["rows"]


@pytest.mark.parametrize(("option", "value"), [("matvecs", "8"), ("split", "layer"), ("method", "exact")])
def test_products_are_no_option_of_a_sweep(call, tmp_path, option, value):
    code, _, stderr = call("analyze", *MODEL[:5], "--parts", "outer", f"--{option}", value, "--out", tmp_path / "out")
    assert code == 2
    assert f"{option}: got {value}" in stderr
    assert not (tmp_path / "out").exists()
