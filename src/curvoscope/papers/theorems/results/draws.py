"""Random numbers that the checks share."""

import torch
from torch import Tensor


class Draw:
    """A reproducible source of standard normal float64 tensors."""

    def __init__(self, *seeds: int) -> None:
        # A polynomial in the parts keeps draws of different sizes and purposes apart.
        key = sum((part + 1) * 1009**place for place, part in enumerate(seeds))
        self.generator = torch.Generator().manual_seed(key % 2**63)

    def normal(self, *shape: int) -> Tensor:
        """Independent standard normal entries."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def integer(self, low: int, high: int) -> int:
        """Uniform from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def labels(self, count: int, classes: int) -> Tensor:
        """Class labels, one per token."""
        return torch.randint(classes, (count,), generator=self.generator)
