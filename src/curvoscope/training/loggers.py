"""Loggers: what takes the numbers of a monitor. Anything with `log(values, step)` is one; the tools that people use
become one here, each imported only when it is asked for by name."""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from curvoscope import checks
from curvoscope.errors import CurvoscopeError, MissingPackageError

_log = logging.getLogger(__name__)

_PROJECT = "curvoscope"  # in which `Tool.started` puts its runs
_STEP = "curvature/step"


class LoggerError(CurvoscopeError, RuntimeError):
    """An object that cannot log, or a tool without a run."""


class Logger(Protocol):
    """What takes numbers by name: the one method that a logger needs.

    Example:
        >>> import torch
        >>> from curvoscope.training import CurvatureMonitor
        >>> class Printed:
        ...     def log(self, values, step):
        ...         print(step, round(values["curvature/largest_eigenvalue"], 3))
        >>> probe = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.ones(2, 1))]
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> monitor = CurvatureMonitor(model, torch.nn.MSELoss(), probe, logger=Printed())
        >>> _ = monitor.step(lr=0.1)
        1 4.0
    """

    def log(self, values: dict[str, float], step: int) -> Any:
        """Take the values of a step.

        Args:
            values: numbers by name, all finite.
            step: the number of training steps so far.

        Returns:
            Anything; it is not used.
        """


def logger_of(given: Any) -> Logger:
    """The logger that was meant.

    Args:
        given: "wandb", "trackio" or "mlflow", or the module of that name: the run that the tool has under way. Or an
            object: a run of wandb or trackio, TensorBoard's SummaryWriter (`add_scalar`), a logger of Lightning
            (`log_metrics`), anything with `log(values, step)`.
    """
    if isinstance(given, ModuleType):
        given = given.__name__
    if isinstance(given, str):
        return tool_of(given).active()
    for method, logger in _BY_METHOD.items():
        if callable(getattr(given, method, None)):
            return logger(given)
    known = ", ".join(map(repr, TOOLS))
    raise LoggerError("logger", f"got a {type(given).__name__}, expected an object with log(values, step), or {known}")


# ---- objects that log in another way


class _Scalars:
    """TensorBoard's SummaryWriter takes one number at a time."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class _Metrics:
    """MLflow and the loggers of Lightning have another name for it."""

    def __init__(self, logger: Any, **options: str) -> None:
        self._logger, self._options = logger, options

    def log(self, values: dict[str, float], step: int) -> None:
        self._logger.log_metrics(values, step=step, **self._options)


class _OwnSteps:
    """A run of Weights & Biases drops what comes with an earlier step than its last, and what else logs to it may count
    in another way. So the step is a number of its own, the axis of all plots of curvature."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric(_STEP)
        run.define_metric("curvature/*", step_metric=_STEP)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, _STEP: step})


_BY_METHOD: dict[str, Callable[[Any], Logger]] = {
    "define_metric": _OwnSteps,
    "add_scalar": _Scalars,
    "log_metrics": _Metrics,
    "log": lambda logger: logger,
}


# ---- tools by name


class Tool:
    """A tool whose package is there: the run that it has under way, or a new one."""

    package = ""  # what is imported; by default what the tool is called
    begin = ""  # what starts a run, for an error

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self.api = importlib.import_module(self.package or name)
        except ImportError as error:
            install = f"pip install 'curvoscope[{name}]'"
            raise MissingPackageError("logger", f"{name!r} needs its package: {install}") from error

    def active(self) -> Logger:
        """The logger of the run under way."""
        run = self.under_way()
        if run is None:
            raise LoggerError("logger", f"{self.name} has no run under way; {self.begin}")
        return self.logger(run)

    @contextmanager
    def started(self, folder: Path, name: str, facts: Mapping[str, Any]) -> Iterator[Logger]:
        """The logger of a new run, which ends with the context. What the tool prints goes to stderr."""
        with redirect_stdout(sys.stderr):
            try:
                run = self.start(folder, name, facts)
            except Exception as error:
                raise LoggerError("logger", f"{self.name} cannot start a run: {error}") from error
        try:
            yield self.logger(run)
        finally:
            with redirect_stdout(sys.stderr):
                try:
                    self.finish(run)
                except Exception as error:  # what was measured is kept elsewhere
                    _log.warning("%s cannot end its run: %s", self.name, error)

    def under_way(self) -> Any:
        """The run under way, or None."""
        raise NotImplementedError

    def start(self, folder: Path, name: str, facts: Mapping[str, Any]) -> Any:
        """A new run; tools that keep files where they are told keep them in `folder`."""
        raise NotImplementedError

    def logger(self, run: Any) -> Logger:
        """What logs to a run."""
        return logger_of(run)

    def finish(self, run: Any) -> None:
        """End a run."""
        run.finish()


class _WandB(Tool):
    begin = "call wandb.init(project=...) first"

    def under_way(self) -> Any:
        return self.api.run

    def start(self, folder: Path, name: str, facts: Mapping[str, Any]) -> Any:
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        return self.api.init(project=project, name=name, dir=folder, config=dict(facts))


class _Trackio(Tool):
    begin = "call trackio.init(project=...) first"

    def under_way(self) -> Any:
        return self.api.context_vars.current_run.get()

    def start(self, folder: Path, name: str, facts: Mapping[str, Any]) -> Any:
        return self.api.init(project=_PROJECT, name=name, config=dict(facts), embed=False)

    def finish(self, run: Any) -> None:
        self.api.finish()


class _MLflow(Tool):
    begin = "call mlflow.start_run() first"

    def under_way(self) -> Any:
        return self.api.active_run()

    def start(self, folder: Path, name: str, facts: Mapping[str, Any]) -> Any:
        run = self.api.start_run(run_name=name)
        self.api.log_params(dict(facts))
        return run

    def logger(self, run: Any) -> Logger:
        return _Metrics(self.api, run_id=run.info.run_id)

    def finish(self, run: Any) -> None:
        self.api.end_run()


class _TensorBoard(Tool):
    package = "torch.utils.tensorboard"
    begin = "give a torch.utils.tensorboard.SummaryWriter(folder) instead of its name"

    def under_way(self) -> Any:
        return None

    def start(self, folder: Path, name: str, facts: Mapping[str, Any]) -> Any:
        return self.api.SummaryWriter(str(folder / self.name))

    def finish(self, run: Any) -> None:
        run.close()


TOOLS: dict[str, type[Tool]] = {
    "wandb": _WandB,
    "trackio": _Trackio,
    "mlflow": _MLflow,
    "tensorboard": _TensorBoard,
}


def tool_of(name: str) -> Tool:
    """The tool of that name."""
    checks.choice("logger", name, tuple(TOOLS))
    return TOOLS[name](name)
