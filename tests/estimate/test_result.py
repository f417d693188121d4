import copy
import json
import math
import pickle

import numpy as np
import pytest
import scipy.stats
import torch

from curvoscope.errors import RangeError
from curvoscope.estimate import DiagonalEstimate, Estimate


def test_is_a_number():
    e = Estimate(3.14159, 0.02, 64, "hutchinson")
    assert float(e) == 3.14159
    assert str(e) == "3.142 ± 0.02"
    for name in ("value", "stderr", "colour"):
        with pytest.raises(AttributeError):
            setattr(e, name, 1.0)


def test_is_a_float():
    e = Estimate(0.1 + 0.2, 0.02, 64, "hutchinson", 7.0, 0.5, 2.0)
    assert isinstance(e, float) and e == 0.1 + 0.2 and hash(e) == hash(0.1 + 0.2) and e in {0.1 + 0.2}
    assert e < 1 and max(e, 1.0) == 1.0 and sorted([1.0, e])[0] is e
    assert type(e + 1) is float and 2 * e == 0.6000000000000001 and e**2 == (0.1 + 0.2) ** 2 and -e == -(0.1 + 0.2)
    assert math.sqrt(e) == math.sqrt(0.1 + 0.2) and round(e, 1) == 0.3 and bool(e) and not Estimate(0.0)
    assert f"{e:.3g}" == "0.3" and f"{e:>8.2f}" == "    0.30" and f"{e}" == str(e) == "0.3 ± 0.02"
    assert json.loads(json.dumps({"norm": e, "all": [e]})) == {"norm": 0.1 + 0.2, "all": [0.1 + 0.2]}
    array = np.array([e, 1.0])
    assert array.dtype == np.float64 and array[0] == e and np.float64(2) * e == 2 * (0.1 + 0.2)
    assert torch.equal(torch.ones(2).double() * e, torch.tensor([e, e], dtype=torch.float64))
    for other in (pickle.loads(pickle.dumps(e)), copy.copy(e), copy.deepcopy(e), Estimate(**e.facts())):
        assert type(other) is Estimate and other.facts() == e.facts()


def test_exact_numbers():
    e = Estimate(0.1 + 0.2)
    assert (e.stderr, e.exact, e.matvecs, e.method) == (0.0, True, 0, "exact")
    assert e.interval() == (e, e) and str(e) == str(0.1 + 0.2) and repr(e) == "Estimate(0.30000000000000004, exact)"
    assert not Estimate(1.0, 0.0, 4, "lanczos").exact
    assert e.root().exact and e.scaled(2).exact and e.scaled(2) == 2 * (0.1 + 0.2)


def test_a_vector_is_a_tensor_of_estimates():
    numbers, errors = torch.arange(3.0), torch.tensor([0.1, 0.2, 0.3])
    found = DiagonalEstimate(numbers, errors, 8, "hutchinson", 7.0)
    assert isinstance(found, torch.Tensor) and torch.equal(found, numbers) and torch.equal(found.stderr, errors)
    assert type(found.value) is type(found + 1) is type(found[1:]) is type(found[found > 0]) is torch.Tensor
    assert found.sum() == 3 and torch.allclose(found @ numbers, torch.tensor(5.0)) and len(found) == 3
    assert found[-1].facts() == Estimate(2.0, float(errors[2]), 8, "hutchinson", 7.0).facts()
    assert [float(one) for one in found] == found.tolist() and list(found)[1].stderr == float(errors[1])
    for other in (pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
        assert type(other) is DiagonalEstimate and torch.equal(other, found) and other.method == "hutchinson"
    exact = DiagonalEstimate(numbers)
    assert exact.exact and not exact.stderr.any() and exact[1].exact and not found.exact


def test_normal_interval():
    low, high = Estimate(10.0, 2.0, 64, "hutchinson").interval()
    assert np.allclose((low, high), scipy.stats.norm(10, 2).interval(0.95), rtol=1e-12)
    assert np.allclose(Estimate(10.0, 2.0, 64, "x").interval(0.68), scipy.stats.norm(10, 2).interval(0.68))


def test_few_degrees_of_freedom():
    assert np.allclose(Estimate(1.0, 0.5, 8, "x", degrees=7.0).interval(), scipy.stats.t(7, 1, 0.5).interval(0.95))


@pytest.mark.parametrize("probes", [4, 16, 256])
def test_skew_interval_is_exact_for_one_eigenvalue(probes):
    """x = λ χ²_ν/ν with s = x sqrt(2/ν): the interval for λ is x ν / χ²_ν, at the quantiles of χ²."""
    x = 1.7
    e = Estimate(x, x * math.sqrt(2 / probes), probes, "hutchinson", skewness=math.sqrt(8 / probes))
    ends = [x * probes / scipy.stats.chi2(probes).ppf(p) for p in (0.975, 0.025)]
    assert np.allclose(e.interval(), ends, rtol=1e-10)


def test_skewness_to_the_left_is_the_mirror_image():
    right = Estimate(1.0, 0.3, 8, "x", 7.0, 0.4).interval()
    left = Estimate(-1.0, 0.3, 8, "x", 7.0, -0.4).interval()
    assert np.allclose(left, (-right[1], -right[0]))
    assert right[1] - 1 > 1 - right[0]


def test_tiny_skewness_is_continuous():
    plain = Estimate(1.0, 0.3, 8, "x").interval()
    assert np.allclose(Estimate(1.0, 0.3, 8, "x", skewness=1.1e-4).interval(), plain, rtol=1e-3)


def test_root_has_the_root_of_the_interval():
    square = Estimate(9.0, 1.2, 32, "hutchinson", 31.0, 0.2)
    root = square.root()
    assert root.value == 3
    assert math.isclose(root.stderr, 0.2)
    assert np.allclose(np.square(root.interval()), square.interval())
    assert Estimate(1.0, 4.0, 4, "x").root().interval()[0] == 0  # no norm is negative
    zero = Estimate(0.0, 0.0, 4, "exact").root()
    assert (zero.value, zero.stderr, zero.interval()) == (0, 0, (0, 0))
    assert Estimate(0.0, 4e-6, 4, "x").root().interval()[1] > 2e-3  # zero, but not known to be


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0])
def test_bad_level(level):
    with pytest.raises(RangeError, match="level"):
        Estimate(1.0, 0.1, 4, "x").interval(level)
    with pytest.raises(RangeError, match="level"):
        DiagonalEstimate(torch.ones(2), torch.ones(2), 4, "x").interval(level)


def test_diagonal_interval():
    e = DiagonalEstimate(torch.tensor([1.0, 2.0]).double(), torch.tensor([0.1, 0.2]).double(), 8, "x", 7.0)
    low, high = e.interval()
    reach = scipy.stats.t(7).ppf(0.975)
    assert torch.allclose(high - e.value, reach * e.stderr)
    assert torch.allclose(e.value - low, reach * e.stderr)


def test_format_is_that_of_the_value():
    estimate = Estimate(1.23456, 0.01, 8, "m")
    assert f"{estimate:.2f}" == "1.23" and f"{estimate:>10.3g}" == "      1.23"
    assert f"{estimate}" == str(estimate) == "1.235 ± 0.01"
