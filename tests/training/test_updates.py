import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autodiff_cases import GPT, cross_entropy, tokens, truth
from curvoscope.analysis.surface import Surface
from curvoscope.curvature import CrossEntropy, blocks_of
from curvoscope.report.training_figures import updates_figure
from curvoscope.report.training_sections import training
from curvoscope.training import BlockUpdate, CurvatureMonitor, Record, Update
from curvoscope.training.updates import alone, update_of


@pytest.fixture(scope="module")
def case():
    """A surface, a step δ that is no gradient's, and the dense Hessian and gradient at the weights after the step."""
    inputs, targets = tokens()
    model = GPT()
    blocks = blocks_of(model)
    surface = Surface(model, CrossEntropy(), [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])], blocks)
    step = 1e-3 * torch.randn(surface.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dense = truth(model, inputs, lambda F: cross_entropy(F, targets), blocks)
    cross_entropy(model(inputs), targets).backward()
    gradient = blocks.gather({name: weight.grad for name, weight in model.named_parameters()})
    return surface, step, dense, gradient


def close(found, expected):
    return abs(found - float(expected)) <= 1e-9 * abs(float(expected)) + 1e-16


class TestAgainstADenseHessian:
    def test_every_block_and_its_two_parts(self, case):
        surface, step, dense, gradient = case
        found = alone(surface, step, update_of(surface, step))
        start = 0
        for name, size in surface.blocks.sizes.items():
            one, mine = found.blocks[name], slice(start, start := start + size)
            assert close(one.length, step[mine].norm()) and close(one.slope, gradient[mine] @ step[mine])
            assert close(one.outer, step[mine] @ dense.outer[mine] @ step)
            assert close(one.functional, step[mine] @ dense.functional[mine] @ step)
            assert close(one.own_curvature, step[mine] @ dense.total[mine, mine] @ step[mine])

    def test_the_whole_step(self, case):
        surface, step, dense, gradient = case
        found = update_of(surface, step)
        assert close(found.curvature, step @ dense.total @ step) and close(found.slope, gradient @ step)
        assert close(found.sharpness, step @ dense.total @ step / (step @ step))
        assert close(found.functional, step @ dense.functional @ step) and close(found.length, step.norm())

    def test_heads_sum_to_their_block(self, case):
        surface, step, *_ = case
        found = update_of(surface, step)
        block = surface.blocks["h.0.attn.Q"]
        heads = [found.heads[f"h.0.attn.Q.{number}"] for number in range(block.heads)]
        whole = found.blocks["h.0.attn.Q"]
        assert close(sum(one.curvature for one in heads), whole.curvature)
        assert close(sum(one.length**2 for one in heads), whole.length**2)
        matrix = step.split(list(surface.blocks.sizes.values()))[surface.blocks.names.index("h.0.attn.Q")].view(
            block.shape
        )
        width = block.shape[1] // block.heads
        assert close(heads[1].length, matrix[:, width : 2 * width].norm())

    def test_the_remainder_is_of_third_order_or_higher(self, case):
        surface, step, *_ = case
        found = [alone(surface, scale * step, update_of(surface, scale * step)) for scale in (4.0, 2.0)]
        whole = [abs(one.change - one.predicted) for one in found]
        assert whole[0] > 6 * whole[1]
        for name in surface.blocks:
            each = [abs(one.blocks[name].change - one.blocks[name].predicted_alone) for one in found]
            assert each[0] > 6 * each[1] or each[0] < 1e-13


def test_no_step_is_no_update(case):
    surface, step, *_ = case
    assert update_of(surface, 0 * step) is None


def test_a_block_that_did_not_move_has_no_sharpness():
    assert BlockUpdate(0.0, 0.0, 0.0, 0.0).sharpness is None


@pytest.fixture(scope="module")
def records():
    inputs, targets = tokens()
    model = GPT()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor = CurvatureMonitor(model, CrossEntropy(), [(inputs, targets)], every=1, budget=1.0, matvecs=8)
    monitor.watch(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert not monitor.incidents
    return monitor.records


class TestInTheMonitor:
    def test_the_change_is_that_of_the_losses(self, records):
        first, second = records
        assert abs(second.update.change - (second.probe_loss - first.probe_loss)) < 1e-12

    def test_facts_come_back(self, records):
        for record in records:
            assert Record.from_facts(record.facts()) == record

    def test_a_record_of_an_earlier_version_has_none(self, records):
        facts = records[0].facts()
        del facts["update"]
        assert Record.from_facts(facts) == dataclasses.replace(records[0], update=None)

    def test_scalars(self, records):
        scalars = records[1].scalars()
        update: Update = records[1].update
        assert scalars["update_sharpness"] == update.sharpness
        assert scalars["update_curvature/h.0.attn.Q.1"] == update.heads["h.0.attn.Q.1"].curvature
        assert scalars["update_share/h.0.attn.Q"] == update.blocks["h.0.attn.Q"].predicted
        assert not [one for one in scalars for other in scalars if other.startswith(f"{one}/")]  # files, no folders

    def test_without_watch_there_is_none(self):
        probe = [(torch.ones(1, 2), torch.ones(1, 1))]
        assert CurvatureMonitor(nn.Linear(2, 1), nn.MSELoss(), probe).measure(lr=0.1).update is None

    def test_the_figure_and_the_section(self, records):
        figure = updates_figure(records)
        names = [text.get_text() for text in figure.axes[2].get_yticklabels()]
        assert names == list(records[-1].update.blocks)

        document = SimpleNamespace(records=[one.facts() for one in records], incidents=())
        section = next(one for one in training(document, lambda *names: []) if one.title == "The optimizer's step")
        table = section.tables[0]
        assert [row[0].text for row in table.rows] == [*records[-1].update.blocks, "whole step"]
        assert table.rows[-1][3].value == records[-1].update.curvature
