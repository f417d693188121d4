"""What an estimator returns: a number or a vector with its standard error, its cost and its method."""

import html
import math
from collections.abc import Iterator
from typing import Any, NoReturn, SupportsIndex, TypeVar

import scipy
import torch
from torch import Tensor

from curvoscope import checks

_SYMMETRIC = 1e-4  # a skewness below this is none
_FIELDS = ("stderr", "matvecs", "method", "degrees", "skewness", "power")


class Estimate(float):
    """A number with its standard error, its cost in matrix-vector products, and its method.

    It is a `float`: arithmetic, comparison, formatting, `json` and numpy treat it as one, and give plain numbers. Every
    number that a block answers is an Estimate; an exact one has `stderr` 0 and `exact` True.

    The last three fields give `interval` its shape when the sample is small. `degrees` are the degrees of freedom of
    the standard error; `skewness` is that of the distribution of the estimate (quadratic forms of few large eigenvalues
    are as skew as χ²); `power` is 2 for the root of an estimated square, whose interval is the root of the square's.

    Args:
        value: the number.
        stderr: its standard error.
        matvecs: matrix-vector products that it took.
        method: how it was found; "exact" for a number without an error.
        degrees: degrees of freedom of `stderr`.
        skewness: of the distribution of the estimate.
        power: 2 for a square root, otherwise 1.

    Example:
        >>> import curvoscope as cv
        >>> norm = cv.Estimate(2.0, 0.1, 64, "hutchinson")
        >>> print(norm, norm.exact, norm + 1, f"{norm:.2f}")
        2 ± 0.1 False 3.0 2.00
        >>> [round(end, 3) for end in norm.interval(0.95)]
        [1.804, 2.196]
    """

    __slots__ = _FIELDS

    stderr: float
    matvecs: int
    method: str
    degrees: float
    skewness: float
    power: float

    def __new__(
        cls,
        value: float,
        stderr: float = 0.0,
        matvecs: int = 0,
        method: str = "exact",
        degrees: float = math.inf,
        skewness: float = 0.0,
        power: float = 1.0,
    ) -> "Estimate":
        """By default an exact number."""
        self = super().__new__(cls, value)
        for name, field in zip(_FIELDS, (stderr, matvecs, method, degrees, skewness, power), strict=True):
            object.__setattr__(self, name, field)
        return self

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"cannot set {name!r}: an Estimate does not change")

    def __reduce__(self) -> tuple[type["Estimate"], tuple[Any, ...]]:
        return Estimate, (self.value, *(getattr(self, name) for name in _FIELDS))

    @property
    def value(self) -> float:
        """The number as a plain float."""
        return float(self)

    @property
    def exact(self) -> bool:
        """Whether the number has no error but rounding."""
        return self.method == "exact"

    def __str__(self) -> str:
        return float.__repr__(self) if self.exact else f"{self.value:.4g} ± {self.stderr:.1g}"

    def __repr__(self) -> str:
        return f"Estimate({self}, {self._cost()})"

    def __format__(self, spec: str) -> str:
        """The value in the format of a number; without a format, the value and its standard error."""
        return format(self.value, spec) if spec else str(self)

    def __rich__(self) -> object:
        from rich.text import Text

        return Text.assemble(str(self), (f" ({self._cost()})", "dim"))

    def _repr_html_(self) -> str:
        return f"<span>{self} <small>({html.escape(self._cost())})</small></span>"

    def _cost(self) -> str:
        return f"{self.method}, {self.matvecs:,} products" if self.matvecs else self.method

    def facts(self) -> dict[str, Any]:
        """All fields by name, the value first: `Estimate(**facts)` is the same Estimate."""
        return {"value": self.value, **{name: getattr(self, name) for name in _FIELDS}}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        """For pydantic: an Estimate is read from its `facts`, of which the last three may be missing."""
        from pydantic_core import core_schema as of

        kinds = {"value": of.float_schema(), "matvecs": of.int_schema(), "method": of.str_schema()}
        needed = ("value", "stderr", "matvecs", "method")
        fields = {
            name: of.typed_dict_field(kinds.get(name, of.float_schema()), required=name in needed)
            for name in ("value", *_FIELDS)
        }
        return of.no_info_after_validator_function(lambda facts: cls(**facts), of.typed_dict_schema(fields))

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The two ends of the confidence interval.

        The estimate x of μ is taken as μ + σ sqrt(ν/2) (χ²_ν/ν - 1), a law of mean μ, standard deviation σ and skewness
        sqrt(8/ν): normal for ν → ∞, exact for one dominant eigenvalue, where ν is the number of probes. There the
        standard error s is as large as the deviation: s = σ χ²_ν/ν. So μ = x - s sqrt(ν/2) (1 - ν/χ²_ν), a pivot. Both
        ends are widened by the ratio of Student's to normal quantiles, for an s that is itself an estimate.

        Args:
            level: the probability that the interval holds the true number, between 0 and 1.

        Returns:
            The lower and the upper end; both are the value if it is exact.
        """
        checks.probability("level", level)
        below, above = _reach(level, self.degrees, abs(self.skewness))
        if self.skewness < 0:
            below, above = above, below
        if self.power == 1 or not self.value:
            return self.value - below * self.stderr, self.value + above * self.stderr
        power, relative = self.power, self.power * self.stderr / self.value  # of the square
        low, high = max(1 - below * relative, 0.0), 1 + above * relative
        return self.value * low ** (1 / power), self.value * high ** (1 / power)

    def root(self) -> "Estimate":
        """The square root, its standard error by the delta method: se(sqrt m) = se(m) / (2 sqrt m)."""
        root = max(self.value, 0.0) ** 0.5
        stderr = self.stderr / (2 * root) if root else self.stderr**0.5
        return Estimate(root, stderr, self.matvecs, self.method, self.degrees, self.skewness, 2 * self.power)

    def checked(self, question: str) -> "Estimate":
        """Check that value and error are finite and return the estimate.

        Args:
            question: the name of the number, for the error message.

        Returns:
            The same Estimate; raises `NonFiniteError` if its value or standard error is NaN or infinite.
        """
        checks.finite(question, self.value)
        checks.finite(question, self.stderr)
        return self

    def scaled(self, factor: float) -> "Estimate":
        """The estimate of a positive multiple.

        Args:
            factor: a positive number.

        Returns:
            An Estimate with value and standard error multiplied by the factor, and the other fields unchanged.
        """
        return Estimate(**self.facts() | {"value": self * factor, "stderr": self.stderr * factor})


Vector = TypeVar("Vector", bound="EstimatedVector")


class EstimatedVector(Tensor):
    """A vector (n,) of numbers, each with a standard error.

    It is a tensor: operations treat it as one, and give plain tensors. An index or a loop gives an `Estimate`.

    Attributes:
        value: the numbers as a plain tensor (n,).
        stderr: their standard errors (n,); 0 if exact.
        matvecs: matrix-vector products that they took together.
        method: how they were found; "exact" for numbers without an error.
        degrees: degrees of freedom of the standard errors.
    """

    stderr: Tensor
    matvecs: int
    method: str
    degrees: float

    # as for nn.Parameter: results of operations are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls: type[Vector],
        value: Tensor,
        stderr: Tensor | None = None,
        matvecs: int = 0,
        method: str = "exact",
        degrees: float = math.inf,
        **others: Any,
    ) -> Vector:
        """By default exact numbers; `others` are attributes of a subclass."""
        self = Tensor._make_subclass(cls, value.detach())
        known = {"stderr": torch.zeros_like(self.value) if stderr is None else stderr, "matvecs": matvecs}
        vars(self).update(known, method=method, degrees=degrees, **others)
        return self

    @property
    def value(self) -> Tensor:
        """The numbers as a plain tensor (n,)."""
        return self.as_subclass(Tensor)

    @property
    def exact(self) -> bool:
        """Whether the numbers have no error but rounding."""
        return self.method == "exact"

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The two ends (n,) of the confidence interval of each entry, by Student's distribution."""
        checks.probability("level", level)
        reach = student(level, self.degrees) * self.stderr
        return self.value - reach, self.value + reach

    def __getitem__(self, index: Any) -> Any:
        """An `Estimate` for a number, a plain tensor for anything else."""
        if isinstance(index, SupportsIndex) and not isinstance(index, Tensor | bool):
            return Estimate(float(self.value[index]), float(self.stderr[index]), **self._origin())
        return self.value[index]

    def __iter__(self) -> Iterator[Estimate]:
        origin = self._origin()
        for value, stderr in zip(self.value.tolist(), self.stderr.tolist(), strict=True):
            yield Estimate(value, stderr, **origin)

    def _origin(self) -> dict[str, Any]:
        return {"matvecs": self.matvecs, "method": self.method, "degrees": self.degrees}

    def __deepcopy__(self: Vector, memo: dict[int, Any]) -> Vector:
        return type(self)(self.value.clone(), **vars(self))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.value!r}, {self.method})"


class DiagonalEstimate(EstimatedVector):
    """The diagonal (n,) of a matrix, with a standard error for each entry.

    Args:
        value: the diagonal.
        stderr: its standard errors (n,); by default those of an exact diagonal, 0.
        matvecs: matrix-vector products that it took.
        method: how it was found; "exact" for a diagonal without an error.
        degrees: degrees of freedom of the standard errors.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> found = estimate.DiagonalEstimate(torch.ones(3), torch.full((3,), 0.5), 8, "hutchinson")
        >>> print(found[0], found.sum(), found.stderr)
        1 ± 0.5 tensor(3.) tensor([0.5000, 0.5000, 0.5000])
    """


def student(level: float, degrees: float) -> float:
    """The two-sided quantile of Student's distribution: that of the normal one for infinite degrees of freedom."""
    tail = (1 + level) / 2
    return float(scipy.special.ndtri(tail) if math.isinf(degrees) else scipy.special.stdtrit(degrees, tail))


def _reach(level: float, degrees: float, skewness: float) -> tuple[float, float]:
    """How many standard errors the interval reaches below and above, for a distribution skew to the right."""
    normal, widened = student(level, math.inf), student(level, degrees)
    if skewness < _SYMMETRIC:
        return widened, widened
    nu = 8 / skewness**2
    few, many = (2 * float(scipy.special.gammaincinv(nu / 2, p)) for p in ((1 - level) / 2, (1 + level) / 2))
    unit = (nu / 2) ** 0.5 * widened / normal
    return unit * (1 - nu / many), unit * (nu / few - 1)
