"""Asking is free: blocks and the plan run nothing, and the plan is what is done."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import curvoscope
from autodiff_cases import GPT, MLP, points, tokens
from curvoscope.autodiff.matrix import AutodiffBlock
from curvoscope.closed.closed_forms import ClosedForms
from curvoscope.curvature import CrossEntropy, blocks_of, hessian
from curvoscope.errors import BlockNameError, RangeError
from family_cases import CASES, WORDS, hf
from family_cases import tokens as words
from reference import normal, relative

PARTS = ("outer", "functional", "total")


def _language(case):
    model = CASES[case]().model
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("sdpa")
    return model, CrossEntropy(), [(words(), words().flip(0))]


def _calls(model):
    """How often the model was called, from now on."""
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


class TestAskingIsFree:
    def test_blocks_and_the_plan_run_nothing(self):
        model = GPT(2)
        H = hessian(model, CrossEntropy(), [tokens()])
        calls = _calls(model)
        asked = [getattr(H, part)[row, column] for part in PARTS for row in H.names for column in H.names]
        derived = [block.T for block in asked] + [H["h.0.attn.Q"] * 2 + H["h.0.attn.Q"], -H["h.0.attn.V"]]
        assert all(block.shape and repr(block) for block in asked + derived)
        assert H.total.select(["h.0.attn.V", "h.0.attn.Q"])["h.0.attn.V", "h.0.attn.Q"].shape == (16, 16)
        assert str(H.plan) and not calls
        assert repr(H.plan) == str(H.plan) == "\n".join(H.plan._shown().lines())
        H["h.0.attn.Q"].trace()
        assert calls

    def test_the_sizes_for_the_plan_take_no_run_of_their_own(self):
        counts = {}
        for method in ("auto", "autodiff"):
            model = GPT(2)
            calls = _calls(model)
            hessian(model, CrossEntropy(), [tokens()], method=method)
            counts[method] = len(calls)
            assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) > (m is model) for m in model.modules())
        assert counts["auto"] == counts["autodiff"] == 2

    def test_only_the_layer_that_is_asked_for_is_looked_at(self):
        model = GPT(2)
        H = hessian(model, CrossEntropy(), [tokens()])
        calls = _calls(model)
        H["h.1.mlp.up"].frobenius_norm()
        once = len(calls)
        H["h.1.mlp.up"].trace(), H["h.1.mlp.down"].trace(), H.method_of("h.1.mlp.up")
        assert len(calls) == once  # from the cache

    def test_what_a_lazy_block_answers(self):
        H = hessian(GPT(2), CrossEntropy(), [tokens()])
        expected = hessian(GPT(2), CrossEntropy(), [tokens()], method="autodiff")
        Q, V, pair = ("h.0.attn.Q", "h.0.attn.V", ("h.0.attn.Q", "h.0.attn.V"))
        dense = expected[pair].dense()
        v = normal(1)(dense.shape[1])
        assert relative(H[pair] @ v, dense @ v) < 1e-9 and relative(H[pair[::-1]] @ v, dense.T @ v) < 1e-9
        assert relative((H.outer[pair] + H.functional[pair]).dense(), dense) < 1e-9
        assert relative((3 * H[pair] - H[pair].T.T).dense(), 2 * dense) < 1e-9
        assert (H.outer[Q] + H.functional[Q]).symmetric and not H[pair].symmetric
        assert relative(torch.as_tensor(H[V].to_scipy() @ v.numpy()), expected[V].dense() @ v) < 1e-9
        assert abs(float(H[pair].spectral_norm()) - float(torch.linalg.matrix_norm(dense, 2))) < 1e-9
        assert isinstance(expected[Q], AutodiffBlock)


class TestPlan:
    @pytest.mark.parametrize("case", ["GPT2LMHeadModel", "Llama, no biases, one key head", "BertForMaskedLM"])
    def test_is_what_is_done(self, case):
        H = hessian(*_language(case))
        planned = {key: row.method for key, row in H.plan.items()}
        assert set(planned.values()) == {"exact", "autodiff"}
        assert planned == {(name, part): H.method_of(name, part) for name in H.names for part in PARTS}
        for name in H.names:
            found = H[name].resolved
            assert isinstance(found, AutodiffBlock) == (planned[name, "total"] == "autodiff")

    def test_products_and_memory_by_sizes(self):
        model = GPT(2)  # width 4, 4 sequences of 5 tokens
        H = hessian(model, CrossEntropy(), [tokens(), tokens()])
        first, last, norm = (H.plan[name, "total"] for name in ("h.0.attn.Q", "h.1.attn.Q", "h.0.norm1"))
        assert (first.products, last.products) == (5 * 4, 4)
        assert last.bytes == 2 * 2 * 20 * 4**2 * 8
        assert "attention" in first.reason and "verified when first used" in first.reason
        assert (norm.method, norm.products, norm.reason) == ("autodiff", 8, "no closed form is known for it")
        assert norm.bytes == 2 * H._engine.survey.written

    def test_why_there_is_no_closed_form(self, monkeypatch):
        model = GPT(2)
        H = hessian(model, CrossEntropy(), [tokens()], blocks_of(model).select("*.attn.b_V"))
        said = "takes 20 products, and with it a closed form costs more than the 16 products that it saves"
        assert said in H.plan["h.0.attn.b_V", "total"].reason
        assert H.plan["h.1.attn.b_V", "total"].method == "exact"
        asked = hessian(model, CrossEntropy(), [tokens()], blocks_of(model).select("*.attn.Q"), method="exact")
        assert asked.plan["h.0.attn.Q", "outer"].reason == "attention in closed form, verified"
        never = hessian(model, CrossEntropy(), [tokens()], method="autodiff").plan
        assert {row.reason for row in never.rows} == {"method='autodiff'"}
        by_differences = hessian(MLP(), nn.MSELoss(), [points()], hvp="difference").plan["up.weight", "total"]
        assert (by_differences.method, by_differences.reason) == ("difference", "products are differences of gradients")

    def test_many_columns_are_not_formed_for_what_an_estimate_tells(self, monkeypatch):
        """Keys behind rotary positions have products only: all columns of a few, an estimate of many."""
        model = hf(
            "LlamaForCausalLM",
            {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS},
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model.set_attn_implementation("sdpa")
        chosen = blocks_of(model).select("h.1.attn.K")
        data = CrossEntropy(), [(words(), words().flip(0))]
        assert hessian(model, *data, chosen).plan["h.1.attn.K", "total"].method == "exact"  # they cost next to nothing
        monkeypatch.setattr("curvoscope.closed.plan._CHEAP", 0)
        H = hessian(model, *data, chosen)
        assert H.plan["h.1.attn.K", "total"].reason.endswith("all columns cost more than an estimate")
        found = H["h.1.attn.K"].frobenius_norm(tolerance=0.05)
        truth = hessian(model, *data, chosen, method="exact")["h.1.attn.K"].frobenius_norm()
        assert not found.exact and truth.exact and abs(found - truth) < 5 * found.stderr
        few = hessian(*_language("Llama, no biases, one key head"))
        assert few["h.1.attn.K"].shape[0] <= 64 and few.plan["h.1.attn.K", "total"].method == "exact"

    def test_all_ranks_compare_with_the_most_that_a_product_takes_on_any(self, monkeypatch):
        H = hessian(*_language("Llama, no biases, one key head"))
        engine, forms = H._engine, H._closed

        def of_two(told):
            return [told, (*told[:3], 2 * told[3])] if isinstance(told, tuple) else [told]

        monkeypatch.setattr(engine, "ranks", SimpleNamespace(exchange=of_two, size=2))
        shared = ClosedForms(engine, forms._layers, True)
        assert {costs.product_bytes for costs in shared._costs.values()} == {2 * engine.product_bytes}

    def test_says_why_once_a_closed_form_does_not_hold(self):
        model = GPT()
        model.h[0].attn.c_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0].sin(),))
        H = hessian(model, CrossEntropy(), [tokens()])
        before = H.plan
        assert before["h.0.attn.Q", "total"].method == "exact" and H.method_of("h.0.attn.Q") == "autodiff"
        assert hessian(model, CrossEntropy(), [tokens()]).plan == before
        assert H.plan["h.0.attn.Q", "total"].method == "autodiff"
        assert "no closed form gives its output, the nearest is off by" in H.plan["h.0.attn.Q", "total"].reason
        assert H.plan["h.0.mlp.up", "total"] == before["h.0.mlp.up", "total"]
        assert isinstance(H["h.0.attn.Q"].resolved, AutodiffBlock)

    def test_as_text_and_html(self):
        H = hessian(GPT(), CrossEntropy(), [tokens()])
        lines = str(H.plan).splitlines()
        assert lines[0].split() == ["block", "part", "method", "products", "memory", "reason"]
        assert len(lines) == 1 + len(H.names) and len(H.plan) == 3 * len(H.names)
        assert "<th scope='row'>h.0.attn.Q</th><td>all</td><td>exact</td>" in H.plan._repr_html_()
        rich = pytest.importorskip("rich.console").Console(width=200)
        with rich.capture() as captured:
            rich.print(H.plan)
        assert "h.0.attn.Q" in captured.get()

    def test_names_that_are_not_there(self):
        H = hessian(GPT(), CrossEntropy(), [tokens()])
        with pytest.raises(BlockNameError, match="expected"):
            H.plan["h.0.attn.Q", "whole"]
        with pytest.raises(RangeError, match="part"):
            H.method_of("h.0.attn.Q", "whole")
        with pytest.raises(AttributeError):
            H.plan.rows = ()


# ---- how much of the package a question runs through


def _files(question):
    """What a call gives, and the files of the package of which lines run in it."""
    home, found = str(Path(curvoscope.__file__).parent), set()

    def trace(frame, event, argument):
        if frame.f_code.co_filename.startswith(home):
            found.add(Path(frame.f_code.co_filename).relative_to(home).as_posix())

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        answer = question()
    finally:
        sys.settrace(before)
    return answer, found


def test_how_many_files_a_block_and_its_norm_run_through():
    model, loss, batches = _language("GPT2LMHeadModel")
    H, making = _files(lambda: hessian(model, loss, batches))
    block, asking = _files(lambda: H["h.0.attn.Q"])
    norm, computing = _files(block.frobenius_norm)
    assert H.method_of("h.0.attn.Q") == "exact" and norm > 0
    assert len(asking) <= 5, sorted(asking)
    assert len(making | asking | computing) <= 39, sorted(making | asking | computing)
