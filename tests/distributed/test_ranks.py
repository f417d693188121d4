"""Hessians over several processes: against one process, and against dense nested autodiff in float64."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens, truth
from curvoscope.curvature import CrossEntropy, MeanSquaredError, RankError, blocks_of, hessian
from curvoscope.distributed.ranks import _compare, _note
from curvoscope.errors import ModelError
from distributed_workers import (
    LONG,
    ROWS,
    answers,
    closed,
    closed_blocks,
    closed_summary,
    failures,
    launch,
    launched,
    own_loss,
    plain_function,
    summary,
    vanishing,
)
from reference import relative

# In the last, a rank without batches and one with few terms.
CUTS = [*(pytest.param(cut, marks=pytest.mark.slow) for cut in [(7,), (4, 3), (1, 6)]), (3, 0, 2, 2)]
ROUNDING = torch.finfo(torch.float32).eps ** 0.5


@pytest.fixture(scope="module", params=CUTS, ids=str)
def found(request):
    return launched(answers, len(request.param), request.param)


@pytest.fixture(scope="module")
def alone():
    return summary(hessian(GPT(), CrossEntropy(), [tokens(ROWS)], method="autodiff"))


class TestAnyCut:
    def test_dense_autodiff(self, found):
        model, (inputs, targets) = GPT(), tokens(ROWS)
        dense = truth(model, inputs, lambda F: cross_entropy(F, targets), blocks_of(model))
        for answer in found:
            for part in ("total", "outer", "functional"):
                assert relative(answer[part], getattr(dense, part), dense.total) < 1e-10

    def test_a_layer(self, found):
        model, (inputs, targets) = MLP(), points(ROWS)
        dense = truth(model, inputs, lambda F: (F - targets).square().mean(), blocks_of(model))
        for answer in found:  # a linear layer has no functional part at its own output
            assert relative(answer["layer"], dense.total[:12, :12], dense.total) < 1e-10

    def test_every_estimate_is_that_of_one_process(self, found, alone):
        for answer in found:
            for name, expected in alone.items():
                assert relative(answer[name], expected) < 1e-9, name

    def test_all_ranks_have_the_same_to_the_bit(self, found):
        for answer in found[1:]:
            for name, expected in found[0].items():
                assert torch.equal(answer[name], expected), name

    def test_the_loss_of_the_model_itself(self, found):
        for answer in found:
            assert relative(answer["own loss"], own_loss([ROWS], 0, None)) < 1e-12

    def test_a_plain_function_with_a_penalty(self, found):
        """One batch in one process needs no count."""
        expected = plain_function([ROWS], 0, None)
        for answer in found:
            assert relative(answer["plain function"], expected) < 1e-11


@pytest.fixture(scope="module", params=CUTS, ids=str)
def closed_forms(request):
    return launched(closed, len(request.param), request.param)


@pytest.fixture(scope="module")
def closed_alone():
    model = GPT()
    return closed_summary(hessian(model, CrossEntropy(), [tokens(ROWS)], closed_blocks(model), "exact"))


class TestClosedForms:
    def test_all_that_one_process_says(self, closed_forms, closed_alone):
        for answer in closed_forms:
            for name, expected in closed_alone.items():
                assert relative(answer[name], expected) < 1e-9, name

    def test_dense_autodiff(self, closed_forms):
        model, (inputs, targets) = GPT(), tokens(ROWS)
        blocks = closed_blocks(model)
        dense = truth(model, inputs, lambda F: cross_entropy(F, targets), blocks)
        for part in ("total", "outer", "functional"):
            start = 0
            for name, size in blocks.sizes.items():
                expected = getattr(dense, part)[start : start + size, start : start + size]
                start += size
                for answer in closed_forms:
                    assert relative(answer[f"{part} {name} dense"], expected, dense.total) < 1e-10
                    assert relative(answer[f"{part} {name} norm"], expected.norm(), dense.total) < 1e-10

    def test_the_norm_from_the_terms_of_all_ranks(self, closed_forms, closed_alone):
        for answer in closed_forms:
            for name in ("h.0.attn.Q", "h.0.attn.K", "h.0.attn.V", "h.0.mlp.up"):
                assert relative(answer[f"gathered {name}"], closed_alone[f"total {name} norm"]) < 1e-9

    def test_the_norm_without_memory_is_an_estimate(self, closed_forms, closed_alone):
        for answer in closed_forms:
            value, stderr = answer["estimate"].tolist()
            assert abs(value - float(closed_alone["total h.0.attn.Q norm"])) <= 4 * stderr + 1e-12

    def test_what_one_rank_has_no_memory_for_is_refused_on_all(self, closed_forms):
        assert {answer["refused"][0] for answer in closed_forms} == {"MemoryLimitError"}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    return launch(failures, 2, tmp_path_factory.mktemp("mistakes"))


class TestMistakes:
    @pytest.mark.parametrize(
        ("name", "argument", "said"),
        [
            ("parameters", "model", "'down.weight' has other numbers on rank 1"),
            ("blocks", "blocks", "'down.weight' is missing on rank 1"),
            ("order", "blocks", "'their order' is up.weight up.bias down.weight down.bias on rank 0 and down.bias"),
            ("split", "split", "'split' is model on rank 0 and layer on rank 1"),
            ("loss", "loss_fn", "MSE on rank 0 and CrossEntropy"),
            ("vectors", "process_group", "rank 1 used different vectors from rank 0"),
            ("calls", "process_group", "rank 1 asked for another product than rank 0"),
            ("widths", "process_group", "rank 1 asked for another product than rank 0"),
        ],
    )
    def test_what_differs_is_said_on_all_ranks(self, mistakes, name, argument, said):
        for answer in mistakes:
            kind, at, message = answer[name]
            assert (kind, at) == ("RankError", argument) and said in message

    @pytest.mark.parametrize(
        ("name", "kind", "said"),
        [
            ("form", "BatchError", "rank 1 failed with BatchError: batches: batch 0 is a int"),
            ("nan", "NonFiniteError", "rank 1 failed with NonFiniteError: loss_fn: the loss is nan"),
            ("changed", "BatchError", "rank 1 failed in a product"),
        ],
    )
    def test_the_failure_of_one_is_told_to_the_others(self, mistakes, name, kind, said):
        other, own = (answer[name] for answer in mistakes)
        assert own[0] == kind
        assert other[:2] == ("RankError", "process_group") and said in other[2]

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("forward", "rank 1 failed in a product"),
            ("backward", "rank 1 failed in a product"),
            ("forward at once", "rank 1 failed with ValueError: no tanh here"),
        ],
    )
    def test_a_model_that_raises_on_one(self, mistakes, name, said):
        other, own = (answer[name] for answer in mistakes)
        assert own[0] == "ValueError" and own[2].startswith("no ")
        assert other[:2] == ("RankError", "process_group") and said in other[2]

    def test_what_no_rank_can_have(self, mistakes):
        for answer in mistakes:
            assert answer["empty"][:2] == ("EmptyError", "batches") and "no rank has batches" in answer["empty"][2]
            assert answer["exact"][:2] == ("ModelError", "method")
            assert answer["curvatures"][:2] == ("ModelError", "process_group")

    def test_the_group_goes_on_after_errors(self, mistakes):
        for answer in mistakes:
            assert answer["fine"] is None and answer["after"] == 0 and answer["untrapped"] is None

    def test_a_group_of_others(self, mistakes):
        member, stranger = (answer["member"] for answer in mistakes)
        assert member is None
        assert stranger[:2] == ("RankError", "process_group") and "not a member" in stranger[2]


class TestNotes:
    """What ranks tell each other about their vectors."""

    @pytest.mark.parametrize("size", [3, 5000, 2**24])
    def test_vectors_of_unlike_seeds(self, size):
        notes = [_note("product", torch.randn(1, size, generator=seeded(seed)), False) for seed in (0, 1)]
        with pytest.raises(RankError, match="rank 1 used different vectors"):
            _compare(torch.stack(notes), ROUNDING)

    def test_the_order_of_entries_and_of_vectors(self):
        vectors = torch.randn(2, 2**14, generator=seeded(0))
        for others in (vectors.flip(0), vectors.flip(1), vectors.roll(1, 1), vectors.roll(4096, 1)):
            with pytest.raises(RankError, match="rank 1 used different vectors"):
                _compare(torch.stack([_note("product", one, False) for one in (vectors, others)]), ROUNDING)

    @pytest.mark.parametrize("make", [torch.ones, torch.randn], ids=["ones", "random"])
    def test_rounding_of_another_machine(self, make):
        vectors = make(1, 2**24)
        _compare(torch.stack([_note("product", one, False) for one in (vectors, vectors * (1 + 4e-7))]), ROUNDING)


@pytest.mark.parametrize(("how", "timeout"), [("dies", LONG), pytest.param("sleeps", 20.0, marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_is_an_error_on_the_others(tmp_path, how, timeout):
    """One that dies at once, long before the timeout, for which `launch` would not wait."""
    found = launch(vanishing, 3, tmp_path, how, timeout)
    for message in (found[0], found[2]):
        assert message.startswith("process_group: another rank is gone, failed, or did not answer within the timeout")
    assert found[1] is None


class TestNoGroup:
    @pytest.mark.parametrize("group", ["world", 7])
    def test_not_initialised(self, group):
        assert not dist.is_initialized()
        with pytest.raises(RankError, match=r"process_group: .* is not initialised: call torch.distributed.init"):
            hessian(MLP(), MeanSquaredError(), [points()], process_group=group)

    def test_something_else(self, tmp_path):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
        try:
            with pytest.raises(RankError, match='got a list, expected "world" or a group'):
                hessian(MLP(), MeanSquaredError(), [points()], process_group=[0, 1])
            group, v = dist.group.WORLD, torch.ones(sum(p.numel() for p in MLP().parameters()), dtype=torch.float64)
            H = hessian(MLP(), MeanSquaredError(), [points()], process_group=group)
            assert H.method_of("up.weight") == hessian(MLP(), MeanSquaredError(), [points()]).method_of("up.weight")
            wrapped = DistributedDataParallel(MLP())
            with pytest.raises(ModelError, match=r"model: is wrapped in DistributedDataParallel; give model\.module"):
                hessian(wrapped, MeanSquaredError(), [points()], process_group="world")
            sharded = fully_shard(MLP(), mesh=init_device_mesh("cpu", (1,)))
            for hvp, close in (("autodiff", 1e-12), ("difference", 1e-8)):  # in this process, where hints are checked
                one = hessian(sharded, MeanSquaredError(), [points()], hvp=hvp)
                assert relative(one @ v, H @ v) < close
                for ask in (_trace, _norm, _largest, _nodes):
                    assert relative(ask(one.total), ask(H.total)) < 1e3 * close
        finally:
            dist.destroy_process_group()
        with pytest.raises(RankError, match="not initialised"):
            hessian(MLP(), MeanSquaredError(), [points()], process_group=group)
        with pytest.raises(RankError, match="whose process group is destroyed"):
            hessian(sharded, MeanSquaredError(), [points()])


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def _trace(operator):
    return torch.tensor(operator.trace(matvecs=8).value, dtype=torch.float64)


def _norm(operator):
    return torch.tensor(operator.frobenius_norm(matvecs=8).value, dtype=torch.float64)


def _largest(operator):
    return operator.eigenvalues(k=2).value


def _nodes(operator):
    return operator.density(matvecs=8, steps=2).nodes
