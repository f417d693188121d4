"""What can go wrong, one class per kind. Each error names the argument, the value seen and what to do."""


class CurvoscopeError(Exception):
    """Base class of all errors of this package; `argument` is the name of the argument at fault."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument


class ShapeError(CurvoscopeError, ValueError):
    """Shapes do not fit together."""


class EmptyError(CurvoscopeError, ValueError):
    """There are no tokens, sequences or blocks: nothing to compute."""


class DtypeError(CurvoscopeError, TypeError):
    """A tensor is not floating point, or dtypes differ."""


class DeviceError(CurvoscopeError, ValueError):
    """Tensors are on different devices."""


class NonFiniteError(CurvoscopeError, ValueError):
    """The input or the result of a computation contains NaN or infinity."""


class RangeError(CurvoscopeError, ValueError):
    """A number, an index or a choice is outside its allowed range."""


class MaskError(CurvoscopeError, ValueError):
    """A mask leaves a query without keys, or is of the wrong kind."""


class LossError(CurvoscopeError, ValueError):
    """A loss is not a scalar, or cannot be differentiated twice."""


class BlockNameError(CurvoscopeError, KeyError):
    """A block name does not exist."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr of the message


class ModelError(CurvoscopeError, ValueError):
    """A model cannot do what is asked: a parameter is missing or frozen, a closed form is not known, ..."""


class MissingPackageError(CurvoscopeError, ImportError):
    """A package must be installed first."""


class ChangedWeightsError(CurvoscopeError, RuntimeError):
    """The weights of a model have changed since its Hessian was made, which shares them."""


class SingularError(CurvoscopeError, ValueError):
    """A damped matrix has an eigenvalue 0; `direction` is the eigenvector (n,)."""

    def __init__(self, argument: str, message: str, direction: object) -> None:
        super().__init__(argument, message)
        self.direction = direction


class ConvergenceError(CurvoscopeError, RuntimeError):
    """An iteration did not reach its tolerance; `solution` is the best that was found."""

    def __init__(self, argument: str, message: str, solution: object) -> None:
        super().__init__(argument, message)
        self.solution = solution


class MemoryLimitError(CurvoscopeError, MemoryError):
    """A computation needs more memory than is allowed and is not started; `needed` is the number of bytes."""

    def __init__(self, argument: str, message: str, needed: int) -> None:
        super().__init__(argument, message)
        self.needed = needed


class CompileWarning(UserWarning):
    """Products were to be compiled, and are computed without: the same numbers, not as fast."""
