"""`curvoscope sensitivity MODEL`: its numbers against forward passes and the dense Hessian, its options, its files."""

import json

import pytest
import torch
from torch.func import functional_call

from autodiff_cases import cross_entropy, truth_of
from curvoscope.analysis import recipes
from curvoscope.families.block_maps import blocks_of
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import addition, answer_targets
from model_folders import saved

FAST = ["addition", "--sequences", "3", "--d", "4"]


def test_the_papers_model_against_the_dense_hessian(call, undrawn, tmp_path):
    options = ["--seed", "2", "--recipe", "int4", "--group", "4", "--asymmetric", "--out", tmp_path]
    code, stdout, stderr = call("sensitivity", *FAST, *options, "--json")
    assert (code, stderr) == (0, "") and stdout == (tmp_path / "sensitivity.json").read_text()
    found = json.loads(stdout)
    numbers = addition(3, seed=2)
    model, targets = GPT2(4, seed=2), answer_targets(numbers)
    changed = recipes.int4(model, group=4, symmetric=False)
    blocks = blocks_of(model).select("h.0.attn.[QKVO]", "h.0.mlp.up", "h.0.mlp.down")
    assert [row["block"] for row in found["rows"]] == blocks.names

    def loss(state):
        return float(cross_entropy(functional_call(model, state, (numbers[:, :-1],)), targets).detach())

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    delta = {name: changed[name] - p for name, p in parameters.items()}
    assert found["measured"]["value"] == pytest.approx(loss(changed) - loss(parameters), abs=1e-12)
    some = {name: p for name, p in parameters.items() if name in blocks.parameters}
    H = truth_of(
        lambda p: functional_call(model, parameters | p, (numbers[:, :-1],)),
        some,
        lambda F: cross_entropy(F, targets),
        blocks,
    ).total.detach()
    d = blocks.gather(delta)
    second = [float(part.sum()) / 2 for part in (d * (H @ d)).split(list(blocks.sizes.values()))]
    assert [row["second"]["value"] for row in found["rows"]] == pytest.approx(second, abs=1e-12)
    assert found["predicted"]["value"] + found["remainder"]["value"] == pytest.approx(found["measured"]["value"])
    assert found["scaled"][-1]["predicted"]["value"] == pytest.approx(found["predicted"]["value"])
    assert found["ranks"][0]["score"] == "second order" and len(found["pairs"]) == 15
    assert found["command"].endswith("--d 4 --norm none --attention softmax --recipe int4 --group 4 --asymmetric")


def test_what_a_reader_sees_and_the_formats_for_a_budget(call, undrawn, tmp_path):
    options = ["--recipe", "int3", "--group", "4", "--budget", "10", "--out", tmp_path]
    code, stdout, _ = call("sensitivity", *FAST, *options)
    assert code == 0 and "What the change costs" in stdout and "Rank correlation" in stdout
    for name in ("interactions.png", "prediction.png", "ranking.png", "report.html", "report.md", "sensitivity.json"):
        assert (tmp_path / name).is_file() and f"wrote {tmp_path / name}" in stdout.replace("\n", "")
    found = json.loads((tmp_path / "sensitivity.json").read_text())
    rows = {row["by"]: row for row in found["allocations"]}
    ours = rows["g·d + ½ d·Hd with interactions"]
    assert all(row["bits"] <= 10 for row in rows.values()) and found["budget"] == 10
    assert ours["predicted"] <= min(row["predicted"] for row in rows.values()) + 1e-12
    assert {one["format"] for one in found["formats"]} <= {"int3", "int4", "int8"} and len(found["formats"]) == 6
    assert call("report", tmp_path)[0] == 0


def test_the_formats_are_those_of_the_chosen_blocks(call, undrawn, tmp_path):
    options = ["--recipe", "int3", "--group", "4", "--budget", "9", "--blocks", "h.0.attn.[QV]", "--out", tmp_path]
    code, stdout, _ = call("sensitivity", *FAST, *options, "--json")
    found = json.loads(stdout)
    assert code == 0 and [one["block"] for one in found["formats"]] == ["h.0.attn.Q", "h.0.attn.V"]
    assert "int3 in groups of 4 of h.0.attn.[QV] changes the loss" in found["answer"]
    numbers, model = addition(3, seed=0), GPT2(4, seed=0)
    before = {name: p.detach() for name, p in model.named_parameters()}
    blocks, state = blocks_of(model), {name: p.clone() for name, p in before.items()}
    for one in found["formats"]:
        rounded = getattr(recipes, one["format"])(model, group=4)
        blocks[one["block"]].scatter(blocks[one["block"]].gather(rounded), state)

    def loss(weights):
        F = functional_call(model, weights, (numbers[:, :-1],))
        return float(cross_entropy(F, answer_targets(numbers)).detach())

    assert found["allocations"][0]["measured"]["value"] == pytest.approx(loss(state) - loss(before), abs=1e-12)


def test_bits_of_formats_with_a_zero_level(call, undrawn, tmp_path):
    options = ["--recipe", "int3", "--group", "4", "--budget", "9", "--asymmetric", "--no-pairs", "--out", tmp_path]
    code, stdout, _ = call("sensitivity", *FAST, *options, "--json")
    rows = {row["by"]: row["bits"] for row in json.loads(stdout)["allocations"]}
    assert code == 0 and rows["uniform int4"] == 9  # for 4 weights: 4 times 4 bits, a scale of 16, a zero level of 4


def test_heads_pruning_and_no_pairs(call, undrawn, tmp_path):
    code, stdout, _ = call("sensitivity", *FAST, "--drop-heads", "--json", "--out", tmp_path)
    heads = json.loads(stdout)
    assert code == 0 and [row["block"] for row in heads["rows"]] == ["h.0.attn.O.0"] and heads["ranks"] == []
    code, stdout, _ = call("sensitivity", *FAST, "--prune", "0.5", "--no-pairs", "--json", "--out", tmp_path)
    pruned = json.loads(stdout)
    assert code == 0 and pruned["pairs"] == [] and pruned["rows"][0]["alone"] is None
    assert pruned["missing"] and "--prune 0.5 --no-pairs" in pruned["command"] and "--drop" not in pruned["command"]
    assert "alone, measured" not in (tmp_path / "report.md").read_text()  # no columns without a number
    code, stdout, _ = call("sensitivity", *FAST, "--prune", "0.5", "--no-pairs", "--out", tmp_path)
    assert code == 0 and "share" in stdout and "alone" not in stdout


@pytest.mark.slow
def test_a_folder_changed_into_another(call, undrawn, tmp_path):
    model = saved(tmp_path / "one")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "two")
    options = ["--sequences", "2", "--length", "8", "--json", "--out", tmp_path / "out"]
    code, stdout, _ = call("sensitivity", tmp_path / "one", tmp_path / "two", *options)
    found = json.loads(stdout)
    assert code == 0 and [row["block"] for row in found["rows"]] == ["h.0.mlp.up"]
    assert found["command"].startswith(f"curvoscope sensitivity {tmp_path / 'one'} {tmp_path / 'two'} --seed 0")


def test_groups_that_do_not_fit_a_budget_are_an_error_before_anything_is_measured(call, undrawn, tmp_path):
    out = tmp_path / "out"
    code, stdout, stderr = call("sensitivity", *FAST, "--recipe", "int3", "--budget", "10", "--out", out)
    assert (code, stdout) == (2, "") and not out.exists()
    assert stderr.startswith("error: group: ") and "which 64 does not divide; choose another group size" in stderr
