"""What can go wrong, one class a kind. Each error names the argument, the value seen and what to do."""


class CurvoscopeError(Exception):
    """Base of all errors of this package. `argument` is the name of what was wrong."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument


class ShapeError(CurvoscopeError, ValueError):
    """Sizes that do not fit together."""


class EmptyError(CurvoscopeError, ValueError):
    """No tokens, no sequences, no blocks: nothing to compute."""


class DtypeError(CurvoscopeError, TypeError):
    """A tensor that is not floating point, or dtypes that differ."""


class DeviceError(CurvoscopeError, ValueError):
    """Tensors on different devices."""


class NonFiniteError(CurvoscopeError, ValueError):
    """NaN or infinity, in the input or out of the computation."""


class RangeError(CurvoscopeError, ValueError):
    """A number, an index or a choice outside what is allowed."""


class MaskError(CurvoscopeError, ValueError):
    """A mask that leaves a query without keys, or of the wrong kind."""


class LossError(CurvoscopeError, ValueError):
    """A loss that is not a scalar, or cannot be differentiated twice."""


class BlockNameError(CurvoscopeError, KeyError):
    """A block name that does not exist."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr of the message


class ModelError(CurvoscopeError, ValueError):
    """A model that cannot do what is asked of it: a parameter is missing, frozen or not initialised, a closed form is
    not known, or a saved state is that of another model."""


class MemoryLimitError(CurvoscopeError, MemoryError):
    """A computation larger than the memory at hand, refused before it starts. `needed`: the bytes it would take."""

    def __init__(self, argument: str, message: str, needed: int) -> None:
        super().__init__(argument, message)
        self.needed = needed
