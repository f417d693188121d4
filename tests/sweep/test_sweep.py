"""`cv.sweep` as people call it: against dense Gauss-Newton matrices, its table, errors, continuing."""

import pytest
import torch
import transformers
from torch import nn

import curvoscope as cv
from autodiff_cases import Routed, routed_batches
from curvoscope.errors import (
    BlockNameError,
    EmptyError,
    LossError,
    MemoryLimitError,
    ModelError,
    NonFiniteError,
    RangeError,
)


def small():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_head=2, n_layer=1, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids = [torch.randint(11, shape) for shape in ((2, 6), (1, 4))]
    return model, [{"input_ids": one, "labels": one} for one in ids]


def pieces(blocks, matrix):
    starts, found = 0, {}
    for name, size in blocks.sizes.items():
        found[name] = slice(starts, starts + size)
        starts += size
    return {(a, b): matrix[i, j] for a, i in found.items() for b, j in found.items()}


@pytest.fixture(scope="module")
def swept():
    """A sweep of many samples, and the dense truth of all pairs of blocks and of heads."""
    model, batches = small()
    sweep = cv.sweep(model, None, batches, samples=1024, seed=5)
    blocks = cv.blocks_of(model)
    outer = pieces(blocks, cv.hessian(model, None, batches, blocks=blocks).outer.dense())
    heads = blocks.select("*.attn.[QKVO]").per_head()
    return sweep, outer, pieces(heads, cv.hessian(model, None, batches, blocks=heads).outer.dense())


def agrees(found, truth):
    """Within 4.5 standard errors: the chance of one failure in a few hundred is below one in a hundred."""
    return abs(float(found) - truth) <= 4.5 * found.stderr + 1e-12


def test_against_dense(swept):
    sweep, outer, heads = swept
    assert sweep.samples == 1024
    largest = max(float(block.norm()) for block in outer.values())
    for name in sweep.names:
        assert agrees(sweep.trace(name), float(outer[name, name].trace()))
        for other in sweep.names:
            truth = float(outer[name, other].norm())
            if truth > 1e-9 * largest:
                found = sweep.frobenius_norm(name, other)
                assert agrees(found, truth), (name, other)
    for name, other in heads:
        assert agrees(sweep.frobenius_norm(name, other), float(heads[name, other].norm()))


def test_a_bias_of_the_head_that_is_no_block_still_counts():
    """The last product is walked apart, and needs its logits with the bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    nn.init.constant_(model[2].bias[0], 3.0)
    batches = [(torch.randn(6, 3).double(), torch.tensor([0, 1, 2] * 2))]
    blocks = cv.blocks_of(model).select("*weight", "0.bias")
    sweep = cv.sweep(model, nn.CrossEntropyLoss(), batches, blocks=blocks, samples=512, seed=1)
    outer = cv.hessian(model, nn.CrossEntropyLoss(), batches, blocks=blocks).outer
    for name in blocks:
        assert agrees(sweep.trace(name), float(outer[name].dense().trace()))


def test_all_pairs_are_the_single_ones(swept):
    sweep, _, _ = swept
    found = sweep.norms()
    assert found.names == sweep.names
    for i, name in enumerate(found.names[:6]):
        for j, other in enumerate(found.names[:6]):
            one = sweep.frobenius_norm(name, other)
            assert float(found.value[i, j]) == pytest.approx(float(one), rel=1e-10)
            assert float(found.stderr[i, j]) == pytest.approx(one.stderr, rel=1e-8)


def test_ranks_and_eigenvalues(swept):
    sweep, outer, _ = swept
    for name in ("h.0.attn.V", "h.0.mlp.up", "embed", "final_norm"):
        block = outer[name, name]
        rank = float(block.trace() ** 2 / block.square().sum())
        assert agrees(sweep.effective_rank(name), rank)
        low, high = sweep.largest_eigenvalue(name).interval(0.999)
        assert low <= float(torch.linalg.eigvalsh(block)[-1]) <= high
        assert agrees(sweep.moment(name, 3), float(torch.linalg.matrix_power(block, 3).trace()))
        assert 0 <= sweep.alignment(name, "h.0.attn.O") <= 1.2


def test_table(swept):
    from io import StringIO

    from rich.console import Console

    sweep, _, _ = swept
    table = sweep.table()
    assert [row.block for row in table] == sweep.names
    lines = str(table).splitlines()
    assert len(lines) == len(sweep.names) + 2
    assert "1024 samples" in lines[0]
    assert "h.0.attn.Q" in sweep._repr_html_()
    shown = StringIO()
    Console(file=shown, width=160).print(table)
    assert "h.0.mlp.down" in shown.getvalue()
    assert "1024 samples" in repr(sweep)
    norms = [row.frobenius_norm for row in sweep.table(largest_first=True)]
    assert norms == sorted(norms, reverse=True) and len(norms) == len(sweep.names)


def test_a_block_without_curvature():
    """A layer that the model does not use, as many a pooling head."""
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(2, 2)}).double()
    model.forward = model["used"].forward
    found = cv.sweep(model, nn.CrossEntropyLoss(), [(torch.ones(4, 3).double(), torch.zeros(4).long())], samples=8)
    assert found.effective_rank("unused.weight") == found.trace("unused.weight") == 0
    assert "unused.weight  2 x 2  0 ± 0" in str(found.table())


def test_how_many_samples_a_tolerance_needs(swept):
    sweep, _, _ = swept
    errors = torch.tensor([norm.stderr / norm for norm in map(sweep.frobenius_norm, sweep.names) if norm])
    worst = max(float(errors.median()), float(errors.quantile(0.95)) / 2)
    assert sweep.needed(worst / 2) == pytest.approx(4 * 1024, rel=0.05)
    assert sweep.needed(1.01 * worst) <= 1024


def test_a_head_is_a_part_of_its_block(swept):
    sweep, _, _ = swept
    assert sweep.heads("h.0.attn.Q") == ["h.0.attn.Q.0", "h.0.attn.Q.1"]
    total = sum(float(sweep.trace(head)) for head in sweep.heads("h.0.attn.Q"))
    assert float(sweep.trace("h.0.attn.Q")) == pytest.approx(total, rel=1e-12)
    assert sweep.heads("h.0.mlp.up") == []


def test_continued_is_the_same_as_in_one_go():
    model, batches = small()
    whole = cv.sweep(model, None, batches, samples=128, seed=2)
    half = cv.sweep(model, None, batches, samples=64, seed=2)
    continued = cv.sweep(model, None, batches, samples=128, seed=2, earlier=half)
    assert continued.samples == 128
    for name in whole.names:
        assert float(continued.trace(name)) == pytest.approx(float(whole.trace(name)), rel=1e-10)
    with pytest.raises(ModelError, match="of other data"):
        cv.sweep(model, None, batches[1:], samples=128, earlier=cv.Sweep(half.blocks, half.chunks, 2 * half.loss))
    with pytest.raises(ModelError, match="other blocks"):
        cv.sweep(model, None, batches, blocks=cv.blocks_of(model).select("*.attn.Q"), earlier=half)


def test_tolerance():
    model, batches = small()
    blocks = cv.blocks_of(model).select("*.attn.[VO]", "*.mlp.*")
    sweep = cv.sweep(model, None, batches, blocks=blocks, tolerance=0.1)
    errors = torch.tensor([sweep.frobenius_norm(name).stderr / sweep.frobenius_norm(name) for name in sweep.names])
    assert errors.quantile(0.5) <= 0.1 or sweep.samples == 1024
    assert sweep.samples % 64 == 0


def test_told_from_the_top():
    model, batches = small()
    seen = []
    cv.sweep(model, None, batches, samples=8, tell=lambda sweep: seen.append(sweep.names))
    assert len(seen) >= len(cv.blocks_of(model))
    first, last = seen[0], seen[-1]
    assert all(name.startswith("h.0.") for name in first)  # before what lies below the layers is known
    assert last == cv.blocks_of(model).names


def test_an_interrupt_keeps_what_was_told():
    model, batches = small()
    told = []

    def stop(sweep):
        told.append(sweep)
        if len(sweep.names) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cv.sweep(model, None, batches, samples=16, tell=stop)
    assert all(float(told[-1].trace(name)) >= 0 for name in told[-1].names)
    assert model.config.use_cache is True


def test_the_model_is_left_as_it_was():
    model, batches = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    cv.sweep(model, None, batches, samples=8)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "routes",
    [
        [((0, 1), (0,)), ((1, 0), (0,))],  # another order
        [((0, 1, 2), (0,)), ((0, 2), (0,))],  # a layer fewer
        [((0,), (0,)), ((1,), (0,)), ((2,), (0,))],  # another layer
        [((0, 1, 0), (0,)), ((0, 1), (0,))],  # a layer twice
        [((0, 1), (0,)), ((0, 1), (1,))],  # another head
        [((0, 1), (0,)), ((0, 1), (0, 0))],  # a head twice
    ],
    ids=["order", "fewer", "other", "twice", "head", "head twice"],
)
@pytest.mark.parametrize("first", [0, 1])
def test_batches_that_use_different_parameters(routes, first):
    torch.manual_seed(0)
    model = Routed().double()
    routes = routes if first == 0 else routes[::-1]
    batches = routed_batches(routes)
    sweep = cv.sweep(model, nn.CrossEntropyLoss(), batches, samples=256, seed=3)
    outer = pieces(sweep.blocks, cv.hessian(model, nn.CrossEntropyLoss(), batches, method="autodiff").outer.dense())
    for name in sweep.names:
        assert agrees(sweep.trace(name), float(outer[name, name].trace()))
        for other in sweep.names:
            low, high = sweep.frobenius_norm(name, other).interval(1 - 1e-6)
            assert low - 1e-9 <= float(outer[name, other].norm()) <= high + 1e-9
    assert len(sweep.table()) == len(sweep.names)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [slice(0, 7), slice(2, 9)], ids=["first", "last"])
def test_a_vocabulary_that_is_a_part_of_a_parameter(tied, rows):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.layers = nn.ModuleList([nn.Linear(4, 4)])
            self.out = self.embed.weight if tied else nn.Parameter(torch.randn(9, 4))

        def forward(self, x):
            return torch.tanh(self.layers[0](self.embed(x))) @ self.out[rows].T

    torch.manual_seed(0)
    model, batches = Padded().double(), [(torch.randint(9, (3, 4)), torch.randint(7, (3, 4)))]
    sweep = cv.sweep(model, cv.losses.CrossEntropy(), batches, samples=256, seed=2)
    outer = cv.hessian(model, cv.losses.CrossEntropy(), batches, method="autodiff").outer
    for name in sweep.names:
        assert agrees(sweep.trace(name), float(outer[name].dense().trace()))


def test_parameters_without_a_gradient_have_the_rank_zero():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.scale = nn.Linear(3, 2), nn.Linear(3, 2), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return torch.where(x[:, :1].isfinite(), self.used(x), self.idle(x)) * self.scale

    torch.manual_seed(0)
    X = torch.randn(6, 3).double()
    model = Idle().double()
    sweep = cv.sweep(model, nn.MSELoss(), [(X, X[:, :2])], samples=64)
    row = {row.block: row for row in sweep.table()}["idle.weight"]
    assert (row.trace, row.frobenius_norm, row.effective_rank) == (0, 0, 0)
    assert sweep.alignment("used.weight", "idle.weight") == 0
    exact = cv.hessian(model, nn.MSELoss(), [(X, X[:, :2])]).outer["scale"].trace()  # a parameter without axes
    assert agrees(sweep.trace("scale"), float(exact))


def test_a_sum_is_not_a_mean():
    """A loss that is a sum over rows has a Hessian that grows with the batches."""
    torch.manual_seed(0)
    X = torch.randn(6, 3).double()
    batches = [(X[:4], X[:4]), (X[4:], X[4:])]
    model = nn.Linear(3, 3).double()
    loss = nn.MSELoss(reduction="sum")
    sweep = cv.sweep(model, loss, batches, samples=512, seed=1)
    exact = cv.hessian(model, loss, batches).outer["weight"].trace()
    assert agrees(sweep.trace("weight"), float(exact))


class TestErrors:
    def test_samples(self):
        model, batches = small()
        with pytest.raises(RangeError, match="samples: got 1, expected at least 4"):
            cv.sweep(model, None, batches, samples=1)
        with pytest.raises(RangeError, match=r"samples: got 16\.5, expected a whole number"):
            cv.sweep(model, None, batches, samples=16.5)
        with pytest.raises(RangeError, match="tolerance"):
            cv.sweep(model, None, batches, tolerance=0.0)

    def test_kinds(self):
        model, batches = small()
        with pytest.raises(BlockNameError, match="blocks: got a list, expected Blocks"):
            cv.sweep(model, None, batches, blocks=["h.0.attn.Q"], samples=8)
        with pytest.raises(ModelError, match=r"model: got a str, expected a torch\.nn\.Module"):
            cv.sweep("gpt2", None, batches, samples=8)
        with pytest.raises(ModelError, match="earlier: got a str"):
            cv.sweep(model, None, batches, samples=8, earlier="table.json")
        with pytest.raises(LossError, match="has the eigenvalue -"):
            cv.sweep(nn.Linear(2, 2), lambda F, Y: -(F - Y).square().mean(), [(torch.ones(3, 2), torch.ones(3, 2))])

    def test_no_parameters(self):
        model, batches = small()
        with pytest.raises(EmptyError, match="frozen"):
            cv.sweep(model.requires_grad_(False), None, batches, samples=8)

    def test_memory(self):
        model, batches = small()
        with (
            cv.settings(memory_limit=20_000),
            pytest.raises(MemoryLimitError, match="samples of the widest layer needs"),
        ):
            cv.sweep(model, None, batches, samples=8)

    def test_names(self):
        model, batches = small()
        sweep = cv.sweep(model, None, batches, samples=8)
        with pytest.raises(BlockNameError, match=r"there is no 'h\.9'"):
            sweep.trace("h.9")
        with pytest.raises(RangeError, match="order: got 7"):
            sweep.moment("embed", 7)
        with pytest.raises(RangeError, match=r"order: got 2\.0"):
            sweep.moment("embed", 2.0)
        with pytest.raises(RangeError, match="tolerance: got 0"):
            sweep.needed(0)
        with pytest.raises(EmptyError, match="names"):
            sweep.norms([])

    def test_not_finite(self):
        class Overflows(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(2, 2)

            def forward(self, x):
                return self.linear(x).square().sqrt()

        X = torch.zeros(3, 2)
        model = Overflows()
        nn.init.zeros_(model.linear.weight)
        nn.init.zeros_(model.linear.bias)
        with pytest.raises(NonFiniteError, match="not finite on batch 0"):
            cv.sweep(model, nn.MSELoss(), [(X, X)], samples=8)
