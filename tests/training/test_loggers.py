"""Loggers with the real libraries: what they stored is read back and compared with the numbers of the records."""

import csv
import io
import sys
import uuid

import pytest
import torch
from torch import nn

from autodiff_cases import MLP, points
from curvoscope.errors import MissingPackageError, RangeError
from curvoscope.training import CurvatureMonitor
from curvoscope.training.loggers import TOOLS, LoggerError, tool_of
from wandb_files import history


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Nothing leaves the test's folder, nor the machine."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(name, value)


def trained(logger):
    """A monitor of two watched steps."""
    (x, y), model = points(8), MLP(nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = CurvatureMonitor(model, nn.functional.mse_loss, [(x, y)], every=1, budget=1.0, matvecs=8, logger=logger)
    monitor.watch(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert monitor.incidents == [] and all(record.update for record in monitor.records)
    return monitor


def numbers(monitor):
    """What must be stored, by step and name."""
    records = [(record.step, record.scalars()) for record in monitor.records]
    found = {(step, f"curvature/{name}"): value for step, values in records for name, value in values.items()}
    assert {step for step, _ in found} == {1, 2} and len(found) > 40
    return found


class TestWhatTheLibrariesStored:
    @pytest.mark.slow
    def test_wandb(self, tmp_path):
        with tool_of("wandb").started(tmp_path, "first", {"lr": 0.1}):
            import wandb

            wandb.log({"train/loss": 1.0}, step=50)  # a step that is later than all of ours
            monitor = trained("wandb")
        assert wandb.run is None
        wandb.teardown()  # waits for the process that writes
        rows = [(row["curvature/step"], row) for row in history(tmp_path) if "curvature/step" in row]
        stored = {(step, name): row[name] for step, row in rows for name in row if name.startswith("curvature/")}
        steps = {(step, "curvature/step"): step for step in (1, 2)}
        assert stored == numbers(monitor) | steps

    def test_trackio(self, tmp_path, capsys):
        name = uuid.uuid4().hex  # trackio keeps the folder that it was imported with
        with tool_of("trackio").started(tmp_path, name, {"lr": 0.1}):
            monitor = trained("trackio")
        from trackio.sqlite_storage import SQLiteStorage

        rows = SQLiteStorage.get_logs("curvoscope", name)
        stored = {(row["step"], key): row[key] for row in rows for key in row if key.startswith("curvature/")}
        assert stored == numbers(monitor)
        assert SQLiteStorage.get_run_config("curvoscope", name)["lr"] == 0.1
        assert capsys.readouterr().out == ""

    @pytest.mark.slow
    def test_mlflow(self, tmp_path):
        with tool_of("mlflow").started(tmp_path, "first", {"lr": 0.1}):
            import mlflow

            monitor = trained("mlflow")
            run = mlflow.active_run().info.run_id
        client = mlflow.MlflowClient()
        found = client.get_run(run).data
        history = [point for name in found.metrics for point in client.get_metric_history(run, name)]
        assert {(point.step, point.key): point.value for point in history} == numbers(monitor)
        assert found.params == {"lr": "0.1"}
        assert mlflow.active_run() is None

    def test_tensorboard(self, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        with tool_of("tensorboard").started(tmp_path, "first", {}) as logger:
            monitor = trained(logger)
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        tags = events.Tags()["scalars"]
        stored = {(event.step, name): event.value for name in tags for event in events.Scalars(name)}
        assert stored == pytest.approx(numbers(monitor), rel=1e-6)  # it keeps single precision

    @pytest.mark.slow
    def test_a_logger_of_lightning(self, tmp_path):
        from lightning.pytorch.loggers import CSVLogger

        logger = CSVLogger(tmp_path)
        monitor = trained(logger)
        logger.save()
        (path,) = tmp_path.rglob("metrics.csv")
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
        stored = {(int(row["step"]), name): float(row[name]) for row in rows for name in row if name != "step"}
        assert stored == numbers(monitor)

    def test_an_object_of_ones_own(self):
        class Kept(list):
            def log(self, values, step):
                self.append((step, values))

        kept = Kept()
        monitor = trained(kept)
        assert {(step, name): value for step, values in kept for name, value in values.items()} == numbers(monitor)


@pytest.mark.parametrize("name", TOOLS)
def test_without_the_package(name, monkeypatch):
    monkeypatch.setitem(sys.modules, TOOLS[name].package or name, None)
    install = rf"pip install 'curvoscope\[{name}\]'"
    with pytest.raises(MissingPackageError, match=f"^logger: '{name}' needs its package: {install}"):
        trained(name)


@pytest.mark.parametrize("name, cure", [(name, tool.begin) for name, tool in TOOLS.items()])
def test_without_a_run(name, cure):
    with pytest.raises(LoggerError) as raised:
        trained(name)
    assert str(raised.value) == f"logger: {name} has no run under way; {cure}"


def test_a_module_is_its_name():
    import trackio

    with pytest.raises(LoggerError, match=r"trackio\.init\(project=\.\.\.\) first"):
        trained(trackio)


def test_what_cannot_log():
    with pytest.raises(LoggerError, match=r"^logger: got a int, expected an object with log\(values, step\), or "):
        trained(3)
    with pytest.raises(RangeError, match=r"^logger: got 'comet', expected one of 'wandb', 'trackio', 'mlflow'"):
        trained("comet")


def test_a_run_that_cannot_start(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    started = tool_of("tensorboard").started(tmp_path, "first", {})
    with pytest.raises(LoggerError, match=r"^logger: tensorboard cannot start a run: "):
        started.__enter__()
