"""The request of a command: which model, and which data."""

from dataclasses import dataclass
from pathlib import Path

from curvoscope.errors import RangeError
from curvoscope.families.loading import task_of

ADDITION = "addition"
_OF_ADDITION = {"sequences": 64, "dtype": "float64", "d": 16, "norm": "none", "attention": "softmax"}


@dataclass(frozen=True)
class Request:
    """What decides the model and its batch. The names are those of the options; None: what suits the model.

    `d`, `norm` and `attention` are of the model "addition", which has defaults for them. `task`: what a folder's model
    predicts; `targets`: "random", "sampled" from the model's predictions, or a file.
    """

    model: str
    seed: int
    text: str | None = None
    sequences: int | None = None
    length: int | None = None
    dtype: str | None = None
    d: int | None = None
    norm: str | None = None
    attention: str | None = None
    task: str | None = None
    targets: str | None = None

    def __post_init__(self) -> None:
        for name, value in _OF_ADDITION.items():
            if self.model == ADDITION and getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("d", "norm", "attention"):
            if self.model != ADDITION and getattr(self, name) is not None:
                raise RangeError(name, f"applies to {ADDITION} only; leave --{name} out")
        if self.task is not None:
            task_of(self.task)

    @property
    def name(self) -> str:
        """The model as titles and sentences name it: of a path, its last part."""
        return Path(self.model).absolute().name
