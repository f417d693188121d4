"""What the page can ask for: one model with bounds, checked wherever a link or a request comes in."""

from collections.abc import Mapping
from typing import Literal, get_args
from urllib.parse import parse_qsl, urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MOST_WEIGHTS = 1536
"""Rows of the largest Hessian: its eigenvalues take a few tenths of a second, its three parts 60 MB."""

_MOST_FIELDS = 100
_SHOWN = 40  # characters of a bad value that a message repeats


class State(BaseModel):
    """A layer, its input and its loss. The page, the link and the downloads have the same fields.

    X (L, d) is `sigma` times standard normal numbers, W_Q and W_K are (d, heads d_k), W_V is (d, heads d) and the heads
    are added. `sink` is added to all scores of the first key, `skip` times X to the layer's output F: Z = F + skip X.
    `residual` ρ pulls the targets to Z: Z + ρ (Y - Z) for the squared error, π + ρ (onehot - π) for cross-entropy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    L: int = Field(default=17, ge=2, le=32)
    d: int = Field(default=16, ge=2, le=32)
    d_k: int = Field(default=16, ge=1, le=64)
    heads: int = Field(default=1, ge=1, le=4)
    sigma: float = Field(default=1.0, ge=0.01, le=10.0)
    temperature: float = Field(default=1.0, ge=0.1, le=100.0)
    attention: Literal["softmax", "linear"] = "softmax"
    mask: Literal["none", "causal"] = "causal"
    norm: Literal["none", "pre"] = "none"
    sink: float = Field(default=0.0, ge=0.0, le=8.0)
    skip: float = Field(default=0.0, ge=0.0, le=1.0)
    residual: float = Field(default=1.0, ge=0.0, le=1.0)
    loss: Literal["mse", "ce"] = "mse"
    seed: int = Field(default=0, ge=0, le=9999)

    @model_validator(mode="after")
    def _not_too_large(self) -> "State":
        if self.weights > MOST_WEIGHTS:
            raise ValueError(
                f"heads · d · (2 d_k + d) = {self.weights} weights are more than {MOST_WEIGHTS}; "
                "lower d, d_k or the number of heads"
            )
        return self

    @property
    def weights(self) -> int:
        """Rows of the Hessian over W_Q, W_K and W_V."""
        return self.heads * self.d * (2 * self.d_k + self.d)

    def query(self) -> str:
        """The query string of a link to this state, all fields written out."""
        return urlencode(self.model_dump())


def bounds(name: str) -> tuple[float, float]:
    """The smallest and the largest value of a number."""
    found = {type(limit).__name__: limit for limit in State.model_fields[name].metadata}
    return float(found["Ge"].ge), float(found["Le"].le)


def choices(name: str) -> tuple[str, ...]:
    """The words that a choice may be."""
    return get_args(State.model_fields[name].annotation)


def read(values: object) -> tuple[State | None, list[str]]:
    """The state that `values` describes, or None and what is wrong, one line per field."""
    if not isinstance(values, Mapping):
        return None, [f"expected an object with the fields of a state, got {type(values).__name__}"]
    try:
        return State.model_validate(dict(values)), []
    except ValidationError as error:
        return None, [_line(problem["loc"], problem["input"], problem["msg"]) for problem in error.errors()]


def from_link(search: str) -> tuple[State, list[str]]:
    """The state of a query string: a field that is not as it should be keeps its default, and a line says so."""
    try:
        values = dict(parse_qsl(search.removeprefix("?"), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError:
        return State(), [f"the link has more than {_MOST_FIELDS} settings; the defaults are used instead"]
    problems = []
    for name in list(values):
        if name not in State.model_fields:
            problems.append(f"{_cut(name)}: there is no such setting; it is ignored")
            del values[name]
            continue
        _, found = read({name: values[name]})
        own = [line for line in found if line.startswith(f"{name}:")]
        if own:
            problems.append(f"{own[0]}; {State.model_fields[name].default} is used instead")
            del values[name]
    state, found = read(values)
    if state is None:
        return State(), [*problems, *(f"{line}; the defaults are used instead" for line in found)]
    return state, problems


def _line(place: tuple[int | str, ...], seen: object, message: str) -> str:
    if not place:
        return message.removeprefix("Value error, ")
    name = str(place[0])
    if name not in State.model_fields:
        return f"{_cut(name)}: there is no such setting"
    return f"{name}: got {_cut(seen)}, expected {_expected(name)}"


def _expected(name: str) -> str:
    field = State.model_fields[name]
    if field.annotation in (int, float):
        low, high = bounds(name)
        return f"{'a whole number' if field.annotation is int else 'a number'} from {low:g} to {high:g}"
    return " or ".join(choices(name))


def _cut(seen: object) -> str:
    text = seen if isinstance(seen, str) else repr(seen)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
