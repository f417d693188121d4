"""The gallery's pages are what its stored results say, and say what fails first."""

import pytest
import torch
from gallery import page
from gallery.claims import Claim, Ratio, claims, leading_heads
from gallery.figures import ratio_figure
from gallery.models import MODELS, SCALE, TextMatcher, halves

from curvoscope.families.text import corpus
from fences import ROOT

PAGES = ROOT / "docs" / "gallery"


@pytest.mark.parametrize("name", MODELS)
def test_a_page_is_that_of_its_results(name):
    assert (PAGES / f"{name}.md").read_text() == page.page(name, page.results_of(name))
    assert all((PAGES / f"{name}-{figure}.png").is_file() for figure in page.FIGURES)


def test_the_index_is_that_of_the_results():
    assert (PAGES / "index.md").read_text() == page.index({name: page.results_of(name) for name in MODELS})


def norm(value, error=0.1):
    return {"value": value, "stderr": error * value, "low": (1 - 2 * error) * value, "high": (1 + 2 * error) * value}


def facts(query, value):
    blocks = {"h.0.attn.Q": query, "h.0.attn.K": 1.0, "h.0.attn.V": value, "h.0.mlp.up": 1.0}
    return {
        "blocks": {name: {"norm": norm(number)} for name, number in blocks.items()},
        "functional": {"h.0.attn.Q": norm(0.1 * query, 0.0), "h.0.attn.V": norm(0.0)},
        "heads": {"h.0.attn.Q.0": norm(1.0), "h.0.attn.Q.1": norm(3.0), "h.0.attn.V.0": norm(1.0)},
    }


def test_what_fails_comes_first():
    found = claims(facts(query=4.0, value=2.0))
    assert found[0].statement == "The query block is smaller than the value block." and found[0].verdict == "fails"
    ratio = found[0].ratios[0]
    assert ratio.value == 0.5 and ratio.low == pytest.approx(1.6 / 4.8) and ratio.high == pytest.approx(2.4 / 3.2)
    assert [claim.verdict for claim in found[1:]] == ["holds", "holds"]


def test_a_claim_within_its_error_is_neither():
    assert claims(facts(query=2.0, value=2.2))[0].verdict == "not contradicted"
    mixed = Claim("", "", [Ratio("h.0", 2.0, 1.5, 3.0), Ratio("h.1", 0.5, 0.4, 0.6)])
    assert mixed.verdict == "fails in part" and mixed.middle == 1.25


def test_leading_heads():
    assert leading_heads(facts(1.0, 1.0), "Q", 1) == (["h.0.attn.Q.1"], 0.9)


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


def test_the_figure_of_quotients_has_a_line_for_each_set_of_weights():
    figure = ratio_figure({"trained": [Ratio("h.0", 2.0, 1.0, float("inf"))], "random": [Ratio("h.0", 1.0, 0.5, 2.0)]})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["trained", "random"]
