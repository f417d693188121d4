import json
import logging
import math
from itertools import pairwise

import pytest
import scipy.stats
import torch
from torch import nn

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens, truth
from curvoscope.autodiff.batches import BatchError
from curvoscope.curvature import CrossEntropy, blocks_of
from curvoscope.errors import EmptyError, ModelError, RangeError
from curvoscope.training import CurvatureMonitor, Record


def gpt():
    inputs, targets = tokens()
    return GPT(), inputs, targets


def descend(model, optimizer, inputs, targets, monitor=None, steps=5):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if monitor is not None:
            monitor.step(loss)
    return losses


def near(found, truth):
    return abs(found.value - truth) <= max(0.02 * abs(truth), 5 * found.stderr)


def beyond(found):
    """How likely a correct estimate is off by more than 3 standard errors, which are estimates themselves."""
    return 2 * scipy.stats.t.sf(3, found.degrees) if found.stderr else 0.0


@pytest.mark.slow
def test_against_dense_values_at_20_points_of_a_training_run():
    """The truth is jacfwd of grad in float64, at the weights that the run has come to; the monitor has its defaults."""
    model, inputs, targets = gpt()
    blocks = blocks_of(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    monitor = CurvatureMonitor(model, CrossEntropy(), [(inputs, targets)], every=3, budget=1.0)
    monitor.watch(optimizer)
    norms, losses = [], []
    for point in range(20):
        losses += descend(model, optimizer, inputs, targets, monitor, steps=1 if point == 0 else 3)
        record, details = monitor.records[point], monitor.records[point].details
        assert record.step == len(losses) and record.loss == losses[-1]
        dense = truth(model, inputs, lambda F: cross_entropy(F, targets), blocks)
        values = torch.linalg.eigvalsh(dense.total)
        assert near(record.largest_eigenvalue, float(values[-1]))
        assert near(details.smallest_eigenvalue, float(values[0]))
        assert near(details.trace, float(dense.total.trace()))
        assert near(details.frobenius_norm, float(dense.total.norm()))
        assert near(details.effective_rank, float(dense.total.norm() ** 2 / values.abs().max() ** 2))
        share = float(values.clamp(max=0).abs().sum() / values.abs().sum())
        low, high = details.negative_curvature_share.interval(0.999)
        assert low - 0.04 <= share <= high + 0.04  # the quadrature's own error
        start = 0
        for name, size in blocks.sizes.items():
            part = slice(start, start + size)
            start += size
            for kind in ("outer", "functional"):
                norms.append((getattr(details.blocks[name], kind), float(getattr(dense, kind)[part, part].norm())))
        parameters = dict(model.named_parameters())
        loss = cross_entropy(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        g = blocks.gather(dict(zip(parameters, gradients, strict=True)))
        assert record.gradient_norm == pytest.approx(float(g.norm()), rel=1e-9)
        assert record.gradient_curvature == pytest.approx(float(g @ dense.total @ g / (g @ g)), rel=1e-8)
        assert record.probe_loss == pytest.approx(float(loss.detach()), rel=1e-9)
        assert record.edge == pytest.approx(100)
        assert record.edge_ratio == pytest.approx(record.largest_eigenvalue.value * 0.01)
    assert monitor.incidents == [] and losses[-1] < losses[0] / 2
    # of some 150 norms that are no exact numbers, one or two may be off by more than 3 standard errors
    estimated = [(found, expected) for found, expected in norms if found.method != "exact"]
    assert len(norms) == 680 and len(estimated) > 100
    exact = [pair for pair in norms if pair[0].method == "exact"]
    assert all(found.value == pytest.approx(expected, rel=1e-9, abs=1e-12) for found, expected in exact)
    misses = sum(not near(found, expected) for found, expected in estimated)
    assert misses <= scipy.stats.poisson.ppf(0.999, sum(beyond(found) for found, _ in estimated))
    for found, expected in estimated:
        low, high = found.interval(0.9999)
        assert low - 0.02 * expected <= expected <= high + 0.02 * expected


def test_attention_rows_against_the_formula():
    model, inputs, targets = gpt()
    monitor = CurvatureMonitor(model, CrossEntropy(), [(inputs, targets)])
    found = monitor.measure(lr=0.1, details=False).attention["h.0.attn"]
    with torch.no_grad():
        x = model.h[0].ln_1(model.wte(inputs) + model.wpe.weight)
        q, k, _ = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in model.h[0].attn.c_attn(x).chunk(3, -1))
        scores = (q @ k.mT / math.sqrt(2)).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf)
        A = scores.softmax(-1)
        entropy = torch.distributions.Categorical(probs=A).entropy().mean()
        far = (x[:, None, None] - (A @ x[:, None])[:, :, :, None]).square().sum(-1)  # |x_j - m_i|²
        variance = (A * far).sum(-1).mean() / x.square().sum(-1).mean()
    assert found.entropy == pytest.approx(float(entropy))
    assert found.variance == pytest.approx(float(variance))


class Bowl(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, -1.5], dtype=torch.float64))

    def forward(self, x):
        return x * self.w


EIGENVALUES = torch.tensor([1.0, 4.0, 10.0], dtype=torch.float64)


def half_squares(outputs, targets):
    return 0.5 * (EIGENVALUES * outputs.square()).sum(-1).mean()


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.5])
def test_critical_sharpness_of_descent_on_a_quadratic(rate):
    model, probe = Bowl(), [(torch.ones(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    monitor = CurvatureMonitor(model, half_squares, probe, every=1)
    monitor.watch(optimizer)
    g = EIGENVALUES * model.w.detach()
    loss = half_squares(model(probe[0][0]), None)
    loss.backward()
    optimizer.step()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 7.0)  # sets another rate for the next step
    record = monitor.step(loss)
    assert float(record.critical_sharpness) == pytest.approx(float(g @ (EIGENVALUES * g) / (g @ g)), rel=1e-6)
    assert record.lr == rate and record.edge == 2 / rate
    assert float(record.largest_eigenvalue) == pytest.approx(10)
    assert record.details.condition == pytest.approx(10)
    assert float(record.details.negative_curvature_share) == 0
    assert float(record.details.effective_rank) == pytest.approx(117 / 100)


class Noisy(nn.Module):
    """Dropout and batch norm: what draws random numbers, and what has a mode and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.norm, self.drop, self.down = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)

    def forward(self, x):
        return self.down(self.drop(self.norm(self.up(x)).tanh()))


def test_training_is_the_same_to_the_bit():
    x, y = (values.float() for values in points(16))

    def run(watched):
        model = Noisy()
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        monitor = CurvatureMonitor(model, nn.functional.mse_loss, [(x, y)], every=1, budget=1.0) if watched else None
        if monitor is not None:
            monitor.watch(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            chosen = torch.randperm(16)[:8]
            loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.step(loss)
        assert all(module.training for module in model.modules())
        assert monitor is None or (len(monitor.records) == 5 and monitor.incidents == [])
        assert monitor is None or all(record.update and record.details for record in monitor.records)  # the lens is on
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return {**model.state_dict(), **{f"{name}.grad": g for name, g in gradients.items()}}, torch.get_rng_state()

    (plain, state), (watched, after) = run(False), run(True)
    assert torch.equal(state, after)
    assert plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


class Time:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("budget, seconds", [pytest.param(0.05, 1.0, marks=pytest.mark.slow), (0.3, 0.1)])
def test_budget_with_a_clock_of_its_own(budget, seconds):
    time = Time()
    x, y = points()
    model = MLP(nn.Tanh)

    def loss_fn(outputs, targets):  # each forward pass of a measurement takes half a second
        time.now += 0.5
        return (outputs - targets).square().mean()

    monitor = CurvatureMonitor(model, loss_fn, [(x, y)], every=3, budget=budget, clock=time)
    for _ in range(800):
        time.now += seconds
        monitor.step(1.0, 0.1)
    assert monitor.pace.share <= budget * 1.001
    assert monitor.pace.share >= budget / 3  # and it is used
    seen = [record.step for record in monitor.records]
    assert len(seen) > 3 and min(b - a for a, b in pairwise(seen)) >= 3
    assert sum(record.details is not None for record in monitor.records) > 1


def mlp_monitor(**options):
    x, y = points()
    return CurvatureMonitor(MLP(nn.Tanh), nn.functional.mse_loss, [(x, y)], **{"every": 1, "budget": 1.0, **options})


def test_a_loss_that_is_not_finite_pauses(caplog):
    monitor = mlp_monitor()
    with caplog.at_level(logging.WARNING):
        assert monitor.step(1.0, 0.1) is not None
        assert monitor.step(torch.tensor(math.nan), 0.1) is None
        assert monitor.step(math.inf, 0.1) is None
    assert monitor.paused and len(monitor.records) == 1
    assert [(one.step, one.kind) for one in monitor.incidents] == [(2, "paused")]
    assert "nan" in monitor.incidents[0].message and "paused at step 2" in caplog.text
    assert monitor.step(1.0, 0.1) is not None
    assert not monitor.paused and [one.kind for one in monitor.incidents] == ["paused", "resumed"]


def test_weights_that_are_not_finite_pause_too():
    monitor = mlp_monitor()
    with torch.no_grad():
        monitor._model.up.weight.fill_(math.nan)
    for _ in range(3):
        assert monitor.step(None, 0.1) is None
    assert [one.kind for one in monitor.incidents] == ["paused"]


def test_a_failure_is_logged_and_training_goes_on(caplog):
    x, y = points()
    probe = [(x, y)]
    monitor = CurvatureMonitor(MLP(nn.Tanh), nn.functional.mse_loss, probe, every=1, budget=1.0)
    probe[0] = (x[:2], y[:2])
    with caplog.at_level(logging.WARNING):
        assert monitor.step(1.0, 0.1) is None
    assert "BatchError" in monitor.incidents[0].message and "failed at step 1" in caplog.text
    probe[0] = (x, y)
    assert monitor.step(1.0, 0.1) is not None


def test_errors():
    x, y = points()
    for options, argument in (({"every": 0}, "every"), ({"budget": 0.0}, "budget"), ({"matvecs": 2}, "matvecs")):
        with pytest.raises(RangeError, match=argument):
            mlp_monitor(**options)
    with pytest.raises(EmptyError, match="probe"):
        CurvatureMonitor(MLP(), nn.functional.mse_loss, [])

    class Shrinking:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([(x[self.passes - 1 :], y[self.passes - 1 :])])

    with pytest.raises(BatchError, match="differs"):
        CurvatureMonitor(MLP(), nn.functional.mse_loss, Shrinking())
    monitor = mlp_monitor()
    with pytest.raises(RangeError, match="watch"):
        monitor.step(1.0)
    with pytest.raises(RangeError, match="lr"):
        monitor.step(1.0, math.nan)
    optimizer = torch.optim.SGD(MLP().parameters(), lr=0.1)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(RangeError, match="no 'lr'"):
        monitor.watch(optimizer)


def test_state_and_another_model(tmp_path):
    monitor = mlp_monitor()
    monitor.step(1.0, 0.1)
    torch.save(monitor.state_dict(), tmp_path / "state.pt")
    other = mlp_monitor()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.records == monitor.records and other.steps == 1
    warm, cold = other.step(1.0, 0.1), monitor.records[0]
    assert float(warm.largest_eigenvalue) == pytest.approx(float(cold.largest_eigenvalue), rel=1e-3)
    assert warm.largest_eigenvalue.matvecs <= cold.largest_eigenvalue.matvecs
    x, y = points()
    bowl = CurvatureMonitor(Bowl(), half_squares, [(x, y)])
    with pytest.raises(ModelError, match="another model"):
        bowl.load_state_dict(monitor.state_dict())
    less = CurvatureMonitor(MLP(nn.Tanh), nn.functional.mse_loss, [(x[:3], y[:3])])
    with pytest.raises(BatchError, match="another probe"):
        less.load_state_dict(monitor.state_dict())


def test_a_pause_goes_on_in_the_state():
    first, second = mlp_monitor(), mlp_monitor()
    first.step(math.nan, 0.1)
    second.load_state_dict(first.state_dict())
    assert second.paused
    second.step(1.0, 0.1)
    assert [one.kind for one in second.incidents] == ["paused", "resumed"] and not second.paused


def test_facts_come_back():
    record = mlp_monitor().step(1.0, 0.1)
    assert Record.from_facts(json.loads(json.dumps(record.facts(), allow_nan=False))) == record


class Broken:
    """A logger that fails until it is repaired."""

    def __init__(self):
        self.repaired, self.steps = False, []

    def log(self, values, step):
        if not self.repaired:
            raise OSError("no space left")
        self.steps.append(step)


def test_a_logger_that_fails_is_an_incident_and_the_record_stays():
    logger, seen = Broken(), []
    monitor = mlp_monitor(logger=logger, on_record=seen.append)
    assert monitor.step(1.0, 0.1) is not None and monitor.step(1.0, 0.1) is not None
    assert [one.message for one in monitor.incidents] == ["logger: OSError: no space left"]  # once, not at each record
    logger.repaired = True
    monitor.step(1.0, 0.1)
    assert logger.steps == [3] and seen == monitor.records and len(seen) == 3


def test_parameters_that_are_trained_later():
    x, y = points(8)
    model = MLP(nn.Tanh)
    name, parameter = next(iter(model.named_parameters()))
    parameter.requires_grad_(False)
    monitor = CurvatureMonitor(model, nn.functional.mse_loss, [(x, y)], every=1)
    some = CurvatureMonitor(model, nn.functional.mse_loss, [(x, y)], monitor._blocks, every=1)
    assert monitor.step(1.0, lr=0.1) is not None
    parameter.requires_grad_(True)
    with pytest.raises(ModelError, match=f"'{name}' was frozen when the monitor was made and is trained now"):
        monitor.measure()
    assert some.measure().largest_eigenvalue == monitor.records[0].largest_eigenvalue  # of the blocks that were chosen


def test_counting_from_a_later_step():
    monitor = mlp_monitor()
    monitor.skip_to(7)
    monitor.skip_to(3)
    assert monitor.step(1.0, 0.1).step == 8
