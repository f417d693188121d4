"""Targets of a head: their form and the loss; drawn at random, drawn from the model, or read from a file."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from curvoscope.errors import RangeError, ShapeError
from curvoscope.families import text
from curvoscope.losses import MSE, CrossEntropy, Objective
from curvoscope.losses.objectives import BinaryCrossEntropy

RANDOM, SAMPLED = "random", "sampled"


class TargetForm(ABC):
    """The form of targets (N, ...), and the loss that goes with it; `noun` says what is predicted."""

    noun: str
    loss: Objective

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    @abstractmethod
    def random(self, generator: torch.Generator) -> Tensor:
        """Targets that have nothing to do with the inputs."""

    @abstractmethod
    def sampled(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Targets drawn from the distribution that the outputs stand for, whose negative log-likelihood the loss is."""

    @abstractmethod
    def checked(self, numbers: Tensor) -> Tensor:
        """Numbers of a file as targets."""

    def read(self, path: Path) -> Tensor:
        """The targets in a file: a line of numbers for each row of the batch."""
        lines = [line.split() for line in text.read(path, "targets").splitlines() if line.strip()]
        rows, width = self.shape[0], torch.Size(self.shape[1:]).numel()
        if len(lines) < rows or any(len(line) != width for line in lines[:rows]):
            seen = f"{len(lines)} lines of {', '.join(sorted({str(len(line)) for line in lines}))} numbers"
            raise ShapeError("targets", f"{path} has {seen}, expected {rows} lines of {width}")
        try:
            numbers = torch.tensor([[float(word) for word in line] for line in lines[:rows]], dtype=torch.float64)
        except ValueError as error:
            raise RangeError("targets", f"{path} contains something other than numbers: {error}") from error
        return self.checked(numbers.view(self.shape))


class Classes(TargetForm):
    """One class out of several. `shift`: position t predicts the target of position t + 1."""

    def __init__(self, shape: tuple[int, ...], classes: int, noun: str | None = None, shift: bool = False) -> None:
        super().__init__(shape)
        self.classes, self._shift, self.loss = classes, shift, CrossEntropy(shift=shift)
        self.noun = f"Cross-entropy of {noun or f'{classes} classes'}"

    def random(self, generator: torch.Generator) -> Tensor:
        """Uniform."""
        return torch.randint(0, self.classes, self.shape, generator=generator)

    def sampled(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """From the softmax of the outputs."""
        probabilities = outputs.double().softmax(-1).flatten(0, -2)
        found = torch.multinomial(probabilities, 1, generator=generator).view(self.shape)
        return found.roll(1, 1) if self._shift else found

    def checked(self, numbers: Tensor) -> Tensor:
        """Integers below the number of classes."""
        wrong = (numbers != numbers.round()) | (numbers < 0) | (numbers >= self.classes)
        if bool(wrong.any()):
            seen = f"{float(numbers[wrong][0]):g}"
            raise RangeError("targets", f"got {seen}, expected classes from 0 to {self.classes - 1}")
        return numbers.long()


class Spans(Classes):
    """The first and the last token of an answer, (N, 2): the classes are places."""

    def __init__(self, rows: int, length: int) -> None:
        super().__init__((rows, 2), length, "the first and the last token of an answer")

    def random(self, generator: torch.Generator) -> Tensor:
        """Two places, the first one first."""
        return super().random(generator).sort(1).values


class Bits(TargetForm):
    """Any number of classes at once, (N, classes), each 0 or 1."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.noun, self.loss = f"Binary cross-entropy of {shape[-1]} labels", BinaryCrossEntropy()

    def random(self, generator: torch.Generator) -> Tensor:
        """Each with probability 1/2."""
        return torch.randint(0, 2, self.shape, generator=generator).float()

    def sampled(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """With the probabilities sigmoid(outputs)."""
        return torch.bernoulli(outputs.double().sigmoid(), generator=generator).float()

    def checked(self, numbers: Tensor) -> Tensor:
        """0 or 1."""
        if not bool(((numbers == 0) | (numbers == 1)).all()):
            raise RangeError("targets", "expected 0 or 1 for each label")
        return numbers.float()


class Numbers(TargetForm):
    """Regression, (N, outputs): the mean square."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.noun, self.loss = f"Mean squared error of {shape[-1]} numbers", MSE()

    def random(self, generator: torch.Generator) -> Tensor:
        """Standard normal."""
        return torch.randn(self.shape, generator=generator)

    def sampled(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Normal around the outputs with variance 1/2: exp(-(f - y)^2) is their density."""
        return outputs.detach().cpu() + 0.5**0.5 * torch.randn(self.shape, generator=generator).to(outputs.dtype)

    def checked(self, numbers: Tensor) -> Tensor:
        """Any finite numbers."""
        if not bool(numbers.isfinite().all()):
            raise RangeError("targets", "expected finite numbers")
        return numbers.float()
