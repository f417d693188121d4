"""The monitor as a callback of Hugging Face's Trainer and of Lightning, each imported only when it is used."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from curvoscope.errors import MissingPackageError
from curvoscope.losses.objectives import LossFunction
from curvoscope.training.monitor import CurvatureMonitor


def callback(probe: Iterable[Any], loss_fn: LossFunction | None = None, **options: Any) -> Any:
    """A `transformers.TrainerCallback` that monitors the model of its Trainer.

    The monitor is made when training begins, so `logger="wandb"` finds the run that `report_to="wandb"` has started.

    Args:
        probe: the data to measure on, as the batches of `cv.hessian`: a list, or a `datasets.Dataset`.
        loss_fn: as in `cv.hessian`; None: the model's own loss.
        **options: those of `CurvatureMonitor`.

    Returns:
        The callback, for `Trainer(..., callbacks=[...])`; its `monitor` has the records, and is None before.

    Example:
        >>> import torch
        >>> from curvoscope.training import callback
        >>> from transformers import TrainerCallback
        >>> watching = callback([(torch.ones(1, 2), torch.ones(1, 1))], torch.nn.MSELoss(), every=50)
        >>> isinstance(watching, TrainerCallback), watching.monitor
        (True, None)
    """
    return _trainer_callback("callback", lambda model: CurvatureMonitor(model, loss_fn, probe, **options))


def trainer_callback(monitor: CurvatureMonitor) -> Any:
    """A `transformers.TrainerCallback` that steps a monitor after each optimizer step.

    The Trainer does not tell its callbacks the loss of a step: records have only the loss on the probe.

    Args:
        monitor: it watches the Trainer's optimizer from the first step to the last.

    Returns:
        The callback, for `Trainer(..., callbacks=[...])`.

    Example:
        >>> import torch
        >>> from curvoscope.training import CurvatureMonitor, trainer_callback
        >>> probe = [(torch.ones(1, 2), torch.ones(1, 1))]
        >>> callback = trainer_callback(CurvatureMonitor(torch.nn.Linear(2, 1), torch.nn.MSELoss(), probe))
        >>> from transformers import TrainerCallback
        >>> isinstance(callback, TrainerCallback)
        True
    """
    return _trainer_callback("trainer_callback", lambda model: monitor)


def _trainer_callback(name: str, monitor_of: Callable[[nn.Module], CurvatureMonitor]) -> Any:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingPackageError(name, "needs transformers: pip install 'curvoscope[hf]'") from error

    class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Watches the Trainer's optimizer from the first step to the last."""

        monitor: CurvatureMonitor | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.monitor is None:
                self.monitor = monitor_of(kwargs["model"])
            self.monitor.skip_to(state.global_step)
            self.monitor.watch(_inner(kwargs["optimizer"]))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.monitor is not None
            self.monitor.step()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.monitor is not None
            self.monitor.close()

    return HuggingFaceCallback()


def lightning_callback(monitor: CurvatureMonitor) -> Any:
    """A `lightning.pytorch.Callback` that steps the monitor after each optimizer step, for the first of the optimizers.

    The loss of a step is the mean over the batches whose gradients it accumulated.

    Args:
        monitor: it watches the first optimizer from the first batch to the last.

    Returns:
        The callback, for `lightning.Trainer(..., callbacks=[...])`.

    Example:
        >>> import torch
        >>> from curvoscope.training import CurvatureMonitor, lightning_callback
        >>> probe = [(torch.ones(1, 2), torch.ones(1, 1))]
        >>> callback = lightning_callback(CurvatureMonitor(torch.nn.Linear(2, 1), torch.nn.MSELoss(), probe))
        >>> from lightning.pytorch import Callback
        >>> isinstance(callback, Callback)
        True
    """
    try:
        from lightning.pytorch import Callback  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingPackageError(
            "lightning_callback", "needs lightning: pip install 'curvoscope[lightning]'"
        ) from error

    class LightningCallback(Callback):  # type: ignore[misc,unused-ignore]
        """Watches the first optimizer from the first batch to the last."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._made, self._losses = trainer.global_step, list[float]()
            monitor.skip_to(trainer.global_step)
            monitor.watch(_inner(trainer.optimizers[0]))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, Tensor):
                self._losses.append(float(loss))  # Lightning has divided it by the number of batches a step
            if trainer.global_step != self._made:
                monitor.step(sum(self._losses) if self._losses else None)
                self._made, self._losses = trainer.global_step, []

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor.close()

    return LightningCallback()


def _inner(optimizer: Any) -> Any:
    """The torch optimizer, which has the hooks, inside the wrappers that accelerate and Lightning put around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
