"""Bad input to attention and to the losses: a typed error that names the argument."""

import pytest
import torch

import curvoscope as cv
from curvoscope import errors
from matrices import within
from reference import normal

r = normal(0)
X, W_Q, W_K, W_V, W_O = r(2, 5, 4), r(4, 6), r(4, 6), r(4, 6), r(6, 3)
Y, TARGETS, U = r(2, 5, 3), torch.arange(10).view(2, 5) % 7, r(3, 7)
NAN = torch.full((4, 6), torch.nan, dtype=torch.float64)


def layer(**changes):
    weights = {"W_Q": W_Q, "W_K": W_K, "W_V": W_V, "W_O": W_O, "heads": 2} | changes
    return cv.exact.SelfAttention(**weights)


def hessian(X=X, loss=None, mask=None, **options):
    return layer().hessian(X, loss or cv.losses.MSE(Y), mask, **options)


CASES = {
    "W_Q of one dimension": (lambda: layer(W_Q=r(6)), errors.ShapeError, "W_Q"),
    "W_K with other rows": (lambda: layer(W_K=r(5, 6)), errors.ShapeError, "W_K"),
    "W_K with other heads": (lambda: layer(W_K=r(4, 8)), errors.ShapeError, "W_K"),
    "columns not divisible by heads": (lambda: layer(heads=4), errors.ShapeError, "W_Q"),
    "W_V not divisible": (lambda: layer(W_V=r(4, 5)), errors.ShapeError, "W_V"),
    "W_O with other rows": (lambda: layer(W_O=r(5, 3)), errors.ShapeError, "W_O"),
    "no heads": (lambda: layer(heads=0), errors.RangeError, "heads"),
    "kv_heads not a divisor": (lambda: layer(kv_heads=3), errors.RangeError, "kv_heads"),
    "kv_heads zero": (lambda: layer(kv_heads=0), errors.RangeError, "kv_heads"),
    "temperature zero": (lambda: layer(temperature=0.0), errors.RangeError, "temperature"),
    "temperature negative": (lambda: layer(temperature=-1.0), errors.RangeError, "temperature"),
    "temperature nan": (lambda: layer(temperature=float("nan")), errors.RangeError, "temperature"),
    "temperature infinite": (lambda: layer(temperature=float("inf")), errors.RangeError, "temperature"),
    "unknown activation": (lambda: layer(activation="relu"), errors.RangeError, "activation"),
    "unknown combine": (lambda: layer(combine="mean"), errors.RangeError, "combine"),
    "sum with W_O": (lambda: layer(combine="sum"), errors.RangeError, "combine"),
    "rotary with odd d_k": (lambda: layer(rotary=100.0), errors.ShapeError, "rotary"),
    "a fraction of heads": (lambda: layer(heads=1.5), errors.RangeError, "heads"),
    "heads that are no number": (lambda: layer(heads="2"), errors.RangeError, "heads"),
    "temperature that is no number": (lambda: layer(temperature="1"), errors.RangeError, "temperature"),
    "no temperature": (lambda: layer(temperature=None), errors.RangeError, "temperature"),
    "softcap that is no number": (lambda: layer(softcap="1"), errors.RangeError, "softcap"),
    "rotary that is no base": (lambda: layer(heads=1, W_O=r(6, 3), rotary="1e4"), errors.RangeError, "rotary"),
    "q_norm that is no norm": (lambda: layer(q_norm="rms"), errors.ModelError, "q_norm"),
    "a list as mask": (lambda: hessian(mask=[[True] * 5] * 5), errors.DtypeError, "mask"),
    "nothing follows the first token": (
        lambda: cv.losses.CrossEntropy(TARGETS[:, :1], U, shift=True), errors.RangeError, "targets",
    ),
    "axis that is no number": (lambda: cv.losses.CrossEntropy(axis="1"), errors.LossError, "axis"),
    "penalty that is no function": (lambda: cv.losses.Regularised(cv.losses.MSE(), 3), errors.LossError, "penalty"),
    "eps that is no number": (lambda: cv.exact.RMSNorm(r(3), "1e-5"), errors.RangeError, "eps"),
    "block of other layers": (
        lambda: cv.exact.TransformerBlock(cv.exact.FeedForward(W_Q, None, W_O, None), layer()),
        errors.ModelError, "attention",
    ),
    "block with a norm that is none": (
        lambda: cv.exact.TransformerBlock(
            layer(W_O=r(6, 4)), cv.exact.FeedForward(W_Q, None, r(6, 4), None), "rms", cv.exact.RMSNorm(r(4))
        ),
        errors.ModelError, "norm1",
    ),
    "a stack of networks": (lambda: cv.exact.Stack([cv.exact.LinearMLP([W_Q])]), errors.ModelError, "layers"),
    "w_V that is no number": (lambda: cv.exact.ScalarAttention(r(3), r(3), "1"), errors.RangeError, "w_V"),
    "half a product": (lambda: hessian().trace(matvecs=20.5), errors.RangeError, "matvecs"),
    "matvecs that are no number": (lambda: hessian().trace(matvecs="64"), errors.RangeError, "matvecs"),
    "tolerance that is no number": (lambda: hessian().trace(tolerance="1 %"), errors.RangeError, "tolerance"),
    "half a step": (lambda: hessian().density(steps=2.5), errors.RangeError, "steps"),
    "seed that is no number": (lambda: hessian().trace(matvecs=8, seed="a"), errors.RangeError, "seed"),
    "seed of the settings": (lambda: cv.settings(seed=1.5).__enter__(), errors.RangeError, "seed"),
    "memory limit that is no number": (
        lambda: cv.settings(memory_limit="1 GB").__enter__(), errors.RangeError, "memory_limit",
    ),
    "scratch that is no folder": (lambda: cv.settings(scratch=3).__enter__(), errors.RangeError, "scratch"),
    "level that is no number": (lambda: cv.Estimate(1.0, 0.1).interval("95 %"), errors.RangeError, "level"),
    "block plus number": (lambda: hessian()["Q"] + 1.0, errors.DtypeError, "operator"),
    "block times block": (lambda: hessian()["Q"] * hessian()["Q"], errors.RangeError, "factor"),
    "selection of nothing": (lambda: hessian().total.select(None), errors.BlockNameError, "names"),
    "rotary base zero": (lambda: layer(heads=1, W_O=r(6, 3), rotary=0.0), errors.RangeError, "rotary"),
    "bias of wrong length": (lambda: layer(b_K=r(5)), errors.ShapeError, "b_K"),
    "weights not finite": (lambda: layer(W_V=NAN), errors.NonFiniteError, "W_V"),
    "integer weights": (lambda: layer(W_Q=torch.ones(4, 6, dtype=torch.int64)), errors.DtypeError, "W_Q"),
    "complex weights": (lambda: layer(W_K=torch.ones(4, 6, dtype=torch.complex64)), errors.DtypeError, "W_K"),
    "mixed dtypes": (lambda: layer(W_K=W_K.float()), errors.DtypeError, "W_K"),
    "mixed devices": (lambda: layer(W_V=W_V.to("meta")), errors.DeviceError, "W_V"),
    "empty weight": (lambda: layer(W_V=r(4, 0)), errors.EmptyError, "W_V"),
    "bias not finite": (lambda: layer(b_Q=NAN[0]), errors.NonFiniteError, "b_Q"),
    "single matrix not square": (lambda: cv.exact.SelfAttention.single_matrix(r(4, 5), W_V), errors.ShapeError, "W_QK"),
    "X of wrong width": (lambda: hessian(r(2, 5, 3)), errors.ShapeError, "X"),
    "X of one dimension": (lambda: hessian(r(4)), errors.ShapeError, "X"),
    "X of four dimensions": (lambda: hessian(r(1, 2, 5, 4)), errors.ShapeError, "X"),
    "X with nan": (lambda: hessian(X.masked_fill(X.max() == X, torch.nan)), errors.NonFiniteError, "X"),
    "X with inf": (lambda: hessian(X.masked_fill(X.max() == X, torch.inf)), errors.NonFiniteError, "X"),
    "integer X": (lambda: hessian(torch.ones(2, 5, 4, dtype=torch.int32)), errors.DtypeError, "X"),
    "float32 X": (lambda: hessian(X.float()), errors.DtypeError, "X"),
    "X on another device": (lambda: hessian(X.to("meta")), errors.DeviceError, "X"),
    "empty batch": (lambda: hessian(r(0, 5, 4)), errors.EmptyError, "X"),
    "no tokens": (lambda: hessian(r(2, 0, 4)), errors.EmptyError, "X"),
    "overflow": (lambda: hessian(X * 1e200), errors.NonFiniteError, "X"),
    "mask of wrong size": (lambda: hessian(mask=torch.ones(4, 4, dtype=torch.bool)), errors.ShapeError, "mask"),
    "mask of one dimension": (lambda: hessian(mask=torch.ones(5, dtype=torch.bool)), errors.ShapeError, "mask"),
    "integer mask": (lambda: hessian(mask=torch.ones(5, 5, dtype=torch.int64)), errors.MaskError, "mask"),
    "all-masked row": (lambda: hessian(mask=torch.zeros(5, 5, dtype=torch.bool)), errors.MaskError, "mask"),
    "additive mask with nan": (lambda: hessian(mask=torch.full((5, 5), torch.nan)), errors.NonFiniteError, "mask"),
    "additive mask all -inf": (lambda: hessian(mask=torch.full((5, 5), -torch.inf)), errors.MaskError, "mask"),
    "Y of wrong shape": (lambda: hessian(loss=cv.losses.MSE(r(2, 5, 4))), errors.ShapeError, "Y"),
    "Y not finite": (lambda: cv.losses.MSE(NAN), errors.NonFiniteError, "Y"),
    "Y of another dtype": (lambda: hessian(loss=cv.losses.MSE(Y.float())), errors.DtypeError, "Y"),
    "target out of range": (lambda: cv.losses.CrossEntropy(TARGETS, r(3, 5)), errors.RangeError, "targets"),
    "target negative": (lambda: cv.losses.CrossEntropy(TARGETS - 1, U), errors.RangeError, "targets"),
    "all targets ignored": (lambda: cv.losses.CrossEntropy(TARGETS * 0 - 100, U), errors.RangeError, "targets"),
    "floating targets": (lambda: cv.losses.CrossEntropy(TARGETS.double(), U), errors.DtypeError, "targets"),
    "targets of wrong shape": (
        lambda: hessian(loss=cv.losses.CrossEntropy(TARGETS[:, :4], U)), errors.ShapeError, "targets",
    ),
    "unembedding of wrong width": (
        lambda: hessian(loss=cv.losses.CrossEntropy(TARGETS, r(4, 7))), errors.ShapeError, "unembedding",
    ),
    "unembedding of one dimension": (lambda: cv.losses.CrossEntropy(TARGETS, r(7)), errors.ShapeError, "unembedding"),
    "unembedding bias of wrong length": (lambda: cv.losses.CrossEntropy(TARGETS, U, r(6)), errors.ShapeError, "bias"),
    "loss is not a scalar": (lambda: hessian(loss=lambda F: F), errors.LossError, "loss"),
    "loss is a float": (lambda: hessian(loss=lambda F: 1.0), errors.LossError, "loss"),
    "loss is detached": (lambda: hessian(loss=lambda F: F.detach().sum()), errors.LossError, "loss"),
    "loss is nan": (lambda: hessian(loss=lambda F: (F * torch.nan).sum()), errors.NonFiniteError, "loss"),
    "unknown block": (lambda: hessian()["W"], errors.BlockNameError, "block"),
    "dense too large": (lambda: within(100, hessian().dense), errors.MemoryLimitError, "memory_limit"),
}  # fmt: skip


@pytest.mark.parametrize("call, kind, argument", CASES.values(), ids=CASES)
def test_bad_input(call, kind, argument):
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.argument == argument and str(caught.value).startswith(f"{argument}: ")
    assert isinstance(caught.value, cv.CurvoscopeError)


def test_memory_error_says_how_large_and_what_to_ask_instead():
    d = 768
    zeros = torch.zeros(d, d, dtype=torch.float32)
    H = cv.exact.SelfAttention(zeros, zeros, zeros).hessian(torch.ones(1, 2, d), cv.losses.MSE(torch.ones(1, 2, d)))
    with pytest.raises(errors.MemoryLimitError, match=r"589824 x 589824 needs 3\.164 TiB.*trace\(\)"):
        H["Q"].dense()


def test_a_loss_linear_in_the_output_has_no_outer_part():
    H = hessian(loss=lambda F: (F * Y).sum())
    assert torch.count_nonzero(H.outer.dense()) == 0 and H.functional["Q"].frobenius_norm() > 0
