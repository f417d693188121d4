"""The model, the random states and the global settings are as before, however the computation ends."""

import gc
import random
import threading
import weakref
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from autodiff_cases import GPT, MLP, points, tokens
from curvoscope.autodiff.safety import undisturbed
from curvoscope.curvature import CrossEntropy, blocks_of, hessian
from curvoscope.errors import ModelError
from curvoscope.sweep import sweep
from reference import normal, relative


class Guarded(nn.Module):
    """A network with everything that can be disturbed: buffers it writes to, hooks, gradients, modes, random draws.

    Python's own random numbers have a test to themselves: the type checker that runs with the tests draws some.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = GPT()
        self.dropout = nn.Dropout(0.5).eval()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        np.random.rand()
        self.calls += 1
        self.scale = self.scale * 1.0
        return self.dropout(self.inner(x)) * self.scale


def _model() -> Guarded:
    model = Guarded()
    model.inner.wpe.weight.requires_grad_(False)
    model.inner.ln_f.train(False)
    model.inner.h[0].mlp.act.train(True)
    for p in model.inner.h.parameters():
        p.grad = torch.randn_like(p)
    model.inner.register_forward_hook(lambda module, inputs, output: None)
    return model


def _state(model: nn.Module) -> dict[str, object]:
    return {
        "values": {name: (id(t), t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "versions": {name: t._version for name, t in model.named_parameters()},
        "flags": {name: (p.requires_grad, id(p.grad)) for name, p in model.named_parameters()},
        "grads": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [len(hooks) for key, hooks in vars(module).items() if key.endswith("_hooks")]
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "kernels": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        ),
        "settings": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch.get_num_threads(),
        ),
        "random": (torch.get_rng_state(), np.random.get_state()[1].copy(), np.random.get_state()[2]),
    }


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _assert_unchanged(before: dict[str, object], model: nn.Module) -> None:
    after = _state(model)
    for key, value in before.items():
        assert _same(value, after[key]), key


@pytest.mark.parametrize("split", ["model", "layer"])
@pytest.mark.parametrize("limit", [None, 1])
def test_after_success(split, limit):
    model, batch = _model(), tokens()
    before = _state(model)
    H = hessian(model, CrossEntropy(), [batch], split=split, memory_limit=limit)
    _assert_unchanged(before, model)
    v = normal(1)(H.shape[0])
    H @ v
    name = "inner.h.0.attn.V" if "inner.h.0.attn.V" in H.names else "h.0.attn.V"
    for part in (H.outer, H.functional):
        part[name] @ normal(2)(16)
    _assert_unchanged(before, model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("split", ["model", "layer"])
def test_after_an_exception_inside_the_loss(error, call, split):
    """On the first look (calls 1 to 4) and when a graph is made."""
    model, (inputs, targets) = _model(), tokens()
    before = _state(model)
    calls = []

    def loss(logits, labels):
        calls.append(1)
        if len(calls) == call:
            raise error("stop")
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    with pytest.raises(error):
        H = hessian(model, loss, [(inputs, targets)], split=split, memory_limit=1)
        for _ in range(2):
            H.outer["h.0.attn.V"] @ normal(1)(16)
    assert len(calls) == call
    _assert_unchanged(before, model)


def test_after_an_exception_inside_the_model():
    model, batch = _model(), tokens()
    handle = model.inner.ln_f.register_forward_pre_hook(lambda module, inputs: 1 / 0)
    before = _state(model)
    with pytest.raises(ZeroDivisionError):
        hessian(model, CrossEntropy(), [batch])
    _assert_unchanged(before, model)
    handle.remove()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_random_states_and_buffers_of_the_context_alone(error, monkeypatch):
    model = _model()
    before, seen, getstate = _state(model), [], random.getstate
    monkeypatch.setattr(random, "getstate", lambda: seen.append(getstate()) or seen[-1])
    with suppress(KeyboardInterrupt), undisturbed(model):
        model(tokens()[0])
        random.random()
        model.train()
        model.inner.wte.weight.grad = torch.ones(6, 4).double()
        model.requires_grad_(True)
        if error:
            raise error
    assert [getstate()] == seen
    _assert_unchanged(before, model)


def test_under_foreign_settings():
    """No-grad and inference mode, autocast and a disabled kernel outside are as they were, and change nothing."""
    model, batch = GPT(), tokens()
    expected = hessian(model, CrossEntropy(), [batch])
    v = normal(1)(expected.shape[0])
    expected = expected @ v
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        for setting in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
            with setting:
                before = _state(model)
                found = hessian(model, CrossEntropy(), [batch]) @ v
                _assert_unchanged(before, model)
            assert relative(found, expected) < 1e-13
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_nothing_is_left_behind_when_the_hessian_is_gone():
    model, batch = GPT(), tokens()
    H = hessian(model, CrossEntropy(), [batch])
    H @ normal(1)(H.shape[0])
    graph = weakref.ref(next(iter(H.total._engine._kept.values()))[0])
    del H
    gc.collect()
    assert graph() is None


def test_a_loader_of_its_own_keeps_its_generator():
    inputs, targets = points(6)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=2, generator=generator)
    model = MLP()
    state, torch_state = generator.get_state(), torch.get_rng_state()
    H = hessian(model, nn.MSELoss(), loader)
    v = normal(1)(H.shape[0])
    whole = hessian(model, nn.MSELoss(), [(inputs, targets)])
    assert relative(H @ v, whole @ v) < 1e-13
    assert torch.equal(generator.get_state(), state) and torch.equal(torch.get_rng_state(), torch_state)


def test_two_threads_may_use_one_hessian_after_another():
    model, batch = MLP(), points()
    H = hessian(model, nn.MSELoss(), [batch])
    v = normal(1)(H.shape[0])
    expected, found = H @ v, []
    worker = threading.Thread(target=lambda: found.append(H @ v))
    worker.start()
    worker.join()
    assert torch.equal(found[0], expected)


class Shared(nn.Module):
    """A block that stands under three names, and an embedding under two, tied to the output; buffers in two places."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.blocks = nn.ModuleList([block, nn.Tanh(), block])
        self.last = block
        self.source = nn.Embedding(5, 4)
        self.target, self.out = self.source, nn.Linear(4, 5, bias=False)
        self.out.weight = self.source.weight
        self.register_buffer("shift", torch.linspace(-1, 1, 4))
        block.register_buffer("shift", self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.source(x) + self.target(x.flip(1)) ** 2 + self.shift
        for block in (*self.blocks, self.last):
            x = block(x)
        return self.out(x - self.blocks[0].shift)


@pytest.mark.parametrize("recompute", [None, "layer"])
def test_modules_under_several_names(recompute):
    torch.manual_seed(0)
    model, batch = Shared().double(), (torch.randint(5, (2, 3)), torch.randint(5, (2, 3)))

    def loss(logits, targets):
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    before = _state(model)
    H = hessian(model, loss, [batch], recompute=recompute)
    assert H.names == [name for name, _ in model.named_parameters()]
    found = H.dense()
    _assert_unchanged(before, model)
    assert model.target.weight is model.out.weight is model.source.weight and model.last[0] is model.blocks[2][0]
    weights = list(model.parameters())

    def flat(value, **options):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, weights, **options)])

    gradient = flat(loss(model(batch[0]), batch[1]), create_graph=True)
    assert relative(found, torch.stack([flat(entry, retain_graph=True) for entry in gradient])) < 1e-12
    sweep(model, loss, [batch], samples=16)
    _assert_unchanged(before, model)


class Checkpointed(GPT):
    """A GPT that keeps no activations of its blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(2)
        for block in self.h:
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_are_kept(reentrant):
    model, batch = Checkpointed(reentrant), tokens()
    plain = GPT(2)
    plain.load_state_dict(model.state_dict())
    expected, found = (hessian(one, CrossEntropy(), [batch]) for one in (plain, model))
    v = normal(1)(expected.shape[0])
    assert relative(found @ v, expected @ v) < 1e-12
    assert found.method_of("h.0.attn.Q") == "exact"
    assert blocks_of(model, batch).names == blocks_of(plain, batch).names
    samples = [sweep(one, CrossEntropy(), [batch], samples=8).norms().value for one in (plain, model)]
    assert relative(samples[1], samples[0]) < 1e-10
    loss = CrossEntropy()(model(batch[0]), batch[1])  # afterwards the model checkpoints as before
    if reentrant:
        with pytest.raises(RuntimeError, match="use_reentrant"):
            torch.autograd.grad(loss, list(model.parameters()))


def test_autocast_rounds_nothing():
    """Numbers of a float32 model are refused under autocast, which would compute them in bfloat16."""
    model, batch = GPT().float(), tokens()
    H = hessian(model, CrossEntropy(), [batch])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ModelError, match=r"autocast is on.*bfloat16"):
            H.trace()
        with pytest.raises(ModelError, match="autocast is on"):
            hessian(model, CrossEntropy(), [batch])["h.0.attn.Q"].trace()
    H["h.0.attn.Q"].trace()
