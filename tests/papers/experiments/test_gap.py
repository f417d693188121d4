"""The block paper's experiments on digits, against the network written down plainly and float64 autodiff."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch.func import grad, jacfwd
from torch.nn.functional import cross_entropy

from curvoscope import exact
from curvoscope.blocks import Blocks
from curvoscope.commands import reproduce
from curvoscope.errors import MissingPackageError
from curvoscope.papers.catalogue import CATALOGUE
from curvoscope.papers.experiments import NAMES, MeasuredValue, Row, digits, extras, find, panel_figures, panel_pages
from curvoscope.papers.experiments.digits import GROUPS, Digits, VisionTransformer, groups_of, images
from curvoscope.papers.experiments.figures import gap_entries, gap_gradient, gap_loss, gap_norms, left_out
from curvoscope.papers.experiments.panels import Image, Panel

DIGITS = tuple(name for name, entry in CATALOGUE.items() if "digits" in entry.get("needs", ()))
SMALL = {"d": 4, "hidden": 6, "checkpoints": (0, 3), "images": 6}


def plain(weights, patches):
    """The logits from named parameters, without any module."""
    x = patches @ weights["embed.weight"].T + weights["embed.bias"] + weights["positions"]
    d = x.shape[-1]
    query, key, value = (
        x @ W.T + b
        for W, b in zip(
            weights["block.self_attn.in_proj_weight"].split(d),
            weights["block.self_attn.in_proj_bias"].split(d),
            strict=True,
        )
    )
    F = (query @ key.mT / math.sqrt(d)).softmax(-1) @ value
    F = F @ weights["block.self_attn.out_proj.weight"].T + weights["block.self_attn.out_proj.bias"]
    y = norm(x + F, weights["block.norm1.weight"], weights["block.norm1.bias"])
    h = y @ weights["block.linear1.weight"].T + weights["block.linear1.bias"]
    h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
    S = y + h @ weights["block.linear2.weight"].T + weights["block.linear2.bias"]
    z = norm(S, weights["block.norm2.weight"], weights["block.norm2.bias"])
    return z.mean(1) @ weights["head.weight"].T + weights["head.bias"]


def norm(x, gamma, beta):
    centred = x - x.mean(-1, keepdim=True)
    return gamma * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() + beta


def trained(**changes):
    """A small network after three steps, and its configuration."""
    configuration = Digits(**{**SMALL, **changes})
    return configuration, configuration.model(1, "trained")


def loss_of(model, configuration):
    """The loss as a function of the flat parameters in the model's order, by the plain network."""
    patches, labels = configuration.probe()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(flat):
        parts = flat.split([p.numel() for p in parameters.values()])
        weights = {name: part.view(p.shape) for part, (name, p) in zip(parts, parameters.items(), strict=True)}
        return cross_entropy(plain({**weights, "positions": model.positions}, patches), labels)

    return loss, torch.cat([p.flatten() for p in parameters.values()])


def places(model):
    """The places of each group's entries among the flat parameters, (size,), in the order of the group's blocks."""
    start, numbered = 0, {}
    for name, parameter in model.named_parameters():
        numbered[name] = torch.arange(start, start + parameter.numel()).view(parameter.shape)
        start += parameter.numel()
    return {name: group.gather(numbered) for name, group in groups_of(model).items()}, start


@cache
def reference():
    """The dense Hessian after three steps, its rows and columns as the model keeps its parameters."""
    configuration, model = trained()
    loss, flat = loss_of(model, configuration)
    return jacfwd(grad(loss))(flat)


class TestNetwork:
    def test_it_is_the_plain_network(self):
        configuration, model = trained()
        patches, _ = configuration.probe()
        weights = dict(model.named_parameters()) | {"positions": model.positions}
        assert torch.allclose(model(patches), plain(weights, patches), rtol=0, atol=1e-13)

    def test_its_block_is_the_papers_post_norm_block(self):
        configuration, model = trained()
        block = model.block
        Q, K, V = (W.T for W in block.self_attn.in_proj_weight.detach().split(4))
        biases = dict(zip(("b_Q", "b_K", "b_V"), block.self_attn.in_proj_bias.detach().split(4), strict=True))
        out = block.self_attn.out_proj
        attention = exact.SelfAttention(Q, K, V, out.weight.detach().T, b_O=out.bias.detach(), **biases)
        forward = [t.detach() for t in (block.linear1.weight.T, block.linear1.bias, block.linear2.weight.T)]
        norms = [exact.LayerNorm(n.weight.detach(), n.bias.detach(), n.eps) for n in (block.norm1, block.norm2)]
        feedforward = exact.FeedForward(*forward, block.linear2.bias.detach(), activation="gelu")
        whole = exact.TransformerBlock(attention, feedforward, *norms, placement="post")
        X = (model.embed(configuration.probe()[0]) + model.positions).detach()
        assert torch.allclose(whole(X), block(X), rtol=0, atol=1e-13)

    def test_the_seed_decides_and_torchs_generator_is_left_alone(self):
        state = torch.get_rng_state()
        first, again, other = (VisionTransformer(4, 6, seed).head.weight for seed in (0, 0, 1))
        assert torch.equal(first, again) and not torch.equal(first, other)
        Digits(**SMALL).model(0, "trained")
        assert torch.equal(state, torch.get_rng_state())

    def test_the_papers_width_and_a_training_that_learns(self):
        assert sum(p.numel() for p in Digits().network(0).parameters()) == 3530
        configuration = Digits(d=8, hidden=16, rate=0.01, warm_up=20, checkpoints=(0, 150))
        model = configuration.network(0)
        found = [digits.accuracy(model) for _ in configuration.training(model, 0)]
        assert found[0] < 0.25 and found[1] > 0.35

    def test_images(self):
        from sklearn.datasets import load_digits

        patches, labels = images()
        assert patches.shape == (1797, 16, 4) and patches.min() >= 0 and patches.max() == 1
        assert np.array_equal(np.bincount(labels), np.bincount(load_digits().target))
        originals = load_digits().images / 16
        for number in (0, 700):
            whole = np.zeros((8, 8))
            for t, patch in enumerate(patches[number].numpy()):
                row, column = 2 * (t // 4), 2 * (t % 4)
                whole[row : row + 2, column : column + 2] = patch.reshape(2, 2)
            same = np.flatnonzero((originals == whole).all((1, 2)))
            assert labels[number] in load_digits().target[same]

    @pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 10.0])
    def test_no_loss_is_above_the_ceiling(self, scale):
        _, model = trained()
        patches, labels = images()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            assert cross_entropy(model(patches), labels, reduction="none").max() <= model.ceiling()


class TestGroups:
    def test_every_entry_of_every_parameter_is_in_exactly_one_group(self):
        model = Digits().network(0)
        found, total = places(model)
        assert total == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert torch.equal(torch.cat(list(found.values())).sort().values, torch.arange(total))
        assert Blocks(block for group in groups_of(model).values() for block in group.values()).covers(model)

    def test_feed_forward_is_the_feed_forward_layer_and_not_a_norm(self):
        groups = groups_of(Digits().network(0))
        assert groups["feed-forward"].parameters == {
            f"block.linear{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
        }
        assert groups["norm 2"].parameters == {"block.norm2.weight", "block.norm2.bias"}
        assert tuple(groups) == tuple(GROUPS)


class TestEntries:
    def test_dense_hessian_against_autodiff(self):
        configuration, model = trained()
        order = torch.cat(list(places(model)[0].values()))
        expected = reference()[order][:, order]
        found = gap_entries.dense_hessian(configuration, model)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))

    def test_medians_and_pixels(self):
        _, model = trained()
        values = gap_entries.measure(Digits(**SMALL), {"network": "vit"}, 1, 0)
        medians = {(v.block, v.at): v.value for v in values if v.quantity == "median"}
        found, _ = places(model)
        for row, column in (("query", "query"), ("value", "feed-forward"), ("norm 1", "head")):
            entries = reference()[found[row]][:, found[column]].abs().numpy()
            assert medians[f"{row}, {column}", 3.0] == pytest.approx(np.median(entries), rel=1e-10)
        assert len(medians) == 2 * len(GROUPS) * (len(GROUPS) + 1) // 2
        assert not any(v.quantity.startswith("pixel") for v in values)  # of seed 0 only
        assert max(v.value for v in values if v.quantity == "flat") < 1e-12

    @pytest.mark.parametrize("name", ["key bias", "output", "feed-forward", "head"])
    def test_the_loss_is_constant_along_flat_directions(self, name):
        configuration, model = trained()
        loss, flat = loss_of(model, configuration)
        directions = gap_entries.flat_directions(groups_of(model)[name], name)
        assert torch.allclose(directions.T @ directions, torch.eye(directions.shape[1], dtype=torch.float64))
        sizes = {"key bias": 4, "output": 5, "feed-forward": 7, "head": 5}
        assert directions.shape[1] == sizes[name]
        moved = flat.clone()
        moved[places(model)[0][name]] += directions @ torch.linspace(-2, 3, directions.shape[1]).double()
        assert float(loss(moved)) == pytest.approx(float(loss(flat)), rel=1e-13)


class TestNorms:
    def test_norms_against_autodiff(self):
        _, model = trained()
        values = gap_norms.measure(Digits(**SMALL), {"network": "vit"}, 1, 0)
        norms = {v.block: v.value for v in values if v.quantity == "spectral_norm" and v.at == 3}
        lengths = {v.block: v.value for v in values if v.quantity == "weight_norm" and v.at == 3}
        found, _ = places(model)
        _, flat = loss_of(model, Digits(**SMALL))
        whole = float(torch.linalg.matrix_norm(reference(), 2))
        for name, place in found.items():
            expected = float(torch.linalg.matrix_norm(reference()[place][:, place], 2))
            assert norms[name] == pytest.approx(expected, rel=2e-3, abs=1e-12 * whole)
            assert lengths[name] == pytest.approx(float(flat[place].norm()), rel=1e-12)
        assert norms["whole"] == pytest.approx(whole, rel=2e-3) and set(norms) == {*GROUPS, "whole"}
        assert norms["key bias"] < 1e-12 * whole  # softmax does not see it


class TestLoss:
    def test_values_against_the_losses_themselves(self):
        options = {**SMALL, "images": 48, "orders": 400, "distances": (0.0, 0.01), "added": 4}
        configuration = gap_loss.GapLossConfiguration(**options)
        values = gap_loss.measure(configuration, {"weights": "trained"}, 1, 0)
        _, model = trained()
        patches, labels = configuration.probe()
        with torch.no_grad():
            losses = cross_entropy(model(patches), labels, reduction="none").numpy()
        found = {(v.quantity, v.part): v.value for v in values if not v.at}
        variance = losses.var(ddof=1)
        assert found["variance", "τ = 0"] == pytest.approx(variance, rel=1e-12)
        assert found["second_order", "τ = 0"] == pytest.approx(variance, rel=1e-12)
        assert found["identity_error", "τ = 0.01"] < 1e-14
        curves = {(v.quantity, v.at): v.value for v in values if v.part == "τ = 0" and v.at}
        for k in (4.0, 12.0, 44.0):
            law = math.sqrt(2 / math.pi * variance * 4 / (k * (k + 4)))
            assert curves["law", k] == pytest.approx(law, rel=1e-12)
            assert curves["bound", k] == pytest.approx(4 / (k + 4) * losses.max(), rel=1e-12)
            assert curves["mean", k] <= curves["bound", k] <= curves["ceiling", k]
            assert curves["mean", k] == pytest.approx(law, rel=0.2)
            assert curves["null", k] == pytest.approx(law, rel=0.2)
        enough = math.sqrt(4 + variance * 4 / 0.01**2) - 2  # k (k + b) = V b / ε²
        assert found["k_star", "τ = 0"] == math.ceil(enough)

    def test_expected_ceiling(self):
        _, model = trained()
        assert gap_loss.expected_ceiling(model, 0.0, 0) == model.ceiling()
        before = [p.clone() for p in model.parameters()]
        near, far = (gap_loss.expected_ceiling(model, tau, 0) for tau in (1e-9, 10.0))
        assert near == pytest.approx(model.ceiling(), rel=1e-7) and far > 10 * near
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class TestGradient:
    def test_values_against_autograd(self):
        options = {**SMALL, "images": 48, "group": 16, "passes": 5, "descent": 2}
        configuration = gap_gradient.GapGradientConfiguration(**options)
        values = gap_gradient.measure(configuration, {"network": "vit"}, 1, 0)
        _, model = trained()
        patches, labels = configuration.probe()
        slopes = []
        for i in range(48):
            loss = cross_entropy(model(patches[i : i + 1]), labels[i : i + 1])
            slopes.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        full = float(torch.stack(slopes).mean(0).norm())
        found = {v.quantity: v.value for v in values if v.part == "trained" and not v.at}
        assert found["full_norm"] == pytest.approx(full, rel=1e-10)
        last = {v.quantity: v.value for v in values if v.part == "trained" and v.at == 240}
        assert last["float64"] == pytest.approx(full, rel=1e-10)
        assert {v.part for v in values} == {"initial", "trained", "descended"}

    def test_descent_fits_the_probe(self):
        configuration, model = trained(images=16)
        patches, labels = configuration.probe()
        gap_gradient.descend(model, patches, labels, 60)
        assert float(cross_entropy(model(patches), labels).detach()) < 1  # from 2.3

    def test_a_sum_in_bfloat16_stops_growing(self):
        """With eight bits of precision 256 + 1 is 256: the mean of n ones is 256/n from there on."""
        ones = torch.ones(1, 4, dtype=torch.float64)
        exact_sum, rounded = (gap_gradient.running_norms(ones, 2000, t) for t in (torch.float64, torch.bfloat16))
        assert [n for n, _ in exact_sum] == [n for n, _ in rounded] and exact_sum[-1][0] == 2000
        assert all(norm == 2.0 for _, norm in exact_sum)
        assert all(norm == pytest.approx(2 * min(n, 256) / n) for n, norm in rounded)


class TestWithoutScikitLearn:
    @pytest.fixture(autouse=True)
    def _missing(self, monkeypatch):
        monkeypatch.setattr(extras, "is_installed", lambda extra: extra != "digits")

    def test_all_leaves_the_digits_out(self):
        assert left_out() == DIGITS and set(DIGITS) < set(NAMES)
        assert [figure.name for figure in find(["all"])] == [name for name in NAMES if name not in DIGITS]

    @pytest.mark.parametrize("name", DIGITS)
    def test_by_name_they_say_what_to_install(self, name):
        with pytest.raises(MissingPackageError, match=r"^digits: .*pip install 'curvoscope\[digits\]"):
            find([name])

    def test_the_images_say_what_to_install(self):
        images.cache_clear()
        with pytest.raises(MissingPackageError, match=r"pip install 'curvoscope\[digits\]"):
            images()

    def test_reproduce_all_says_so_in_one_line(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(reproduce.experiments, "find", lambda names: [])
        reproduce.run(["all"], True, 1, True, tmp_path, None, None, True)
        found = capsys.readouterr()
        assert found.out.strip() == "{}"
        assert found.err.count("\n") == 1 and "gap-entries" in found.err and "curvoscope[digits]" in found.err

    def test_reproduce_by_name_ends_without_a_traceback(self, call):
        code, _, err = call("reproduce", "gap-loss", "--quick")
        assert code != 0 and "Traceback" not in err and "curvoscope[digits]" in err


def test_images_have_borders_and_names_in_both_drawings():
    image = Image(np.arange(36.0).reshape(6, 6), [2.0, 6.0], ["first", "second"], "scale")
    panel = Panel("entries", image=image)
    axes = panel_figures.draw("title", [panel], 1).axes[0]
    assert list(axes.get_xticks()) == [0.5, 3.5] and list(axes.get_yticks()) == [0.5, 3.5]  # pixel i is i ± 1/2
    assert [label.get_text() for label in axes.get_xticklabels()] == ["first", "second"]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_xdata()[0] == line.get_xdata()[-1]] == [1.5]
    page = panel_pages.page("title", [panel], 1)
    assert '"tickvals":[0.5,3.5]' in page and '"ticktext":["first","second"]' in page and '"y0":1.5' in page


class TestSecondOrderVerdict:
    @staticmethod
    def rows(factor, seeds):
        """Rows whose variance grows by `factor` times what the law adds, with a scatter of 1 % over the seeds."""
        found = []
        for seed in range(seeds):
            for tau, added in ((0.0, 0.0), (0.003, 1.0 + 0.01 * (-1) ** seed)):
                numbers = {"variance": 100 + factor * added, "second_order": 100 + 1.0 * (tau > 0)}
                found += [
                    Row({"weights": "trained"}, seed, MeasuredValue(1, "all", f"τ = {tau:g}", n, quantity=name))
                    for name, n in numbers.items()
                ]
        return found

    def test_a_law_that_is_off_disagrees_though_the_whole_variance_is_near(self):
        right, wrong = (gap_loss.second_order(self.rows(factor, 4), "trained", 0.003) for factor in (1.0, 1.5))
        assert right.agrees and right.low < 1 < right.high and right.fitted == pytest.approx(1)
        assert wrong.agrees is False and wrong.fitted == pytest.approx(1.5) and wrong.predicted == 1

    def test_one_seed_has_no_interval_and_no_verdict(self):
        alone = gap_loss.second_order(self.rows(1.0, 1), "trained", 0.003)
        assert alone.agrees is None and alone.low is None and alone.fitted == pytest.approx(1.01)
