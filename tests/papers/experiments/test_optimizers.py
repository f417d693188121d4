"""The comparison of optimizers: the edge against dense matrices, the runs, and what is concluded from them."""

import math

import pytest
import torch
from torch.func import functional_call, grad, jacfwd

from curvoscope.losses import CrossEntropy
from curvoscope.papers.experiments import Row
from curvoscope.papers.experiments.figure import MeasuredValue
from curvoscope.papers.experiments.figures import load
from curvoscope.papers.experiments.figures.optimizers import OPTIMIZERS, reached
from curvoscope.papers.experiments.optimizer_runs import Edge, OptimizerStudy, batch, joined_blocks, search, train
from curvoscope.papers.networks import GPT2
from curvoscope.training import BlockCurvature

SMALL = OptimizerStudy(d=4, sequences=4, steps=6, looks=2, curvatures=6, answers=20, probe=4, search_seeds=(100,))


def network(norm="pre"):
    return GPT2(4, norm=norm, context=6, dtype=torch.float64)


def dense(model, probe):
    """The Hessian by parameter, flat in the order of the parameters."""
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach() for p in model.parameters()]

    def loss(flat):
        parts = flat.split([w.numel() for w in weights])
        state = {name: part.view_as(w) for name, part, w in zip(names, parts, weights, strict=True)}
        logits = functional_call(model, state, (probe[0],))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), probe[1].flatten())

    return jacfwd(grad(loss))(torch.cat([w.flatten() for w in weights]))


def stepped(optimizer, model, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model.loss(*batch(8, 1, step)).backward()
        optimizer.step()


def flat(model, tensors):
    return torch.cat([tensors[p].flatten() for p in model.parameters()])


@pytest.mark.parametrize("norm", ["pre", "none"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_edge_against_dense_matrices(name, norm):
    model, probe = network(norm), batch(4, 1, 99)
    blocks, options = joined_blocks(model), {"lr": 0.01, "every": 2, "safety": 0.1}
    optimizer = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.01),
        "block-sgd": lambda: BlockCurvature(model, CrossEntropy(), [probe], blocks=blocks, base="sgd", **options),
        "block-adam": lambda: BlockCurvature(model, CrossEntropy(), [probe], blocks=blocks, base="adam", **options),
    }[name]()
    stepped(optimizer, model)
    found, H = Edge(model, optimizer, probe)(), dense(model, probe)
    assert found["sharpness"] == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-2)
    rates = {p: torch.full_like(p, 0.01) for p in model.parameters()}
    if name.startswith("block"):
        for parameter_name, parameter in model.named_parameters():
            block = next(b for b, own in blocks.items() if any(x.parameter == parameter_name for x in own.pieces))
            rates[parameter] = torch.full_like(parameter, optimizer.learning_rates[block])
    D, limit = flat(model, rates).sqrt(), 3.8
    if name.endswith("adam"):
        key = "square" if name.startswith("block") else "exp_avg_sq"
        squares = {p: optimizer.state[p][key] / (1 - 0.999**3) for p in model.parameters()}
        D, limit = D * (flat(model, squares).sqrt() + 1e-8).rsqrt(), 38.0
    expected = float(torch.linalg.eigvalsh(D[:, None] * H * D)[-1]) / limit
    assert found["edge"] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("norm", ["pre", "none"])
def test_joined_blocks_hold_every_entry_once(norm):
    model = GPT2(4, depth=2, norm=norm)
    blocks = joined_blocks(model)
    assert blocks.covers(model)
    assert sum(blocks.sizes.values()) == sum(p.numel() for p in model.parameters())
    expected = {"embeddings", "logits", *(f"h.{i}.{part}" for i in (0, 1) for part in ("attn.QK", "attn.VO"))}
    expected |= {f"h.{i}.mlp.{part}" for i in (0, 1) for part in ("up", "down")}
    assert set(blocks) == expected | ({"norms"} if norm == "pre" else set())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_and_its_search(name):
    values = train(SMALL, name, "pre", 0.01, 100)
    places = {q: [v.at for v in values if v.quantity == q] for q in ("loss", "accuracy", "seconds", "edge")}
    assert places["loss"] == places["accuracy"] == places["seconds"] == [0, 2, 4, 6] and places["edge"] == [6]
    (judged,) = search(SMALL, name, "pre", 0.01)  # the same run again
    assert judged.quantity == "mean_loss" and judged.at == 0.01
    assert judged.value == pytest.approx(sum(v.value for v in values if v.quantity == "loss") / 4, rel=1e-12)


def test_sgd_is_torchs():
    values = train(SMALL, "sgd", "none", 0.05, seed=3, curvature=False)
    model = GPT2(4, norm="none", context=6, seed=3, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        model.loss(*batch(4, 1, 4_000_000 + step)).backward()
        optimizer.step()
    inputs, targets = batch(20, 1, 900_001)
    last = [v.value for v in values if v.at == 6]
    logits = model(inputs)
    assert last[0] == pytest.approx(float(model.loss(inputs, targets).detach()), rel=1e-6)
    assert last[1] == pytest.approx(float((logits.argmax(-1)[:, 3:] == targets[:, 3:]).all(1).double().mean()))


@pytest.mark.parametrize("name", OPTIMIZERS[:2])
def test_a_diverged_run_says_so(name):
    rate = 1e30 if name == "sgd" else 1e5
    caps = SMALL.model_copy(update={"caps": {"sgd": 1e30, "adam": 1e30}})
    values = train(caps, name, "none", rate, seed=0)
    assert values[-1].quantity == "diverged" and values[-1].value <= 6
    assert all(math.isfinite(value.value) for value in values)
    (judged,) = search(caps, name, "none", rate)
    assert judged.quantity == "diverged" and judged.at == rate


# ---- conclusions, from made-up rows


def rows_of(optimizer, rate, hits, seconds=1.0):
    """A study in which seed s gets to 99 % at step hits[s], None for never, in so many seconds a step."""
    point = {"stage": "study", "norm": "pre", "optimizer": optimizer, "rate": rate}
    found = []
    for seed, hit in enumerate(hits):
        for step in (0.0, 100.0, 200.0, 300.0):
            accuracy = 0.995 if hit is not None and step >= hit else 0.3
            numbers = {"accuracy": accuracy, "seconds": seconds * step, "loss": 1.0, "sharpness": 2.0, "edge": 0.5}
            found += [
                Row(point, seed, MeasuredValue(1, "all", "total", n, quantity=q, at=step)) for q, n in numbers.items()
            ]
    return found


def test_when_99_percent_is_reached():
    rows = rows_of("sgd", 0.1, [100, None, 300], seconds=0.5)
    assert reached(rows) == {0: 100, 1: math.inf, 2: 300}
    assert reached(rows, "seconds") == {0: 50, 1: math.inf, 2: 150}


def test_verdicts():
    figure = load("optimizers")
    rows = rows_of("sgd", 0.1, [200, 200, None, 300, 200]) + rows_of("block-sgd", 0.3, [100, 200, 300, 100, 100], 3.0)
    rows += rows_of("adam", 0.1, [None] * 5)
    found = {verdict.statement: verdict for verdict in figure.verdicts(rows)}
    sgd = found["pre-norm, sgd at 0.1: steps to 99 % (4 of 5 seeds, 4 still there at the last step)"]
    assert (sgd.fitted, sgd.low, sgd.high) == (200, 200, math.inf)
    steps = found["pre-norm: block-sgd over sgd, steps to 99 %"]  # 1/2, 1, 0, 1/3, 1/2
    assert (steps.fitted, steps.low, steps.high) == (0.5, 0, 1)
    seconds = found["pre-norm: block-sgd over sgd, seconds to 99 %"]
    assert (seconds.fitted, seconds.low, seconds.high) == (1.5, 0, 3)
    (adam,) = [v for v in found.values() if ", adam at" in v.statement]
    assert "0 of 5 seeds" in adam.statement and "not reached" in adam.statement and adam.fitted is None
    assert all(panel.title for panel in figure.panels(rows))


def test_the_tuned_number_is_checked_against_the_search():
    figure = load("optimizers")
    study = [p for p in figure.points if p["stage"] == "study" and p["optimizer"] == "sgd" and p["norm"] == "pre"]
    point, candidates = study[0], figure.configuration.candidates["sgd"]
    place = {name: point[name] for name in ("norm", "optimizer")} | {"stage": "search"}

    def judged(best):
        rows = [
            Row(place, i, MeasuredValue(1, "all", "total", 0.1 if rate == best else 1.0, quantity="mean_loss", at=rate))
            for i, rate in enumerate(candidates)
        ]
        return figure.verdicts(rows)[-1]

    assert point["rate"] in candidates
    assert judged(point["rate"]).agrees and judged(point["rate"]).fitted == 1
    assert judged(next(rate for rate in candidates if rate != point["rate"])).agrees is False
