"""The comparison of optimizers: the runs, and what is concluded from them."""

import math

import pytest
import torch

from curvoscope.errors import MissingPackageError
from curvoscope.papers.experiments import NAMES, Row, extras, find, left_out, optimizer_runs
from curvoscope.papers.experiments.figure import MeasuredValue
from curvoscope.papers.experiments.figures import load
from curvoscope.papers.experiments.figures.optimizers import reached
from curvoscope.papers.experiments.optimizer_runs import OPTIMIZERS, TASKS, OptimizerStudy, search, subject_of, train
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import addition, answer_targets

SMALL = OptimizerStudy(
    d=4, sequences=4, texts=2, context=8, images=4, sample=8, looks=2,
    steps=dict.fromkeys(TASKS, 6), goals=dict.fromkeys(TASKS, 0.1), search_seeds=(100,),
)  # fmt: skip


def needs(name):
    if name in ("muon", "soap") and not extras.is_installed("optimizers"):
        pytest.skip("the extra `optimizers` is not installed")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run(name, task):
    needs(name)
    values = train(SMALL, task, name, 0.01, 100)
    places = {q: [v.at for v in values if v.quantity == q] for q in ("loss", "seconds", "wall")}
    assert places["loss"] == places["seconds"] == places["wall"] == [0, 2, 4, 6]
    losses = [v.value for v in values if v.quantity == "loss"]
    assert len(set(losses)) == 4 and all(map(math.isfinite, losses))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_search_is_the_run_up_to_its_goal(name):
    needs(name)
    losses = [v.value for v in train(SMALL, "addition", name, 0.01, 100) if v.quantity == "loss"]
    for goal in (0.0, losses[2]):
        c = SMALL.model_copy(update={"goals": {"addition": goal}})
        found = {value.quantity: value for value in search(c, "addition", name, 0.01)}
        first = next((i for i, loss in enumerate(losses) if loss <= goal), None)
        assert found["steps"].value == (12.0 if first is None else 2.0 * first) and found["steps"].at == 0.01
        seen = losses if first is None else losses[: first + 1]
        assert found["mean_loss"].value == pytest.approx(sum(seen) / len(seen), rel=1e-6)


def test_sgd_is_torchs():
    values = train(SMALL, "addition without norm", "sgd", 0.05, seed=3)
    model = GPT2(4, norm="none", context=6, seed=3, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def batch(rows, seed):
        tokens = addition(rows, 1, seed)
        return tokens[:, :-1], answer_targets(tokens)

    for step in range(6):
        optimizer.zero_grad()
        model.loss(*batch(4, 4_000_000 + step)).backward()
        optimizer.step()
    (last,) = [v.value for v in values if v.at == 6 and v.quantity == "loss"]
    assert last == pytest.approx(float(model.loss(*batch(8, 900_001)).detach()), rel=1e-6)


def test_muon_takes_the_hidden_matrices(monkeypatch):
    needs("muon")
    taken, original = [], torch.optim.Muon

    def spied(weights, **options):
        taken.append(weights)
        return original(weights, **options)

    monkeypatch.setattr(torch.optim, "Muon", spied)
    outer = {"W_E", "W_pos", "W_U", "embed", "head"}
    for task, count in (("addition", 6), ("digits", 4)):
        model = subject_of(SMALL, task).network(0)
        optimizer_runs.stepper(model, "muon", 0.01)
        expected = {id(p) for n, p in model.named_parameters() if p.ndim == 2 and n.split(".")[0] not in outer}
        assert {id(p) for p in taken[-1]} == expected and len(expected) == count


def test_seeds_give_other_data_and_tasks_their_shapes():
    for task in TASKS:
        subject = subject_of(SMALL, task)
        (first, targets), (second, _) = subject.batch(1, 5), subject.batch(2, 5)
        assert len(first) == len(targets) == 5 and not torch.equal(first, second)
        assert torch.equal(first, subject.batch(1, 5)[0])
    inputs, targets = subject_of(SMALL, "text").batch(1, 5)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_diverged_run_says_so():
    values = train(SMALL, "addition without norm", "sgd", 1e30, seed=0)
    assert values[-1].quantity == "diverged" and values[-1].value <= 6
    assert all(math.isfinite(value.value) for value in values)
    (judged,) = search(SMALL, "addition without norm", "sgd", 1e30)
    assert judged.quantity == "diverged" and judged.at == 1e30


def test_without_the_packages(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda extra: extra != "optimizers")
    assert "optimizers" in left_out() and set(left_out()) < set(NAMES)
    with pytest.raises(MissingPackageError, match=r"^optimizers: .*pip install 'curvoscope\[optimizers\]"):
        find(["optimizers"])


# ---- conclusions, from made-up rows


def rows_of(optimizer, rate, hits, seconds=1.0):
    """A study in which seed s gets to the goal at step hits[s], None for never, in so many seconds per step."""
    point = {"stage": "study", "task": "text", "optimizer": optimizer, "rate": rate}
    found = []
    for seed, hit in enumerate(hits):
        for step in (0.0, 100.0, 200.0, 300.0):
            loss = 0.01 if hit is not None and step >= hit else 3.0
            numbers = {"loss": loss, "seconds": seconds * step, "wall": 2 * seconds * step}
            found += [
                Row(point, seed, MeasuredValue(1, "all", "total", n, quantity=q, at=step)) for q, n in numbers.items()
            ]
    return found


def test_when_the_goal_is_reached():
    rows = rows_of("sgd", 0.1, [100, None, 300], seconds=0.5)
    assert reached(rows, 0.1) == {0: 100, 1: math.inf, 2: 300}
    assert reached(rows, 0.1, "seconds") == {0: 50, 1: math.inf, 2: 150}


def test_verdicts():
    figure = load("optimizers")
    rows = rows_of("adam", 0.1, [200, 200, None, 300, 200])
    rows += rows_of("gauss-newton", 0.3, [100, 200, 300, 100, 100], 1.5) + rows_of("sgd", 0.1, [None] * 5)
    found = {verdict.statement: verdict for verdict in figure.verdicts(rows)}
    adam = found["text, adam at 0.1: steps to a loss of 2 (4 of 5 seeds)"]
    assert (adam.fitted, adam.low, adam.high) == (200, 200, math.inf)
    steps = found["text, gauss-newton over adam: steps"]  # 1/2, 1, 0, 1/3, 1/2
    assert (steps.fitted, steps.low, steps.high) == (0.5, 0, 1)
    for name in ("processor time", "wall-clock time"):
        seconds = found[f"text, gauss-newton over adam: {name}"]
        assert (seconds.fitted, seconds.low, seconds.high) == (0.75, 0, 1.5)
    pace = found["text, gauss-newton over adam: processor time per step"]
    assert (pace.fitted, pace.low, pace.high) == (1.5, 1.5, 1.5)
    (sgd,) = [v for v in found.values() if ", sgd at" in v.statement]
    assert "0 of 5 seeds" in sgd.statement and "not reached" in sgd.statement and sgd.fitted is None
    assert found["tasks on which gauss-newton takes at most half of adam's steps and less wall-clock time"].fitted == 1
    assert all(panel.title for panel in figure.panels(rows))


def test_the_tuned_rate_is_checked_against_the_search():
    figure = load("optimizers")
    (point,) = [p for p in figure.points if p["stage"] == "study" and p["optimizer"] == "sgd" and p["task"] == "text"]
    rates = figure.configuration.rates["sgd"]
    place = {name: point[name] for name in ("task", "optimizer")} | {"stage": "search"}

    def judged(best):
        rows = [
            Row(place, i, MeasuredValue(1, "all", "total", value, quantity=quantity, at=rate))
            for i, rate in enumerate(rates)
            for quantity, value in (("steps", 600.0), ("mean_loss", 0.1 if rate == best else 1.0))
        ]
        return figure.verdicts(rows)[-1]

    assert point["rate"] in rates
    assert judged(point["rate"]).agrees and judged(point["rate"]).fitted == 1
    assert judged(next(rate for rate in rates if rate != point["rate"])).agrees is False
