"""Hugging Face datasets as batches: the same numbers as from lists of tensors."""

import datasets
import pytest
import torch
import transformers
from torch import nn

import curvoscope as cv
from autodiff_cases import MLP, points
from curvoscope.autodiff.batches import BatchError, Batches, dataset_batches
from reference import normal, relative

LENGTHS = (5, 5, 3, 5)


class Named(nn.Module):
    """Regression from the column "x"."""

    def __init__(self):
        super().__init__()
        self.inner = MLP(nn.Tanh)

    def forward(self, x):
        return self.inner(x)


def regression(rows=6):
    x, y = points(rows)
    return datasets.Dataset.from_dict({"x": x.tolist(), "labels": y.tolist(), "text": ["a word"] * rows}), x, y


class TestTheSameNumbers:
    """Six rows are one batch, so even what draws batches must be equal to the bit."""

    dataset, x, y = regression()
    both = (dataset, [{"x": x, "labels": y}])

    def test_hessian(self):
        ours, theirs = (cv.hessian(Named(), nn.MSELoss(), data) for data in self.both)
        v = normal(0)(ours.shape[0])
        assert torch.equal(ours @ v, theirs @ v)

    def test_sweep(self):
        ours, theirs = (cv.sweep(Named(), nn.MSELoss(), data, samples=4) for data in self.both)
        assert [ours.trace(name) for name in ours.names] == [theirs.trace(name) for name in theirs.names]

    def test_sensitivity(self):
        int4 = cv.analysis.recipes.int4
        ours, theirs = (cv.analysis.sensitivity(Named(), nn.MSELoss(), data, int4) for data in self.both)
        assert ours.rows == theirs.rows and ours.measured == theirs.measured

    def test_influence(self):
        scores = (cv.analysis.influence(Named(), nn.MSELoss(), one, one, damping=0.1).scores for one in self.both)
        ours, theirs = scores
        assert torch.equal(ours, theirs) and ours.shape == (6, 6)

    def test_monitor(self):
        ours, theirs = (
            cv.training.CurvatureMonitor(Named(), nn.MSELoss(), data).measure(lr=0.1, details=False)
            for data in self.both
        )
        assert ours.largest_eigenvalue == theirs.largest_eigenvalue and ours.probe_loss == theirs.probe_loss


def test_rows_of_different_lengths():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    words = torch.randint(0, 11, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).split(LENGTHS)
    lists = [one.tolist() for one in words]
    dataset = datasets.Dataset.from_dict({"input_ids": lists, "labels": lists})
    rows = [{"input_ids": one[None], "labels": one[None]} for one in words]
    ours, theirs = (cv.hessian(model, None, data) for data in (dataset, rows))
    v = normal(0)(ours.shape[0])
    assert ours.terms == theirs.terms == sum(LENGTHS) - len(LENGTHS)
    assert relative(ours @ v, theirs @ v) < 1e-12
    assert [len(batch["labels"]) for batch in dataset_batches(dataset)] == [2, 1, 1]


class TestForms:
    def test_many_rows_are_cut_and_keep_their_order(self):
        found = dataset_batches(datasets.Dataset.from_dict({"x": list(range(70)), "labels": [0.5] * 70}))
        assert [len(one["x"]) for one in found] == [32, 32, 6]
        assert torch.cat([one["x"] for one in found]).tolist() == list(range(70))

    def test_columns(self):
        (found,) = dataset_batches(datasets.Dataset.from_dict({"x": [[0.1, 0.2]], "label": [3], "text": ["a word"]}))
        assert found.keys() == {"x", "labels"}
        assert found["x"].tolist() == [[0.1, 0.2]] and found["x"].dtype == torch.float64  # no digit is lost
        assert found["labels"].tolist() == [3] and found["labels"].dtype == torch.int64

    @pytest.mark.parametrize(
        "change",
        [
            lambda one: one.with_format("torch", columns=["x", "labels"], dtype=torch.float64),
            lambda one: one.with_format("numpy", columns=["x", "labels"], dtype="float64"),
            lambda one: one.to_iterable_dataset(),
            lambda one: one.with_transform(lambda rows: {"x": torch.tensor(rows["x"]), "labels": rows["labels"]}),
        ],
        ids=["torch", "numpy", "iterable", "transform"],
    )
    def test_formats(self, change):
        dataset, x, y = regression()
        (found,) = dataset_batches(change(dataset))
        assert found.keys() == {"x", "labels"}
        assert torch.equal(found["labels"], y) and relative(found["x"], x) < 1e-6  # a transform has its own precision

    def test_empty(self):
        with pytest.raises(cv.errors.EmptyError, match=r"^batches: there are none"):
            Batches(datasets.Dataset.from_dict({"x": [], "labels": []}))


class TestErrors:
    def test_several_datasets(self):
        both = datasets.DatasetDict(train=regression()[0], test=regression()[0])
        with pytest.raises(BatchError, match=r"^batches: got one DatasetDict; choose one of train, test$"):
            Batches(both)

    def test_no_labels(self):
        with pytest.raises(BatchError, match=r"^batches: batch 0 is a dict without 'labels', it has x"):
            Batches(regression()[0].remove_columns("labels"))

    @pytest.mark.parametrize("value", [[[1], [1, 2]], None, {"a": 1}], ids=["ragged", "none", "dict"])
    def test_no_numbers(self, value):
        dataset = datasets.Dataset.from_dict({"x": [value], "labels": [1]})
        with pytest.raises(
            BatchError,
            match=r"^batches: column 'x' of row 0 is not an array of numbers.*dataset\.remove_columns\('x'\)",
        ):
            Batches(dataset)

    def test_a_column_that_the_model_does_not_take(self):
        dataset = regression()[0].add_column("row", list(range(6)))
        for loss in (nn.MSELoss(), None):
            with pytest.raises(BatchError, match=r"^batches: the model takes no 'row'; leave it out of the batches"):
                cv.hessian(Named(), loss, dataset)
