"""The monitor inside the training loops of transformers and Lightning, the real ones."""

import logging
import sys
from itertools import pairwise

import datasets
import pytest
import torch
import transformers
from torch import nn

from autodiff_cases import MLP, points
from curvoscope.curvature import CrossEntropy
from curvoscope.errors import MissingPackageError
from curvoscope.training import CurvatureMonitor, callback, lightning_callback, trainer_callback


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Weights(transformers.TrainerCallback):
    """All weights, before the first step and after each."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().double())

    on_step_end = on_train_begin


class TestTransformers:
    rows = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(0))
    probe = ({"input_ids": rows, "labels": rows},)
    data = datasets.Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})

    def model(self):
        torch.manual_seed(0)
        # dropout is on: what draws random numbers would show
        config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        return transformers.GPT2LMHeadModel(config)

    def trained(self, folder, model, callbacks, resume=None, **options):
        quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 99}
        sizes = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
        arguments = transformers.TrainingArguments(str(folder), **{**quiet, **sizes, **options})
        trainer = transformers.Trainer(model, arguments, train_dataset=self.data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return model.state_dict()

    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({}, id="plain"),
            pytest.param({"gradient_accumulation_steps": 2}, id="accumulated", marks=pytest.mark.slow),
        ],
    )
    def test_the_same_to_the_bit(self, tmp_path, options):
        plain = self.trained(tmp_path, self.model(), [], **options)
        model, weights = self.model(), Weights()
        monitor = CurvatureMonitor(model, CrossEntropy(shift=True), self.probe, every=1, budget=1.0, matvecs=8)
        assert same(plain, self.trained(tmp_path, model, [trainer_callback(monitor), weights], **options))
        assert [record.step for record in monitor.records] == [1, 2] and monitor.incidents == []
        first = monitor.records[0]
        assert first.critical_sharpness is not None and "h.0.attn" in first.attention
        # linear decay to zero after two steps; the Trainer has moved the scheduler on before its callbacks are asked
        assert [record.lr for record in monitor.records] == pytest.approx([1e-3, 5e-4])
        moves = [float((after - before).norm()) for before, after in pairwise(weights.seen)]
        assert [record.update.length for record in monitor.records] == pytest.approx(moves)

    @pytest.mark.slow
    def test_a_monitor_of_its_own_logs_to_the_run_of_the_trainer(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow

        watching = callback(self.data.select(range(4)), every=1, budget=1.0, matvecs=8, logger="mlflow")
        self.trained(tmp_path, self.model(), [watching], report_to=["mlflow"], logging_steps=1)
        (run,) = mlflow.MlflowClient().search_runs(["0"])
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "curvature/largest_eigenvalue")
        found = [(record.step, record.largest_eigenvalue.value) for record in watching.monitor.records]
        assert [(point.step, point.value) for point in history] == found and len(found) == 2
        assert "loss" in run.data.metrics or "train_loss" in run.data.metrics  # what the Trainer logs

    def test_a_resumed_training_counts_on(self, tmp_path):
        self.trained(tmp_path, self.model(), [], max_steps=1, save_strategy="steps", save_steps=1)
        watching = callback(self.probe, every=1, budget=1.0, matvecs=8)
        self.trained(tmp_path, self.model(), [watching], resume=str(tmp_path / "checkpoint-1"))
        assert [record.step for record in watching.monitor.records] == [2]

    @pytest.mark.parametrize("make", [lambda: trainer_callback(small()), lambda: callback([])], ids=["given", "own"])
    def test_without_the_package(self, monkeypatch, make):
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingPackageError, match=r"transformers.*curvoscope\[hf\]"):
            make()


def small():
    x, y = points(8)
    return CurvatureMonitor(MLP(nn.Tanh), nn.functional.mse_loss, [(x, y)], every=1, budget=1.0)


class TestLightning:
    def trained(self, tmp_path, watched, **options):
        lightning = pytest.importorskip("lightning")
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.inner, self.drop, self.losses = MLP(nn.Tanh), nn.Dropout(0.3), []

            def training_step(self, batch, index):
                x, y = batch
                loss = nn.functional.mse_loss(self.drop(self.inner(x)), y)
                self.losses.append(float(loss.detach()))
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=0.05)

        x, y = points(8)
        module = Module()
        monitor = CurvatureMonitor(module.inner, nn.functional.mse_loss, [(x, y)], every=1, budget=1.0)
        torch.manual_seed(1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2, shuffle=True)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[lightning_callback(monitor)] if watched else [],
            **options,
        )
        trainer.fit(module, loader)
        return module, monitor, torch.get_rng_state()

    @pytest.mark.slow
    def test_the_same_to_the_bit(self, tmp_path):
        plain, _, state = self.trained(tmp_path, False)
        watched, monitor, after = self.trained(tmp_path, True)
        assert same(plain.state_dict(), watched.state_dict()) and torch.equal(state, after)
        assert [record.step for record in monitor.records] == list(range(1, 9)) and monitor.incidents == []
        assert [record.loss for record in monitor.records] == pytest.approx(watched.losses)
        assert all(record.lr == 0.05 for record in monitor.records)
        assert any(record.critical_sharpness is not None for record in monitor.records)

    def test_accumulated_gradients_are_one_step(self, tmp_path):
        module, monitor, _ = self.trained(tmp_path, True, accumulate_grad_batches=2)
        assert [record.step for record in monitor.records] == [1, 2, 3, 4] and monitor.incidents == []
        means = [(a + b) / 2 for a, b in zip(module.losses[::2], module.losses[1::2], strict=True)]
        assert [record.loss for record in monitor.records] == pytest.approx(means)

    def test_without_the_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "lightning", None)
        monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
        with pytest.raises(MissingPackageError, match=r"lightning.*curvoscope\[lightning\]"):
            lightning_callback(small())
