"""`curvoscope spectrum [MODEL]`: eigenvalues against the dense Hessian by nested autodiff."""

import json
import shlex

import pytest
import torch
from PIL import Image
from torch.func import functional_call

from autodiff_cases import cross_entropy, truth_of
from curvoscope.families.block_maps import blocks_of
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import addition, answer_targets
from model_folders import saved

FAST = ["--sequences", "3"]
PROJECTIONS = ["attn.Q", "attn.K", "attn.V", "attn.O", "mlp.up", "mlp.down"]


@pytest.mark.slow
def test_the_papers_model_against_the_dense_hessian(call, undrawn, tmp_path):
    options = [*FAST, "--seed", "2", "--blocks", "h.0.attn.[QV]", "--blocks", "positions", "--out", tmp_path]
    code, stdout, stderr = call("spectrum", *options, "--json")
    assert (code, stderr) == (0, "") and stdout == (tmp_path / "spectrum.json").read_text()
    found = json.loads(stdout)
    numbers = addition(3, seed=2)
    model, targets = GPT2(seed=2), answer_targets(numbers)
    chosen = blocks_of(model).select("h.0.attn.[QV]", "positions")
    parameters = {name: p.detach() for name, p in model.named_parameters() if name in chosen.parameters}
    dense = truth_of(
        lambda p: functional_call(model, p, (numbers[:, :-1],)),
        parameters,
        lambda F: cross_entropy(F, targets),
        chosen,
    ).total.detach()
    start = 0
    for one, (name, size) in zip(found["blocks"], chosen.sizes.items(), strict=True):
        values = torch.linalg.eigvalsh(dense[start : start + size, start : start + size])
        start += size
        scale = float(values.abs().max())
        assert (one["block"], one["size"]) == (name, size)
        for end, expected in (("largest", values[-1]), ("smallest", values[0])):
            ritz = one[f"{end}_eigenvalue"]
            assert abs(ritz["value"] - float(expected)) <= ritz["stderr"] + 1e-9 * scale
        mean = one["mean"]
        assert abs(mean["value"] - float(values.mean())) <= 6 * mean["stderr"] + 1e-9 * scale
        band = one["cumulative"]
        x = torch.tensor(band["x"], dtype=torch.float64)
        # not at the ends of the support itself, where rounding decides
        inside = ((x[:, None] - values).abs().min(1).values > 1e-9 * scale) & (x.abs() > 1e-9 * scale)
        share = (values <= x[:, None]).double().mean(1)
        low, high = (torch.tensor(band[key], dtype=torch.float64) for key in ("low", "high"))
        held = (low - 1e-9 <= share) & (share <= high + 1e-9)
        assert float(held[inside].double().mean()) > 0.9
    exact = [one["block"] for one in found["blocks"] if one["density"]["method"] == "exact"]
    assert exact == ["h.0.attn.Q", "h.0.attn.V"]  # 256 eigenvalues are within the budget, 288 are not


def test_the_default_blocks_the_files_and_what_a_reader_sees(call, tmp_path):
    code, stdout, stderr = call("spectrum", *FAST, "--matvecs", "16", "--out", tmp_path / "out")
    assert (code, stderr) == (0, "")
    assert stdout.startswith("GPT2, 3,900 parameters in float64, random weights, seed 0.\n")
    assert "3 five-digit additions" in stdout and "2/λ max = " in stdout
    names = [f"h.0.{name}" for name in PROJECTIONS]
    assert all(name in stdout for name in [*names, "whole Hessian"])
    files = ["densities.png", "distances.png", "report.html", "report.md", "spectrum.json"]
    assert stdout.splitlines()[-5:] == [f"wrote {tmp_path / 'out' / name}" for name in files]
    for name in files[:2]:
        with Image.open(tmp_path / "out" / name) as image:
            image.load()
            assert min(image.size) >= 500
    found = json.loads((tmp_path / "out" / "spectrum.json").read_text())
    assert [one["block"] for one in found["blocks"]] == found["jensen_shannon"]["names"] == names
    apart = torch.tensor(found["jensen_shannon"]["distance"])
    assert torch.equal(apart, apart.T) and 0 <= float(apart.min()) <= float(apart.max()) <= 1
    assert found["hessian"]["spectrum"]["size"] == found["hessian"]["parameters"] == 3900


@pytest.mark.slow
def test_the_same_seed_twice_and_the_command_again(call, undrawn, tmp_path):
    options = [*FAST, "--matvecs", "16", "--blocks", "h.0.attn.[QV]", "--seed", "5", "--json"]
    first, second = (call("spectrum", *options, "--out", tmp_path / str(i))[1] for i in range(2))
    assert first == second
    words = shlex.split(json.loads(first)["command"])
    assert call(*words[1:], "--out", tmp_path / "2", "--json")[1] == first


def test_a_folder(call, undrawn, tmp_path):
    saved(tmp_path / "model", "llama")
    options = ["--sequences", "2", "--length", "6", "--matvecs", "16", "--out", tmp_path / "out", "--json"]
    code, stdout, stderr = call("spectrum", tmp_path / "model", *options)
    assert (code, stderr) == (0, "")
    names = [one["block"] for one in json.loads(stdout)["blocks"]]
    assert names == [f"h.0.{name}" for name in [*PROJECTIONS[:4], "mlp.gate", *PROJECTIONS[4:]]]


def test_a_large_model_starts_with_a_sweep(call, undrawn, tmp_path, monkeypatch):
    monkeypatch.setattr("curvoscope.commands.sweep_run.SWEPT", 0)
    options = [*FAST, "--matvecs", "16", "--blocks", "h.0.attn.[QV]", "--out", tmp_path / "out"]
    code, stdout, stderr = call("spectrum", *options)
    assert (code, stderr) == (0, "")
    first, swept, spectrum = (stdout.index(text) for text in ("‖H‖F", "Gauss-Newton part, ", "λ min"))
    assert first < swept < spectrum < stdout.index("Eigenvalues of the blocks")
    found = json.loads((tmp_path / "out" / "spectrum.json").read_text())["gauss_newton"]
    assert [row["block"] for row in found["rows"]] == ["h.0.attn.Q", "h.0.attn.V"] and found["samples"] >= 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--matvecs", "4"], "error: matvecs: got 4, expected at least 8"),
        (["--length", "5"], "error: length: is for language models; addition reads no text"),
        (["--blocks", "h.7.*"], "error: blocks: 'h.7.*' matches none"),
        (["adition"], "error: model: 'adition' is not a folder and none of addition"),
    ],
)
def test_errors_are_one_line(call, tmp_path, arguments, message):
    code, stdout, stderr = call("spectrum", *arguments, "--out", tmp_path / "out", "--json")
    assert (code, stdout) == (2, "") and stderr.startswith(message) and stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
