"""Hessians of models whose parameters are spread over processes (fully_shard): against the same model in one."""

import pytest
import torch
import torch.distributed as dist

from autodiff_cases import GPT, cross_entropy, points, tokens, truth
from curvoscope.curvature import CrossEntropy, MeanSquaredError, blocks_of, hessian
from curvoscope.distributed import sharded_model
from curvoscope.distributed.shards import gather
from curvoscope.estimate.space import Space
from distributed_workers import ROWS, launch, launched
from reference import relative
from sharded_workers import (
    Encoder,
    estimates,
    probes_of,
    ramp,
    random_numbers,
    sharded_answers,
    sharded_mistakes,
    sharded_vanishing,
    trapped,
    traps,
)

PARTS = ("total", "outer", "functional")
CASES = [  # rows of each rank, which modules are sharded, how products are made
    pytest.param(((7,), "layers", "autodiff"), marks=pytest.mark.slow),
    pytest.param(((3, 0, 2, 2), "layers", "autodiff"), marks=pytest.mark.slow),
    ((5, 2), "layers", "autodiff"),
    ((7, 0), "whole", "autodiff"),
    ((4, 3), "encoder", "autodiff"),
    pytest.param(((6, 1), "layers", "difference"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request):
    cuts, kind, hvp = request.param
    return *request.param, launched(sharded_answers, len(cuts), cuts, kind, hvp)


@pytest.fixture(scope="module")
def dense():
    model, (inputs, targets) = GPT(), tokens(ROWS)
    return truth(model, inputs, lambda F: cross_entropy(F, targets), blocks_of(model))


class TestSharded:
    def test_products(self, case, dense):
        _, kind, hvp, found = case
        v = ramp(len(dense.total))
        if kind == "encoder":  # nested autodiff through its layer norm and attention is that of the tests of autodiff
            H = hessian(Encoder().eval(), MeanSquaredError(), [points(ROWS)], method="autodiff")
            v = ramp(H.shape[0])
        for part in PARTS:
            expected = getattr(H, part) @ v if kind == "encoder" else getattr(dense, part) @ v
            for answer in found:
                close = relative(answer["products"][part], expected[answer["mine"]], expected)
                assert close < (1e-11 if hvp == "autodiff" else 1e-8), part

    def test_each_entry_lies_on_one_rank(self, case, dense):
        cuts, kind, _, found = case
        for answer in found:
            assert answer["length"] == len(answer["mine"])
        size = sum(blocks_of(Encoder()).sizes.values()) if kind == "encoder" else len(dense.total)
        numbers = torch.cat([answer["mine"] for answer in found]).sort().values
        assert torch.equal(numbers, torch.arange(size))
        uneven = 1.5 if len(cuts) > 1 else 1.0  # a vocabulary of 6 and 5 positions on 4 ranks
        assert max(answer["length"] for answer in found) <= uneven * size / len(cuts)

    def test_loss(self, case):
        _, kind, _, found = case
        if kind != "encoder":
            H = hessian(GPT(), CrossEntropy(), [tokens(ROWS)])
            for answer in found:
                assert relative(answer["loss"], torch.tensor([H.loss, H.terms])) < 1e-12

    def test_estimates_are_those_of_one_process(self, case, alone):
        _, kind, hvp, found = case
        for answer in found:
            assert set(answer["estimates"]) == (set(alone) if (kind, hvp) == ("layers", "autodiff") else set())
            for name, numbers in answer["estimates"].items():
                expected = torch.tensor(alone[name], dtype=torch.float64)
                assert relative(torch.tensor(numbers, dtype=torch.float64), expected) < 1e-9, name

    def test_all_ranks_say_the_same_to_the_bit(self, case):
        *_, found = case
        assert all(answer["estimates"] == found[0]["estimates"] for answer in found)

    def test_the_model_trains_as_before(self, case):
        *_, found = case
        assert all(answer["undisturbed"] for answer in found)


@pytest.fixture(scope="module")
def alone():
    return estimates(hessian(GPT(), CrossEntropy(), [tokens(ROWS)], method="autodiff"))


def test_parameters_are_gathered_once_for_all_products_if_they_fit(tmp_path, monkeypatch):
    """In this process, a group of one: three modules, each sharded on its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    gathered = []

    def counted(parts, shardings):
        gathered.append(len(parts))
        return gather(parts, shardings)

    monkeypatch.setattr(sharded_model, "gather", counted)
    try:
        model = trapped(1)
        fitting, frugal = (hessian(model, MeanSquaredError(), [points()], memory_limit=limit) for limit in (None, 1))
        v = torch.ones(fitting.shape[0], dtype=torch.float64)
        products = [H @ v for H in (fitting, frugal)]
        counts = []
        for H in (fitting, frugal):
            gathered.clear()
            products.append(H @ v)
            counts.append(len(gathered))
        assert counts[0] == 0 < counts[1]
        assert all(relative(product, products[0]) < 1e-12 for product in products)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [5, 133, 400])
def test_probes_are_the_numbers_of_one_process(tmp_path, size):
    whole = probes_of(Space(size))
    for rank, found in enumerate(launch(random_numbers, 2, tmp_path, size)):
        for numbers, expected in zip(found, whole, strict=True):
            assert torch.equal(numbers, expected[rank::2])


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    return launch(sharded_mistakes, 2, tmp_path_factory.mktemp("mistakes"))


class TestMistakes:
    @pytest.mark.parametrize(
        ("name", "kind", "argument", "said"),
        [
            ("blocks", "RankError", "blocks", "'down.weight' is missing on rank 1"),
            ("empty", "EmptyError", "batches", "no rank has any"),
            ("exact", "ModelError", "method", "sharded models"),
            ("dense", "RankError", "dense", "needs whole vectors"),
            ("diagonal", "RankError", "diagonal", "needs whole vectors"),
            ("eigenvalues", "RankError", "eigenvalues without k", "needs whole vectors"),
            ("to_scipy", "RankError", "to_scipy", "needs whole vectors"),
            ("calls", "RankError", "process_group", "rank 1 asked for another product than rank 0"),
            ("curvatures", "ModelError", "process_group", "runs in one process"),
            ("once", "SecondDerivativeError", "model", "use hvp='difference'"),
        ],
    )
    def test_on_all_ranks(self, mistakes, name, kind, argument, said):
        for answer in mistakes:
            assert answer[name][:2] == (kind, argument) and said in answer[name][2]

    @pytest.mark.parametrize(
        ("name", "kind", "said"),
        [
            ("nan", "NonFiniteError", "rank 1 failed with NonFiniteError: loss_fn: the loss is nan"),
            ("form", "BatchError", "rank 1 failed with BatchError"),
            ("length", "ShapeError", "rank 1 failed in a product"),
            ("vector", "NonFiniteError", "rank 1 failed in a product"),
        ],
    )
    def test_of_one_rank_told_to_the_others(self, mistakes, name, kind, said):
        other, own = (answer[name] for answer in mistakes)
        assert own[0] == kind
        assert other[:2] == ("RankError", "process_group") and said in other[2]

    @pytest.mark.parametrize("name", ["fine", "world", "after", "difference", "auto"])
    def test_what_is_right(self, mistakes, name):
        assert all(answer[name] is None for answer in mistakes)


@pytest.fixture(scope="module", name="trapped")
def _trapped(tmp_path_factory):
    return launch(traps, 2, tmp_path_factory.mktemp("traps"))


@pytest.mark.slow
class TestAModelThatFailsOnOneRank:
    """In the middle of a pass, where the others wait for its part of the parameters."""

    @pytest.mark.parametrize("name", ["autodiff forward", "difference forward", "at once"])
    def test_forward(self, trapped, name):
        assert trapped[1][name] == ("ValueError", None, "no tanh here")
        said = "process_group: rank 1 failed with ValueError: no tanh here"
        assert trapped[0][name] == ("RankError", "process_group", said)

    @pytest.mark.parametrize("name", ["autodiff backward", "difference backward", "kept"])
    def test_backward(self, trapped, name):
        assert trapped[1][name][0] == "ValueError"
        assert trapped[0][name][:2] == ("RankError", "process_group")
        assert "rank 1 failed with ValueError: no gradient here" in trapped[0][name][2]

    def test_the_group_goes_on(self, trapped):
        for answer in trapped:
            assert answer["autodiff after"] and answer["difference after"] and answer["kept after"] is True


@pytest.mark.parametrize(("how", "ranks"), [("dies", 2), pytest.param("killed", 4, marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_in_the_middle_is_an_error_on_the_others(tmp_path, how, ranks):
    found = launch(sharded_vanishing, ranks, tmp_path, how)
    assert found.pop(1) is None
    for message in found:  # long before the timeout of the group: `launch` would not wait for it
        assert message.startswith("process_group: another rank is gone, failed, or did not answer within the timeout")
