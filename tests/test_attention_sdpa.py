"""attention.sdpa against the mathematical kernel, finite differences and float64, in every mode, with every option."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from curvoscope.attention import rows, sdpa
from curvoscope.errors import (
    CurvoscopeError,
    DeviceError,
    DtypeError,
    EmptyError,
    MaskError,
    RangeError,
    ShapeError,
)
from largest import Largest
from reference import normal, relative


def mathematical(*tensors: Tensor, **options: object) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*tensors, **options)


def _hidden(*shape: int, seed: int = 1, empty: bool = False) -> Tensor:
    visible = normal(seed)(*shape) > -0.3
    if empty:
        visible[..., 1, :] = False
    return visible


SHAPES = {  # of query, key, value and, where it has a gradient, the mask; and the options
    "plain": (((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2)), {}),
    "scale": (((1, 2, 4, 3), (1, 2, 3, 3), (1, 2, 3, 2)), {"scale": 0.8}),
    "causal": (((2, 2, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2)), {"is_causal": True}),
    "causal, more queries": (((1, 2, 6, 2), (1, 2, 3, 2), (1, 2, 3, 2)), {"is_causal": True}),
    "causal, more keys": (((1, 2, 3, 2), (1, 2, 6, 2), (1, 2, 6, 2)), {"is_causal": True, "scale": 1.5}),
    "groups": (((2, 4, 4, 2), (2, 2, 4, 2), (2, 2, 4, 3)), {"enable_gqa": True}),
    "causal groups": (((1, 4, 5, 2), (1, 2, 5, 2), (1, 2, 5, 3)), {"enable_gqa": True, "is_causal": True}),
    "groups of two sizes": (((1, 4, 3, 2), (1, 2, 4, 2), (1, 1, 4, 3)), {"enable_gqa": True}),
    "one shared head": (((2, 3, 4, 2), (2, 1, 4, 2), (2, 1, 4, 3)), {}),
    "boolean mask": (((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2)), {"attn_mask": _hidden(2, 1, 4, 5)}),
    "queries without keys": (((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2)), {"attn_mask": _hidden(4, 5, empty=True)}),
    "padding": (((3, 2, 4, 2), (3, 2, 5, 2), (3, 2, 5, 2)), {"attn_mask": _hidden(3, 1, 1, 5)}),
    "grouped mask": (
        ((2, 4, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2)),
        {"enable_gqa": True, "attn_mask": _hidden(1, 4, 3, 4)},
    ),
    "additive mask": (((2, 2, 4, 2), (2, 2, 3, 2), (2, 2, 3, 2), (2, 4, 3)), {}),
    "broadcast": (((3, 1, 2, 3, 2), (2, 1, 4, 2), (1, 1, 4, 2), (2, 1, 4)), {}),
    "additive grouped mask": (((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2), (4, 3, 1)), {"enable_gqa": True}),
    "matrices": (((3, 2), (4, 2), (4, 2), (4,)), {}),
    "three axes": (((2, 3, 2), (2, 4, 2), (2, 4, 2)), {"attn_mask": _hidden(3, 4)}),
}


@pytest.fixture
def many_tiles(monkeypatch) -> None:
    """Sizes at which rows are cut; without it a tile holds several heads."""
    monkeypatch.setattr(rows, "_TILE", 10)
    monkeypatch.setattr(rows, "_FEWEST_ROWS", 2)


def _tensors(name: str, seed: int = 2) -> tuple[Tensor, ...]:
    r = normal(seed)
    return tuple(r(*shape) for shape in SHAPES[name][0])


def _close(found, expected) -> bool:
    found, expected = ((x,) if isinstance(x, Tensor) else x for x in (found, expected))
    size = max(float(y.detach().abs().max()) for y in expected)
    return all(float((x - y).detach().abs().max()) <= 1e-12 * size for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHAPES)
def test_finite_differences(name, fast, many_tiles):
    """First derivatives in both modes, second ones by reverse over reverse and forward over reverse."""
    options = SHAPES[name][1]
    tensors = tuple(x.requires_grad_() for x in _tensors(name))

    def function(*tensors):
        return sdpa(*tensors, **options)

    assert gradcheck(function, tensors, check_forward_ad=True, fast_mode=fast)
    assert gradgradcheck(function, tensors, check_fwd_over_rev=True, fast_mode=fast)


def _hessian_forward_over_reverse(loss, all_of, tensors, direction):
    return jvp(grad(loss, all_of), tensors, direction)[1]


def _hessian_reverse_over_reverse(loss, all_of, tensors, direction):
    return vjp(grad(loss, all_of), *tensors)[1](direction)


def _hessian_reverse_over_forward(loss, all_of, tensors, direction):
    return grad(lambda *at: jvp(loss, at, direction)[1], all_of)(*tensors)


def _hessian_by_autograd(loss, all_of, tensors, direction):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(torch.autograd.grad(loss(*leaves), leaves, create_graph=True), leaves, direction)


def _hessian_by_dual_numbers(loss, all_of, tensors, direction):
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x.detach().clone().requires_grad_(), t)
            for x, t in zip(tensors, direction, strict=True)
        ]
        found = torch.autograd.grad(loss(*duals), duals, create_graph=True)
        return [forward_ad.unpack_dual(x).tangent for x in found]


def _hessian_of_one(loss, all_of, tensors, direction):
    """Only the keys move: most cotangents are absent."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    (one,) = torch.autograd.grad(loss(*leaves), [leaves[1]], create_graph=True)
    return torch.autograd.grad(one, leaves, direction[1])


def _hessian_of_values(loss, all_of, tensors, direction):
    """Only the values move, and only the queries are asked for."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    (one,) = torch.autograd.grad(loss(*leaves), [leaves[2]], create_graph=True)
    return torch.autograd.grad(one, [leaves[0]], direction[2])


def _hessian_mapped(loss, all_of, tensors, direction):
    directions = tuple(torch.stack([x, 2 * x.flip(-1), x.cos()]) for x in direction)
    return vmap(lambda *one: jvp(grad(loss, all_of), tensors, one)[1])(*directions)


def _hessian_mapped_in_reverse(loss, all_of, tensors, direction):
    directions = tuple(torch.stack([x, 2 * x.flip(-1), x.cos()], -1) for x in direction)
    return vmap(lambda *one: vjp(grad(loss, all_of), *tensors)[1](one), in_dims=-1)(*directions)


def _hessian_of_many_points(loss, all_of, tensors, direction):
    points = tuple(torch.stack([x, x.cos()]) for x in tensors)
    return vmap(lambda *at: jvp(grad(loss, all_of), at, direction)[1])(*points)


def _hessian_of_batched_directions(loss, all_of, tensors, direction):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    directions = [torch.stack([x, 2 * x.flip(-1), x.cos()]) for x in direction]
    found = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(found, leaves, directions, is_grads_batched=True)


PRODUCTS = [value for name, value in list(globals().items()) if name.startswith("_hessian_")]


def _assert_same_product(name: str, product, reference) -> None:
    """The Hessian of a loss after our kernel times a direction by `product`, after torch's by `reference`."""
    tensors, direction, options = _tensors(name), _tensors(name, 3), SHAPES[name][1]
    weights = normal(4)(*mathematical(*tensors, **options).shape)

    def loss(kernel):
        return lambda *at: (weights * kernel(*at, **options).sin()).sum()

    all_of = tuple(range(len(tensors)))
    found = product(loss(sdpa), all_of, tensors, direction)
    assert _close(found, reference(loss(mathematical), all_of, tensors, direction))


class TestAgainstTheMathematicalKernel:
    @pytest.mark.parametrize("name", SHAPES)
    def test_values_and_first_derivatives(self, name, many_tiles):
        tensors, direction, options = _tensors(name), _tensors(name, 3), SHAPES[name][1]
        found, expected = (
            jvp(lambda *at, kernel=kernel: kernel(*at, **options), tensors, direction)
            for kernel in (sdpa, mathematical)
        )
        assert found[0].shape == expected[0].shape
        assert _close(found, expected)
        g = normal(4)(*expected[0].shape)
        backward = (vjp(lambda *at, k=k: k(*at, **options), *tensors)[1](g) for k in (sdpa, mathematical))
        assert _close(*backward)

    @pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__[9:])
    @pytest.mark.parametrize("name", SHAPES)
    def test_second_derivatives(self, name, product, many_tiles):
        # Reverse over forward through the mathematical kernel is NaN where a query has no keys.
        reference = _hessian_by_autograd if product is _hessian_reverse_over_forward else product
        _assert_same_product(name, product, reference)

    @pytest.mark.parametrize("name", SHAPES)
    def test_several_heads_in_one_tile(self, name):
        _assert_same_product(name, _hessian_by_autograd, _hessian_by_autograd)

    @pytest.mark.parametrize("name", SHAPES)
    def test_forward_over_forward(self, name, many_tiles):
        tensors, one, two, options = _tensors(name), _tensors(name, 3), _tensors(name, 4), SHAPES[name][1]

        def second(kernel):
            return jvp(lambda *at: jvp(lambda *a: kernel(*a, **options), at, one)[1], tensors, two)[1]

        assert _close(second(sdpa), second(mathematical))

    def test_at_a_length_of_several_tiles(self):
        r = normal(5)
        tensors, direction = ([r(2, 4, 700, 8), r(2, 2, 700, 8), r(2, 2, 700, 8)] for _ in range(2))
        options = {"is_causal": True, "enable_gqa": True}
        found, expected = (
            _hessian_by_autograd(lambda *at, k=k: k(*at, **options).square().sum(), None, tensors, direction)
            for k in (sdpa, mathematical)
        )
        assert _close(found, expected)

    @pytest.mark.parametrize("only", ["q", "k", "v"])
    def test_one_tensor_alone_has_derivatives(self, only):
        tensors, direction = _tensors("causal"), _tensors("causal", 3)
        i = "qkv".index(only)

        def product(kernel):
            leaf = tensors[i].clone().requires_grad_()
            at = [*tensors[:i], leaf, *tensors[i + 1 :]]
            (found,) = torch.autograd.grad(kernel(*at, is_causal=True).sin().sum(), leaf, create_graph=True)
            return torch.autograd.grad(found, leaf, direction[i])

        assert _close(product(sdpa), product(mathematical))

    def test_strided_inputs(self):
        """As a projection split into heads hands them over."""
        r = normal(6)
        packed, weights = r(2, 5, 3 * 2 * 3), r(2, 2, 5, 3)

        def loss(kernel):
            def of(x):
                q, k, v = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in x.chunk(3, -1))
                return (weights * kernel(q, k, v, is_causal=True).cos()).sum()

            return of

        direction = r(2, 5, 18)
        found, expected = (jvp(grad(loss(kernel)), (packed,), (direction,))[1] for kernel in (sdpa, mathematical))
        assert _close(found, expected)


class TestRowsWithoutKeys:
    @pytest.mark.parametrize("additive", [False, True])
    def test_are_zero_with_zero_derivatives(self, additive):
        mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # the first query sees nothing
        if additive:
            mask = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~mask, -math.inf)
        tensors = [normal(1)(1, 1, 4, 2).requires_grad_() for _ in range(3)]
        out = sdpa(*tensors, attn_mask=mask)
        assert out[0, 0, 0].abs().max() == 0
        assert _close(out, mathematical(*tensors, attn_mask=mask))
        found = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        assert found[0][0, 0, 0].abs().max() == 0
        again = torch.autograd.grad(found, tensors, [torch.ones_like(x) for x in found])
        assert all(bool(torch.isfinite(x).all()) for x in again)
        assert again[0][0, 0, 0].abs().max() == 0

    def test_hidden_by_a_large_number_they_average_all_keys(self):
        """What the lowest float32 does in padded text: the scores are all the same, and so are the probabilities."""
        mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
        mask[1] = torch.finfo(torch.float32).min
        tensors = [normal(seed, torch.float32)(1, 1, 4, 2) for seed in range(3)]
        out = sdpa(*tensors, attn_mask=mask)
        assert torch.allclose(out[0, 0, 1], tensors[2][0, 0].mean(0), rtol=1e-5)
        found, expected = (
            grad(lambda v, k=k: k(*tensors[:2], v, attn_mask=mask).square().sum())(tensors[2])
            for k in (sdpa, mathematical)
        )
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_second_derivatives_keep_the_digits_of_the_input(self, dtype):
        r = normal(7)
        tensors, direction = ([r(1, 2, 64, 8).to(dtype) for _ in range(3)] for _ in range(2))

        def loss(kernel):
            return lambda *at: kernel(*at, is_causal=True).double().square().sum()

        found = _hessian_by_autograd(loss(sdpa), None, tensors, direction)
        exact = _hessian_by_autograd(
            loss(mathematical), None, [x.double() for x in tensors], [x.double() for x in direction]
        )
        assert all(x.dtype == dtype for x in found)
        for x, y in zip(found, exact, strict=True):
            assert relative(x.double(), y) < 8 * torch.finfo(dtype).eps

    def test_half_precision_is_rounded_once(self):
        """Sums over keys run in float32: the result is that of float64, rounded."""
        tensors = [normal(seed)(1, 1, 512, 16).bfloat16() for seed in range(3)]
        exact = mathematical(*(x.double() for x in tensors))
        ulp = exact.abs() * torch.finfo(torch.bfloat16).eps
        assert bool(((sdpa(*tensors).double() - exact).abs() <= 0.51 * ulp + 1e-6).all())

    def test_a_float32_mask_for_bfloat16(self):
        tensors = [normal(seed)(1, 2, 6, 4).bfloat16() for seed in range(3)]
        mask = normal(4, torch.float32)(6, 6)
        exact = mathematical(*(x.double() for x in tensors), attn_mask=mask.double())
        found = sdpa(*tensors, attn_mask=mask)
        assert found.dtype == torch.bfloat16
        assert relative(found.double(), exact) < torch.finfo(torch.bfloat16).eps

    def test_large_scores(self):
        """Probabilities of nearly one-hot rows, at scores that would overflow."""
        tensors = [1e3 * normal(seed, torch.float32)(1, 1, 8, 4) for seed in range(3)]
        out, tangent = jvp(lambda *at: sdpa(*at), tuple(tensors), tuple(tensors))
        assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(tangent).all())
        assert torch.allclose(out, mathematical(*tensors), rtol=1e-4)

    def test_what_is_not_a_number_stays_so(self):
        tensors = [normal(seed)(1, 1, 4, 3) for seed in range(3)]
        tensors[1][0, 0, 2, 1] = math.nan
        assert bool(torch.isnan(sdpa(*tensors)).all())


@pytest.mark.parametrize(
    "product", [_hessian_by_autograd, _hessian_forward_over_reverse, _hessian_reverse_over_reverse]
)
def test_nothing_of_the_size_of_the_scores_is_made(product, monkeypatch):
    """By any operation: at twice the length the largest tensor is at most twice as large."""
    monkeypatch.setattr(rows, "_TILE", 2**11)
    monkeypatch.setattr(rows, "_FEWEST_ROWS", 8)
    sizes = {}
    for L in (256, 512):
        r = normal(8, torch.float32)
        tensors, direction = (tuple(r(1, 2, L, 4) for _ in range(3)) for _ in range(2))
        with Largest() as largest:
            product(lambda *at: sdpa(*at, is_causal=True).square().sum(), (0, 1, 2), tensors, direction)
        sizes[L] = largest.size
    assert sizes[512] <= 2 * sizes[256]
    assert sizes[512] < 512**2 / 16


@pytest.mark.slow
def test_peak_memory_of_a_layer_is_linear():
    """Measured in fresh processes, as the benchmark does."""
    peaks = []
    for L in ("1024", "4096"):
        command = [sys.executable, "-m", "benchmarks.long_sequences", "ours", L, "0"]
        root = Path(__file__).parents[1]
        printed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
        peaks.append(json.loads(printed)["peak_mib"])
    assert math.log2(peaks[1] / peaks[0]) / 2 < 1.15


def _q(*shape: int) -> Tensor:
    return torch.ones(*shape)


@pytest.mark.parametrize(
    "error, argument, arguments, options",
    [
        (ShapeError, "query", (_q(3), _q(4, 3), _q(4, 3)), {}),
        (ShapeError, "value", (_q(3, 3), _q(4, 3), _q(4)), {}),
        (ShapeError, "key", (_q(2, 3, 3), _q(2, 4, 2), _q(2, 4, 3)), {}),
        (ShapeError, "value", (_q(2, 3, 3), _q(2, 4, 3), _q(2, 5, 3)), {}),
        (ShapeError, "key", (_q(1, 4, 3, 2), _q(1, 2, 3, 2), _q(1, 2, 3, 2)), {}),
        (ShapeError, "key", (_q(1, 4, 3, 2), _q(1, 3, 3, 2), _q(1, 3, 3, 2)), {"enable_gqa": True}),
        (ShapeError, "key", (_q(1, 2, 3, 2), _q(1, 4, 3, 2), _q(1, 4, 3, 2)), {"enable_gqa": True}),
        (ShapeError, "query", (_q(2, 1, 3, 2), _q(3, 1, 3, 2), _q(3, 1, 3, 2)), {}),
        (EmptyError, "key", (_q(1, 1, 3, 2), _q(1, 1, 0, 2), _q(1, 1, 0, 2)), {}),
        (DtypeError, "query", (_q(3, 2).long(), _q(3, 2).long(), _q(3, 2).long()), {}),
        (DtypeError, "key", (_q(3, 2), _q(3, 2).double(), _q(3, 2)), {}),
        (DtypeError, "attn_mask", (_q(3, 2), _q(3, 2), _q(3, 2)), {"attn_mask": _q(3, 3).long()}),
        (DtypeError, "attn_mask", (_q(3, 2), _q(3, 2), _q(3, 2)), {"attn_mask": _q(3, 3).double()}),
        (DeviceError, "value", (_q(3, 2), _q(3, 2), _q(3, 2).to("meta")), {}),
        (DeviceError, "attn_mask", (_q(3, 2), _q(3, 2), _q(3, 2)), {"attn_mask": _q(3, 3).to("meta")}),
        (MaskError, "attn_mask", (_q(3, 2), _q(3, 2), _q(3, 2)), {"attn_mask": _q(3, 2)}),
        (MaskError, "attn_mask", (_q(3, 2), _q(3, 2), _q(3, 2)), {"attn_mask": _q(2, 3, 3)}),
        (MaskError, "attn_mask", (_q(2, 3, 2), _q(2, 3, 2), _q(2, 3, 2)), {"attn_mask": _q(3, 3, 3)}),
        (MaskError, "attn_mask", (_q(3, 2), _q(3, 2), _q(3, 2)), {"attn_mask": _q(3, 3), "is_causal": True}),
        (RangeError, "dropout_p", (_q(3, 2), _q(3, 2), _q(3, 2)), {"dropout_p": 0.1}),
    ],
)
def test_errors_name_the_argument(error, argument, arguments, options):
    with pytest.raises(error) as caught:
        sdpa(*arguments, **options)
    assert isinstance(caught.value, CurvoscopeError)
    assert caught.value.argument == argument


def test_a_third_derivative_is_refused():
    tensors = tuple(normal(seed)(3, 2) for seed in range(3))

    def loss(q):
        return sdpa(q, *tensors[1:]).sin().sum()

    leaf = tensors[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf, create_graph=True)
    with pytest.raises(RangeError, match="a third"):
        torch.autograd.grad(second.sum(), leaf)
    with pytest.raises(RangeError, match="a third"):
        jvp(lambda q: jvp(grad(loss), (q,), (q,))[1], (tensors[0],), (tensors[0],))
