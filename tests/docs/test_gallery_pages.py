"""The gallery's pages are what its stored results say, and say what fails first."""

import re

import pytest
import torch
from gallery import page, pages
from gallery.claims import NORMS, SIZE, Claim, Ratio, claims, closer, leading_heads, middle, spreads
from gallery.exhibit import without_norms
from gallery.figures import parts_figure, ratio_figure
from gallery.measure import mixing_blocks
from gallery.models import MODELS, SCALE, TextMatcher, halves
from gallery.trained_here import gpt

from curvoscope.families.text import corpus
from fences import ROOT

PAGES = ROOT / "docs" / "gallery"


@pytest.mark.parametrize("name", MODELS)
def test_a_page_is_that_of_its_results(name):
    text = (PAGES / f"{name}.md").read_text()
    assert text == page.page(name, page.results_of(name))
    shown = re.findall(r"\]\((.*\.png)\)", text)
    assert set(page.FIGURES) - {"heads"} <= {one.rpartition("-")[2][:-4] for one in shown}  # a Mamba has no heads
    assert all((PAGES / figure).is_file() for figure in shown)


@pytest.mark.parametrize("name", MODELS)
def test_results_have_every_stage_and_all_that_a_page_shows(name):
    model, results = MODELS[name], page.results_of(name)
    assert list(results["stages"]) == list(model.stages) and list(results["bare"]) == list(model.bare)
    for facts in results["stages"].values():
        mixing = set(mixing_blocks(list(facts["blocks"])))  # without a closed form, the last of three roles is left out
        assert set(facts["functional"]) == {one for one in mixing if facts["split"] == "layer" or ".in" not in one}
        assert all(number["low"] <= number["value"] <= number["high"] for number in facts["functional"].values())
    assert set(results["spectra"]) == set(results["audit"]) == set(model.chosen)
    ledger = results["sensitivity"]
    rows = sum(one["first"]["value"] + one["second"]["value"] for one in ledger["tensors"].values())
    assert rows == pytest.approx(ledger["predicted"]["value"], rel=1e-4, abs=1e-5)  # six digits are stored
    for one in ledger["tensors"].values():
        parts = one["outer"]["value"] + one["functional"]["value"]
        assert one["second"]["value"] == pytest.approx(parts, rel=1e-4, abs=1e-5 * abs(one["outer"]["value"]))


def test_the_index_is_that_of_the_results():
    assert (PAGES / "index.md").read_text() == pages.index({name: page.results_of(name) for name in MODELS})


def norm(value, error=0.1):
    return {"value": value, "stderr": error * value, "low": (1 - 2 * error) * value, "high": (1 + 2 * error) * value}


def facts(query, value):
    blocks = {"h.0.attn.Q": query, "h.0.attn.K": 1.0, "h.0.attn.V": value, "h.0.mlp.up": 1.0}
    return {
        "blocks": {name: {"norm": norm(number)} for name, number in blocks.items()},
        "functional": {"h.0.attn.Q": norm(0.1 * query, 0.0), "h.0.attn.V": norm(0.0)},
        "outer": {},
        "heads": {"h.0.attn.Q.0": norm(1.0), "h.0.attn.Q.1": norm(3.0), "h.0.attn.V.0": norm(1.0)},
    }


def test_what_fails_comes_first():
    found = claims(facts(query=4.0, value=2.0))
    assert found[0].question == SIZE and found[0].verdict == "fails"
    ratio = found[0].ratios[0]
    assert ratio.value == 0.5 and ratio.low == pytest.approx(1.6 / 4.8) and ratio.high == pytest.approx(2.4 / 3.2)
    assert [claim.verdict for claim in found[1:]] == ["holds", "holds"]


def test_a_claim_within_its_error_is_neither():
    assert claims(facts(query=2.0, value=2.2))[0].verdict == "not contradicted"
    mixed = Claim(SIZE, "", "", [Ratio("h.0", 2.0, 1.5, 3.0), Ratio("h.1", 0.5, 0.4, 0.6)])
    assert mixed.verdict == "fails in part" and middle(mixed.ratios).value == 1.25


def test_norms_equalise_if_the_quotient_is_further_from_one_without_them():
    found = {claim.question: claim for claim in claims(facts(query=1.0, value=2.0), bare=facts(query=40.0, value=1.0))}
    assert middle(found[NORMS].ratios).value == pytest.approx(20) and found[NORMS].verdict == "holds"
    (near,) = closer([Ratio("h.0", 0.8, 0.5, 1.25)], [Ratio("h.0", 2.0, 2.0, 2.0)])
    assert (near.value, near.low, near.high) == pytest.approx((0.625, 0.5, 1.0))


def test_medians_and_spreads():
    assert middle([Ratio("h.0", 1.0, 0.5, 2.0), Ratio("h.1", 3.0, 2.5, 4.0)])[1:] == (2.0, 1.5, 3.0)
    (spread,) = spreads(facts(query=4.0, value=2.0))
    assert spread.layer == "h.0" and spread.value == 4.0 and spread.low == pytest.approx(3.2 / 1.2)


def test_leading_heads():
    leading, share = leading_heads(facts(1.0, 1.0), "attn.Q")
    assert leading == ["h.0.attn.Q.1"] and share.value == 0.9
    assert share.low == pytest.approx(2.4**2 / (2.4**2 + 1.2**2))
    assert share.high == pytest.approx(3.6**2 / (3.6**2 + 0.8**2))


def test_paragraphs_are_cut_between_sentences():
    found = halves("A heading\n\nOne. Two? Three.\n\nFour. Five.\n")
    assert found == [("One.", "Two? Three."), ("Four.", "Five.")]
    assert len(halves(corpus())) == 20 and all(map(all, halves(corpus())))


def test_a_matcher_multiplies_unit_means_over_the_tokens_of_a_text():
    class Encoder(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return type("Output", (), {"last_hidden_state": torch.stack([input_ids, 1 - input_ids], -1).double()})

    tokens, mask = torch.tensor([[1, 1, 0], [0, 7, 7]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = TextMatcher(Encoder(), torch.eye(2).double())(tokens, mask)
    expected = torch.tensor([[2 / 5**0.5, 1 / 5**0.5], [0.0, 1.0]]).double()
    assert torch.allclose(found, SCALE * expected)


def test_a_model_without_norms_computes_with_its_other_weights():
    model = torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.Linear(3, 2), torch.nn.RMSNorm(2))
    x, linear = torch.randn(4, 3), model[1]
    assert torch.equal(without_norms(model)(x), linear(x))
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]


def test_training_is_a_function_of_its_seed_and_lowers_the_loss():
    def loss(exhibit):
        tokens, targets = exhibit.batch
        return exhibit.model.loss(tokens, targets).item()

    before, after, again = (gpt(steps) for steps in (0, 5, 5))
    assert loss(after) == loss(again) < loss(before)


def test_figures_have_a_line_for_each_set_of_numbers():
    lines = {"trained": [Ratio("h.0", 2.0, 1.0, float("inf"))], "random": [Ratio("h.0", 1.0, 0.5, 2.0)]}
    assert legend(ratio_figure(lines, "value", "query")) == ["trained", "random"]
    assert legend(parts_figure(facts(1.0, 2.0))) == ["Gauss-Newton", "functional"]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]
