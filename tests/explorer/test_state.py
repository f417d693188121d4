import math
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from curvoscope.explorer.state import MOST_WEIGHTS, State, bounds, choices, from_link, read

NUMBERS = [name for name, field in State.model_fields.items() if field.annotation in (int, float)]
CHOICES = [name for name in State.model_fields if name not in NUMBERS]


@given(st.builds(dict, L=st.integers(2, 32), sigma=st.floats(0.01, 10.0), residual=st.floats(0.0, 1.0)))
def test_a_link_holds_the_state_to_the_last_digit(values):
    state = State(**values)
    assert from_link(f"?{state.query()}") == (state, [])


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("word", ["below", "above", "abc", "", "nan", "inf", "-inf", "1e999", "<script>"])
def test_bad_numbers_in_a_link_keep_the_default_and_are_named(name, word):
    low, high = bounds(name)
    seen = {"below": str(low - 1), "above": str(high + 1)}.get(word, word)
    state, problems = from_link(f"?{urlencode({name: seen})}&mask=none")
    assert state == State(mask="none")
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}: got {seen}, expected a ")
    assert f"from {low:g} to {high:g}" in problems[0]


@pytest.mark.parametrize("name", CHOICES)
def test_bad_choices_name_the_choices(name):
    state, problems = from_link(f"?{name}=other")
    assert state == State()
    assert problems[0].startswith(f"{name}: got other, expected {' or '.join(choices(name))}")


def test_unknown_settings_are_named_and_long_values_cut():
    state, problems = from_link(f"?nonsense=1&L={'9' * 4000}&sigma=2")
    assert state == State(sigma=2.0)
    assert problems[0] == "nonsense: there is no such setting; it is ignored"
    assert problems[1].startswith("L: got 9999") and len(problems[1]) < 150


def test_sizes_are_bounded_together():
    with pytest.raises(ValidationError, match=f"more than {MOST_WEIGHTS}"):
        State(d=32, d_k=64, heads=4)
    state, problems = from_link("?d=32&d_k=64&heads=4")
    assert state == State()
    assert "= 20480 weights" in problems[0]
    assert "lower d, d_k or the number of heads" in problems[0]
    assert State().weights == 768 == 3 * 16**2


@pytest.mark.parametrize("values", [None, [], "L=3", 7, {"L": None}, {"L": [1]}, {"L": {"a": 1}}, {"what": 1}, {1: 2}])
def test_values_of_any_shape_are_read_or_named(values):
    state, problems = read(values)
    assert state is None
    assert problems and all(isinstance(line, str) for line in problems)


def test_numbers_that_are_not_finite_are_refused():
    for value in (math.nan, math.inf, -math.inf):
        assert read({"sigma": value})[0] is None
