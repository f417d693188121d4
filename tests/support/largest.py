"""How large the tensors get that a computation makes on its way."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The size of the largest storage behind any tensor that an operation returns, in numbers."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
        return found
