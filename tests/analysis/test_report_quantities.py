"""What only reports show: attention moments by head, norms of pairs of blocks, histograms of entries."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from curvoscope.analysis.attention_heads import head_moments, of_moments
from curvoscope.analysis.entries import entry_histograms
from curvoscope.analysis.measurements import Effort, measured_columns
from curvoscope.analysis.propagation import AttentionSummary
from curvoscope.curvature import CrossEntropy, hessian
from curvoscope.exact.attention.moments import Moments
from curvoscope.families.block_maps import blocks_of
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import addition, answer_targets


@pytest.fixture(scope="module")
def model():
    return GPT2(d=4, depth=2, norm="pre", seed=3)


@pytest.fixture(scope="module")
def batch():
    tokens = addition(3, seed=1)
    return tokens[:, :-1], answer_targets(tokens)


@pytest.fixture(scope="module")
def H(model, batch):
    blocks = blocks_of(model).select("h.*.attn.[QV]", "h.1.mlp.up")
    return hessian(model, CrossEntropy(), [batch], blocks, method="autodiff")


class TestHeads:
    def test_against_the_moments_of_definition_3_1(self):
        generator = torch.Generator().manual_seed(0)
        X = torch.randn(5, 1, 6, 3, generator=generator, dtype=torch.float64)
        A = torch.randn(5, 2, 6, 6, generator=generator, dtype=torch.float64).softmax(-1)
        moments = Moments(X, A)
        scale = float(X.square().sum(-1).mean())
        for head, found in enumerate(of_moments("layer", moments)):
            rows = {
                "entropy": -(A * A.log()).sum(-1),
                "first": moments.M1.square().sum(-1) / scale,
                "second": moments.M2.diagonal(dim1=-2, dim2=-1).sum(-1) / scale,
                "third": torch.linalg.matrix_norm(moments.M3) / scale**1.5,
            }
            assert (found.layer, found.head) == ("layer", head)
            for name, values in rows.items():
                means = values[:, head].mean(1)
                estimate = getattr(found, name)
                assert estimate.value == pytest.approx(float(means.mean()), rel=1e-10)
                assert estimate.stderr == pytest.approx(np.std(means.numpy(), ddof=1) / 5**0.5, rel=1e-9)

    def test_of_a_model_that_is_left_as_it_is(self, model, batch):
        before = copy.deepcopy(model.state_dict())
        model.train()
        found = head_moments(model, batch)
        assert model.training and [(one.layer, one.head) for one in found] == [("h.0.attn", 0), ("h.1.attn", 0)]
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        X = model.blocks[0].norm1(model.residual_stream(batch[0], 0)).detach()
        moments = model.attention(0).moments(X)
        assert found[0].entropy.value == pytest.approx(float(moments.entropy.mean()), rel=1e-10)
        trace = moments.M2.diagonal(dim1=-2, dim2=-1).sum(-1)
        assert found[0].second.value == pytest.approx(float(trace.mean() / X.square().sum(-1).mean()), rel=1e-10)

    def test_inputs_of_another_precision_are_converted(self):
        """As `hessian` does."""
        layer = nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True, dtype=torch.float64)
        x = torch.linspace(-1, 1, 24).view(2, 3, 4)
        assert head_moments(layer, (x, x)) == head_moments(layer, (x.double(), x.double())) != []

    def test_inputs_of_zero_have_moments_of_zero(self):
        moments = Moments(torch.zeros(2, 1, 3, 4).double(), torch.full((2, 1, 3, 3), 1 / 3).double())
        (found,) = of_moments("layer", moments)
        assert found.first.value == found.second.value == found.third.value == 0
        assert AttentionSummary.of(moments).variance == 0

    def test_linear_attention_has_no_distributions(self, batch):
        assert head_moments(GPT2(d=4, activation="linear"), batch) == []


class TestPairs:
    def test_within_their_errors(self, H):
        columns = measured_columns(H, Effort(tolerance=0.2), seed=1, pairs=True)
        found = [pair for _, pairs in columns for pair in pairs]
        assert len({(one.row, one.column) for one in found}) == 10 and len(found) == 30
        inside = 0
        for one in found:
            truth = float(torch.linalg.matrix_norm(getattr(H, one.part)[one.row, one.column].dense()))
            estimate = one.frobenius_norm
            inside += abs(estimate.value - truth) <= 3 * estimate.stderr + 1e-12
            assert estimate.value == pytest.approx(truth, rel=0.5)
        assert inside >= 28  # of 30 at three standard errors

    def test_the_same_for_the_same_seed(self, H):
        first, again = (list(measured_columns(H, Effort(matvecs=6), seed=5, pairs=True)) for _ in range(2))
        assert first == again


class TestEntries:
    def test_all_columns_are_the_block(self, H):
        for one in entry_histograms(H, ["h.0.attn.Q", "h.1.mlp.up"], columns=10**6):
            entries = getattr(H, one.part)[one.block].dense().abs().numpy()
            assert one.columns == one.size == len(entries) and one.entries == entries.size
            assert one.zeros == (entries == 0).sum() and one.median == pytest.approx(
                np.sort(entries.ravel())[(entries.size - 1) // 2]
            )
            logs = np.log10(entries[entries > 0]).clip(one.edges[0], one.edges[-1])
            assert one.shares == pytest.approx(np.histogram(logs, one.edges)[0] / entries.size, abs=2 / entries.size)
            assert sum(one.shares) == pytest.approx(1 - one.zeros / entries.size)

    def test_some_columns(self, H):
        found = entry_histograms(H, ["h.0.attn.V"], columns=3, seed=2)
        assert [one.part for one in found] == ["outer", "functional", "total"]
        assert all(one.columns == 3 and one.size == 16 and one.entries == 48 for one in found)

    def test_no_block(self, H):
        assert entry_histograms(H, []) == []
