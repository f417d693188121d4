import math

import pytest
import torch
from torch import nn

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens, truth
from curvoscope.blocks import Block, Blocks
from curvoscope.curvature import CrossEntropy, blocks_of
from curvoscope.errors import ModelError, RangeError, ShapeError
from curvoscope.training import BlockCurvature


def case():
    inputs, targets = tokens()
    return GPT(), CrossEntropy(), [(inputs, targets)]


def run(model, optimizer, probe, steps, scheduler=None):
    (inputs, targets) = probe[0]
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def slices(blocks):
    ends = torch.tensor(list(blocks.sizes.values())).cumsum(0).tolist()
    return {name: slice(end - size, end) for (name, size), end in zip(blocks.sizes.items(), ends, strict=True)}


@pytest.mark.parametrize("base", ["sgd", "adam"])
def test_step_sizes_against_dense_eigenvalues(base):
    model, loss, probe = case()
    inputs, targets = probe[0]
    blocks, cap = blocks_of(model), 1e3
    optimizer = BlockCurvature(model, loss, probe, lr=cap, base=base, matvecs=200, safety=0.5, every=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    H = truth(model, inputs, lambda F: cross_entropy(F, targets), blocks).total
    run(model, optimizer, probe, 1)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    g = blocks.gather(gradients)
    D = torch.ones_like(g) if base == "sgd" else g.abs() + 1e-8  # at the first step v = g²
    limit = 0.5 * (2 * 1.9 if base == "sgd" else 2 * 1.9 / 0.1)
    moved = blocks.gather({name: before[name] - p.detach() for name, p in model.named_parameters()})
    scaled = D.rsqrt()[:, None] * H * D.rsqrt()
    places, alone, rates = slices(blocks), {}, torch.empty_like(g)
    for name, part in places.items():
        top = float(torch.linalg.eigvalsh(scaled[part, part])[-1])
        flat = top < 1e-6 * float(H.norm())  # rounding: a key's bias has no curvature
        assert flat or optimizer.curvatures[name] == pytest.approx(top, rel=1e-5)
        alone[name] = cap if flat else min(cap, limit / top)
        rates[part] = alone[name]
    coupling = float(torch.linalg.eigvalsh(rates.sqrt()[:, None] * scaled * rates.sqrt())[-1]) / limit
    assert coupling > 1.5 and optimizer.coupling == pytest.approx(coupling, rel=1e-5)
    for name, part in places.items():
        rate = alone[name] / coupling
        assert optimizer.learning_rates[name] == pytest.approx(rate, rel=1e-5)
        torch.testing.assert_close(moved[part], rate * g[part] / D[part], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("base", ["sgd", "adam"])
def test_under_its_cap_it_is_the_base(base):
    first, loss, probe = case()
    second = GPT()
    own = BlockCurvature(first, loss, probe, lr=1e-6, base=base)
    torchs = (
        torch.optim.SGD(second.parameters(), lr=1e-6, momentum=0.9)
        if base == "sgd"
        else torch.optim.Adam(second.parameters(), lr=1e-6)
    )
    run(first, own, probe, 4)
    run(second, torchs, probe, 4)
    start = dict(GPT().named_parameters())
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        torch.testing.assert_close(a - start[name], b - start[name], rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("base", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_state_and_scheduler_go_on_to_the_bit(base, tmp_path):
    def made():
        model, loss, probe = case()
        optimizer = BlockCurvature(model, loss, probe, lr=0.5, base=base, every=3, matvecs=2)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), probe

    whole, optimizer, scheduler, probe = made()
    run(whole, optimizer, probe, 6, scheduler)
    half, optimizer, scheduler, probe = made()
    run(half, optimizer, probe, 4, scheduler)
    torch.save([half.state_dict(), optimizer.state_dict(), scheduler.state_dict()], tmp_path / "state.pt")
    weights, state, schedule = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed, optimizer, scheduler, probe = made()
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(state)
    scheduler.load_state_dict(schedule)
    assert optimizer.param_groups[0]["lr"] == 0.125
    run(resumed, optimizer, probe, 2, scheduler)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


class Valley(nn.Module):
    """Two blocks without coupling: with the summed squares as loss, L = ½ (a² + 100 b²)."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    def forward(self, x):
        return x * torch.cat([self.a, 10 * self.b]) * 0.5**0.5


def test_each_block_steps_by_its_own_curvature():
    model, x = Valley(), torch.ones(1, 2, dtype=torch.float64)

    def loss(outputs, targets):
        return outputs.square().sum(-1).mean()

    optimizer = BlockCurvature(model, loss, [(x, x)], lr=50.0, momentum=0.0, safety=0.45)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(x), x).backward()
        optimizer.step()
    # η λ = 0.9 in both: each step leaves a tenth, whatever the curvature
    assert float(model.a.detach()) == pytest.approx(3e-3, rel=1e-6)
    assert float(model.b.detach()) == pytest.approx(2e-3, rel=1e-6)
    assert optimizer.learning_rates == pytest.approx({"a": 0.9, "b": 0.009}, rel=1e-6)


class Quadratic(nn.Module):
    """L = ½ w^T A w with w in three blocks of two: with the summed squares of the outputs A^½ w as loss."""

    def __init__(self, A):
        super().__init__()
        values, vectors = torch.linalg.eigh(A)
        self.root = (vectors * values.sqrt()) @ vectors.T * 0.5**0.5
        self.blocks = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))

    def forward(self, x):
        return x * (self.root @ torch.cat(list(self.blocks)))


def descend(A, steps, **options):
    """The largest entry of w after so many steps, and the optimizer; the cap binds no block."""
    model, x = Quadratic(A), torch.ones(1, 6, dtype=torch.float64)

    def loss(outputs, targets):
        return outputs.square().sum(-1).mean()

    optimizer = BlockCurvature(model, loss, [(x, x)], lr=1e6, matvecs=20, every=10**6, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), x).backward()
        optimizer.step()
    return max(float(weight.detach().abs().max()) for weight in model.blocks), optimizer


def coupled(seed):
    """Positive definite (6, 6), its blocks of curvature about 1, 100 and 10 000, strongly coupled."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    scale = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).repeat_interleave(2)
    return scale[:, None] * (draw @ draw.T + 4 * torch.ones(6, 6, dtype=torch.float64)) * scale


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_coupled_blocks_are_stable_up_to_the_limit_and_not_beyond(momentum, seed):
    A = coupled(seed)
    below, optimizer = descend(A, 400, momentum=momentum, safety=0.98)
    above, _ = descend(A, 400, momentum=momentum, safety=1.02)
    assert optimizer.coupling > 1.2  # without it the safety of 0.98 would be above 1
    assert below <= 1.5 and above > 100
    rates = torch.tensor(list(optimizer.learning_rates.values()), dtype=torch.float64).repeat_interleave(2)
    largest = torch.linalg.eigvals(rates[:, None] * A).real.max()
    assert float(largest) == pytest.approx(0.98 * 2 * (1 + momentum), rel=1e-6)


def test_blocks_without_coupling_keep_their_own_limits():
    A = torch.diag(torch.tensor([1.0, 0.5, 100.0, 30.0, 1e4, 1e3], dtype=torch.float64))
    _, optimizer = descend(A, 1, momentum=0.0, safety=0.5)
    assert optimizer.coupling == pytest.approx(1.0, rel=1e-6)
    assert list(optimizer.learning_rates.values()) == pytest.approx([1.0, 1e-2, 1e-4], rel=1e-6)


def test_a_lower_cap_stays_stable():
    A = coupled(3)
    _, optimizer = descend(A, 1, momentum=0.0, safety=1.0)
    for group in optimizer.param_groups:
        group["lr"] = sorted(optimizer.learning_rates.values())[1]
    rates = torch.tensor(list(optimizer.learning_rates.values()), dtype=torch.float64).repeat_interleave(2)
    assert float(torch.linalg.eigvals(rates[:, None] * A).real.max()) <= 2 * (1 + 1e-9)


def test_leaves_mode_gradients_and_randomness():
    x, y = points()
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    optimizer = BlockCurvature(model, nn.functional.mse_loss, [(x, y)])
    nn.functional.mse_loss(model(x), y).backward()
    gradient, state = model[0].weight.grad.clone(), torch.get_rng_state()
    optimizer.step()
    assert model[1].training and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].weight.grad, gradient)


def test_closure():
    x, y = points()
    model = MLP(nn.Tanh)
    optimizer = BlockCurvature(model, nn.functional.mse_loss, [(x, y)])

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > float(closure().detach())


def test_errors():
    model, loss, probe = case()
    for options, argument in (
        ({"lr": 0.0}, "lr"),
        ({"base": "lion"}, "base"),
        ({"every": 0}, "every"),
        ({"matvecs": 1}, "matvecs"),
        ({"momentum": 1.0}, "momentum"),
        ({"safety": math.inf}, "safety"),
    ):
        with pytest.raises(RangeError, match=argument):
            BlockCurvature(model, loss, probe, **options)
    with pytest.raises(ShapeError, match="exactly one block"):
        BlockCurvature(model, loss, probe, blocks=blocks_of(model).select("*.attn.Q"))
    twice = {**blocks_of(model), "h.0.attn.K": Block("again", blocks_of(model)["h.0.attn.Q"].pieces)}  # as many entries
    with pytest.raises(RangeError, match=r"'h\.0\.attn\.Q' and 'again' share entries"):
        BlockCurvature(model, loss, probe, blocks=Blocks(twice.values()))
    optimizer = BlockCurvature(model, loss, probe)
    optimizer.measure()
    with pytest.raises(ModelError, match="another optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    x, y = points()
    with pytest.raises(ModelError, match="another model"):
        BlockCurvature(MLP(), nn.functional.mse_loss, [(x, y)]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ModelError, match="param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
