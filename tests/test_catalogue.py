"""The catalogue of bad input: every command and public function, the error, the argument it names, and no trace left.

A call must raise the error of its kind and leave the model, the inputs and the random state as they were. A command
must end with exit code 2 and one line on stderr, and leave the directory as it was. (Those of attention and of the
losses are in tests/exact/test_attention_errors.py.)
"""

import copy
import json
import sqlite3

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import curvoscope as cv
from adapter_cases import Inside
from curvoscope import errors, estimate, solve
from curvoscope.analysis import recipes
from curvoscope.analysis.power_law import power_law
from curvoscope.autodiff.batches import BatchError
from curvoscope.distributed.ranks import RankError
from curvoscope.families.model_folders import NotAModelError
from curvoscope.papers import tasks
from curvoscope.papers.experiments import StoreError
from curvoscope.papers.networks import GPT2
from curvoscope.training.loggers import LoggerError
from matrices import within
from reference import normal

r = normal(0)
NAN, INF = float("nan"), float("inf")
SHAPE, EMPTY, DTYPE, DEVICE = errors.ShapeError, errors.EmptyError, errors.DtypeError, errors.DeviceError
RANGE, FINITE, MASK, LOSS = errors.RangeError, errors.NonFiniteError, errors.MaskError, errors.LossError
NAME, MODEL, MEMORY = errors.BlockNameError, errors.ModelError, errors.MemoryLimitError
SINGULAR, CONVERGENCE, CHANGED = errors.SingularError, errors.ConvergenceError, errors.ChangedWeightsError

X, Y = r(6, 4), r(6, 3)
NETWORK = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().requires_grad_()
OTHER, FROZEN = nn.Linear(2, 2).double(), nn.Linear(4, 3).double().requires_grad_(False)
ADAPTED = Inside(nn.Linear(4, 3)).double()
BATCHES = [(X, Y)]
MATRIX = r(9, 9)
MATRIX = MATRIX + MATRIX.T
QUERY = r(1, 2, 5, 4)
TOKENS = tasks.addition(4)


class Symmetric:
    """A plain operator."""

    symmetric, shape, dtype, device = True, (9, 9), torch.float64, torch.device("cpu")

    def __matmul__(self, other):
        return MATRIX @ other


class Product9(cv.LinearOperator):
    """A matrix as an operator of this package."""

    def __init__(self, matrix):
        super().__init__((9, 1), (9, 1), matrix, symmetric=True)
        self._matrix = matrix

    def _matmat(self, columns):
        return self._matrix @ columns


VECTOR = r(9)
ZEROED = MATRIX.clone()
ZEROED[0] = ZEROED[:, 0] = 0


class Oblong(Symmetric):
    shape = (9, 8)


class Broken(Symmetric):
    def __matmul__(self, other):
        return (MATRIX @ other) * NAN


OPERATOR = Symmetric()


def hessian(model=NETWORK, loss=mse_loss, batches=BATCHES, **options):
    return cv.hessian(model, loss, batches, **options)


def changed():
    """A product with the Hessian of a model whose weights have changed since."""
    model = copy.deepcopy(OTHER)
    H = hessian(model, batches=[(X[:, :2], Y[:, :2])])
    with torch.no_grad():
        model.weight.add_(1)
    return H @ torch.ones(6).double()


def gauge():
    return hessian(ADAPTED, blocks=cv.blocks_of(ADAPTED).select("*.[AB]")).gauge()


def analysed(function, *arguments, **options):
    return getattr(cv.analysis, function)(NETWORK, mse_loss, BATCHES, *arguments, **options)


def feedforward(**changes):
    return cv.exact.FeedForward(**({"W1": r(4, 6), "b1": r(6), "W2": r(6, 3), "b2": r(3)} | changes))


def attention(d=4):
    return cv.exact.SelfAttention(r(d, d), r(d, d), r(d, d))


def block(**changes):
    wide = cv.exact.FeedForward(r(4, 6), r(6), r(6, 4), r(4))
    return cv.exact.TransformerBlock(**({"attention": attention(), "feedforward": wide} | changes))


def monitor(model=NETWORK, loss=mse_loss, probe=BATCHES, **options):
    return cv.training.CurvatureMonitor(model, loss, probe, **options)


def optimizer(model=NETWORK, loss=mse_loss, params=None, **options):
    return cv.training.GaussNewton(model, loss, params, **options)


class TwoOutputs(nn.Module):
    """Its loss is not finite."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1e300], dtype=torch.float64))

    def forward(self, x):
        return x * self.w * 1e300


class Stopped(nn.Module):
    """Its outputs have no derivatives, as those of a model that predicts."""

    def __init__(self):
        super().__init__()
        self.inner = copy.deepcopy(NETWORK)

    @torch.no_grad()
    def forward(self, x):
        return self.inner(x)


class Scoring(nn.Module):
    """It computes its loss itself."""

    def __init__(self):
        super().__init__()
        self.inner = copy.deepcopy(NETWORK)

    def forward(self, x):
        return self.inner(x), mse_loss(self.inner(x), Y)


class Quantised(nn.Linear):
    """Its class stands where those of torch's quantised layers do."""


Quantised.__module__ = "torch.ao.nn.quantized.dynamic.modules.linear"
QUANTISED, EMBEDDING = nn.Sequential(NETWORK[:2], Quantised(5, 3).double()), nn.Embedding(3, 2)
with torch.inference_mode():
    PREDICTING = nn.Linear(4, 3).double()
NORM = cv.exact.LayerNorm(torch.ones(4).double())

CALLS = {
    # ---- solving
    "solve: singular": (lambda: Product9(ZEROED).solve(VECTOR, 0.0), SINGULAR, "damping"),
    "solve: singular, by iterations": (
        lambda: Product9(ZEROED).solve(VECTOR, 0.0, method="minres"), SINGULAR, "damping",
    ),
    "solve: indefinite given to cg": (lambda: Product9(MATRIX).solve(VECTOR, 0.0, method="cg"), RANGE, "method"),
    "solve: right-hand side of another size": (lambda: Product9(MATRIX).solve(r(8)), SHAPE, "b"),
    "solve: right-hand side not finite": (lambda: Product9(MATRIX).solve(VECTOR * NAN), FINITE, "b"),
    "solve: right-hand side of another dtype": (lambda: Product9(MATRIX).solve(VECTOR.float()), DTYPE, "b"),
    "solve: start of another shape": (lambda: Product9(MATRIX).solve(VECTOR, start=r(9, 2)), SHAPE, "start"),
    "solve: negative damping": (lambda: Product9(MATRIX).solve(VECTOR, -1.0), RANGE, "damping"),
    "solve: tolerance zero": (lambda: Product9(MATRIX).solve(VECTOR, 1.0, 0.0), RANGE, "tolerance"),
    "solve: unknown method": (lambda: Product9(MATRIX).solve(VECTOR, method="lu"), RANGE, "method"),
    "solve: unknown preconditioner": (
        lambda: Product9(MATRIX).solve(VECTOR, preconditioner="magic"), RANGE, "preconditioner",
    ),
    "solve: preconditioner that is none": (
        lambda: Product9(MATRIX).solve(VECTOR, preconditioner=0.5), DTYPE, "preconditioner",
    ),
    "solve: unknown preconditioner of a model": (
        lambda: hessian().outer["0.weight"].solve(r(20), preconditioner="magic"), RANGE, "approximations",
    ),
    "solve: one product": (lambda: Product9(MATRIX).solve(VECTOR, matvecs=1), RANGE, "matvecs"),
    "solve: not symmetric": (lambda: hessian().total["0.weight", "2.weight"].solve(VECTOR), SHAPE, "operator"),
    "solve: broken operator": (lambda: solve.Solver(Broken(), 1.0)(VECTOR), FINITE, "operator"),
    "inverse: does not converge": (
        lambda: Product9(MATRIX).inverse(0.0, method="minres", matvecs=2) @ VECTOR, CONVERGENCE, "inverse",
    ),
    "logdet: indefinite": (lambda: Product9(MATRIX).logdet(0.0), RANGE, "damping"),
    "logdet: infinite damping": (lambda: Product9(MATRIX).logdet(INF), RANGE, "damping"),
    "logdet: more steps than rows": (lambda: solve.logdet(OPERATOR, 1.0, steps=10), RANGE, "steps"),
    # ---- what solves are for
    "influence: no damping": (
        lambda: cv.analysis.influence(NETWORK, mse_loss, BATCHES, BATCHES, 0.0), RANGE, "damping",
    ),
    "influence: unknown part": (
        lambda: cv.analysis.influence(NETWORK, mse_loss, BATCHES, BATCHES, 1.0, part="functional"), RANGE, "part",
    ),
    "influence: a loss whose rows meet": (
        lambda: cv.analysis.influence(NETWORK, cv.losses.Contrastive(mse_loss), BATCHES, BATCHES, 1.0), LOSS, "loss_fn",
    ),
    "damping: too few products": (lambda: cv.analysis.damping(hessian(), matvecs=4), RANGE, "matvecs"),
    "damping: not symmetric": (lambda: cv.analysis.damping(hessian().total["0.weight", "2.weight"]), SHAPE, "H"),
    "laplace: prior zero": (lambda: cv.analysis.laplace(hessian(), 0.0), RANGE, "prior"),
    "laplace: no Hessian of a model": (lambda: cv.analysis.laplace(MATRIX, 1.0), DTYPE, "H"),
    "laplace: loss not convex": (
        lambda: cv.analysis.laplace(hessian(loss=lambda F, Y: (F - Y).pow(4).mean()), 1.0), LOSS, "H",
    ),
    "GaussNewton: learning rate zero": (lambda: optimizer(lr=0.0), RANGE, "lr"),
    "GaussNewton: betas above one": (lambda: optimizer(betas=(0.9, 1.5)), RANGE, "betas"),
    "GaussNewton: decay one": (lambda: optimizer(decay=1.0), RANGE, "decay"),
    "GaussNewton: eps negative": (lambda: optimizer(eps=-1.0), RANGE, "eps"),
    "GaussNewton: weight decay negative": (lambda: optimizer(weight_decay=-1.0), RANGE, "weight_decay"),
    "GaussNewton: every zero": (lambda: optimizer(every=0), RANGE, "every"),
    "GaussNewton: bases zero": (lambda: optimizer(bases=0), RANGE, "bases"),
    "GaussNewton: adapt negative": (lambda: optimizer(adapt=-1), RANGE, "adapt"),
    "GaussNewton: no loss": (lambda: optimizer(loss=None), MODEL, "loss_fn"),
    "GaussNewton: foreign parameters": (lambda: optimizer(params=OTHER.parameters()), MODEL, "params"),
    "GaussNewton: state of another": (lambda: optimizer().load_state_dict({"state": {}}), MODEL, "state_dict"),
    "GaussNewton: a batch without targets": (lambda: optimizer().step(X), BatchError, "batches"),
    "GaussNewton: loss nan": (lambda: optimizer().step((X * NAN, Y)), FINITE, "loss"),
    # ---- cv.hessian
    "hessian: a function in place of a model": (lambda: hessian(NETWORK.forward), MODEL, "model"),
    "hessian: a model of inference mode": (lambda: hessian(PREDICTING), MODEL, "model"),
    "hessian: a quantised layer": (lambda: hessian(QUANTISED), MODEL, "model"),
    "hessian: outputs without derivatives": (
        lambda: hessian(Stopped(), loss=nn.CrossEntropyLoss()) @ r(43), MODEL, "model",
    ),
    "hessian: names of blocks": (lambda: hessian(blocks=["0.weight"]), NAME, "blocks"),
    "hessian: classes on the last axis": (
        lambda: hessian(loss=nn.CrossEntropyLoss(), batches=[(r(2, 5, 4), torch.zeros(2, 5).long())]), SHAPE, "targets",
    ),
    "hessian: a token outside of the table": (
        lambda: hessian(EMBEDDING, batches=[(torch.tensor([3]), r(1, 2).float())]), BatchError, "batches",
    ),
    "hessian: no batches": (lambda: hessian(batches=[]), EMPTY, "batches"),
    "hessian: a generator": (lambda: hessian(batches=(b for b in BATCHES)), BatchError, "batches"),
    "hessian: batches that are no pairs": (lambda: hessian(batches=[X]), BatchError, "batches"),
    "hessian: no model": (lambda: hessian(lambda inputs: inputs), MODEL, "model"),
    "blocks_of: no model": (lambda: cv.blocks_of({}), MODEL, "model"),
    "blocks: a list of patterns": (lambda: cv.blocks_of(NETWORK).select(["0.weight"]), NAME, "patterns"),
    "hessian: batches that are a number": (lambda: hessian(batches=3), BatchError, "batches"),
    "hessian: names as blocks": (lambda: hessian(blocks=["0.weight"]), NAME, "blocks"),
    "hessian: half a row": (lambda: hessian(micro_batch=1.5), RANGE, "micro_batch"),
    "hessian: unknown device": (lambda: hessian(device="nowhere"), DEVICE, "device"),
    "hessian: a list as vector": (lambda: hessian() @ [1.0] * 43, DTYPE, "vector"),
    "hessian: a negative number of terms": (
        lambda: hessian(loss=cv.losses.MeanLoss(mse_loss, lambda F, Y: -1)), RANGE, "terms",
    ),
    "hessian: a number of terms that is none": (
        lambda: hessian(loss=cv.losses.MeanLoss(mse_loss, lambda F, Y: "4")), RANGE, "terms",
    ),
    "MeanLoss: terms that are no function": (lambda: cv.losses.MeanLoss(mse_loss, 4), LOSS, "terms"),
    "CrossEntropy: ignore_index that is no number": (
        lambda: cv.losses.CrossEntropy(ignore_index=None), LOSS, "ignore_index",
    ),
    "CrossEntropy: an axis that logits do not have": (
        lambda: hessian(loss=cv.losses.CrossEntropy(axis=5), batches=[(X, torch.zeros(6).long())]), LOSS, "axis",
    ),
    "gradients: half a sample": (lambda: hessian().gradient_source("0.weight", samples=1.5), RANGE, "samples"),
    "gradients: seed that is no number": (
        lambda: hessian().gradient_source("0.weight", samples=2, seed="a"), RANGE, "seed",
    ),
    "hessian: unknown method": (lambda: hessian(method="fast"), RANGE, "method"),
    "hessian: unknown split": (lambda: hessian(split="head"), RANGE, "split"),
    "hessian: unknown hvp": (lambda: hessian(hvp="forward"), RANGE, "hvp"),
    "hessian: unknown recompute": (lambda: hessian(recompute="block"), RANGE, "recompute"),
    "hessian: nothing to recompute": (lambda: hessian(recompute="layer"), MODEL, "recompute"),
    "settings: no scratch folder": (lambda: cv.settings(scratch="no/such/folder").__enter__(), RANGE, "scratch"),
    "hessian: compiled differences": (lambda: hessian(hvp="difference", compile=True), MODEL, "compile"),
    "hessian: weights that have changed": (changed, CHANGED, "model"),
    "hessian: no closed form": (lambda: hessian(method="exact")["0.weight"].trace(), MODEL, None),
    "hessian: frozen model": (lambda: hessian(FROZEN), EMPTY, "model"),
    "hessian: no parameters": (lambda: hessian(nn.Tanh(), batches=[(X, X)]), EMPTY, "model"),
    "hessian: micro_batch zero": (lambda: hessian(micro_batch=0), RANGE, "micro_batch"),
    "hessian: loss not a scalar": (lambda: hessian(loss=lambda F, Y: (F - Y) ** 2).loss, LOSS, "loss_fn"),
    "hessian: loss not finite": (lambda: hessian(TwoOutputs(), batches=[(X, X)]).loss, FINITE, None),
    "hessian: loss detached": (lambda: hessian(loss=lambda F, Y: F.detach().mean()) @ r(43), LOSS, "loss_fn"),
    "hessian: loss that mixes rows": (
        lambda: hessian(loss=lambda F, Y: (F - F.mean(0)).square().mean(), micro_batch=2),
        LOSS,
        "loss_fn",
    ),
    "hessian: loss with reduction none": (lambda: hessian(loss=nn.MSELoss(reduction="none")), LOSS, "loss_fn"),
    "hessian: contrastive, cut, by differences": (
        lambda: hessian(loss=cv.losses.Contrastive(mse_loss), micro_batch=2, hvp="difference"),
        MODEL,
        "micro_batch",
    ),
    "hessian: penalty not a scalar": (
        lambda: hessian(loss=cv.losses.Regularised(mse_loss, lambda parameters: parameters["0.weight"])),
        LOSS,
        "penalty",
    ),
    "hessian: penalty without a loss": (lambda: cv.losses.Regularised(None, lambda parameters: X.sum()), LOSS, "loss"),
    "hessian: loss with other targets": (lambda: hessian(loss=cv.losses.MSE(Y + 1)), LOSS, "loss_fn"),
    "hessian: loss with targets of all batches": (
        lambda: hessian(loss=cv.losses.MSE(Y), batches=[(X[:2], Y[:2]), (X[2:], Y[2:])]), LOSS, "loss_fn",
    ),
    "hessian: loss with targets of another length": (
        lambda: hessian(loss=cv.losses.MSE(Y[:5]), batches=[(X, None)]), SHAPE, "Y",
    ),
    "hessian: loss without targets": (lambda: hessian(loss=cv.losses.MSE(), batches=[(X, None)]), LOSS, "targets"),
    "hessian: loss of a layer": (lambda: hessian(loss=lambda F: F.mean()), LOSS, "loss_fn"),
    "hessian: loss that is a name": (lambda: hessian(loss="mse"), LOSS, "loss_fn"),
    "hessian: unembedding of another width": (
        lambda: hessian(loss=cv.losses.CrossEntropy(unembedding=r(2, 7)), batches=[(X, torch.arange(6))]),
        SHAPE,
        "unembedding",
    ),
    "hessian: own loss of a model without one": (lambda: hessian(loss=None), LOSS, "loss_fn"),
    "hessian: blocks of another model": (
        lambda: hessian(blocks=cv.blocks_of(OTHER)), MODEL, "model",
    ),
    "hessian: unknown block": (lambda: hessian()["h.0.attn.Q"], NAME, "block"),
    "hessian: vector of another size": (lambda: hessian() @ r(42), SHAPE, None),
    "hessian: vector with nan": (lambda: hessian() @ (r(43) * NAN), FINITE, None),
    "hessian: integer vector": (lambda: hessian() @ torch.ones(43, dtype=torch.int64), DTYPE, None),
    "hessian: dense past the limit": (lambda: within(100, hessian().dense), MEMORY, "memory_limit"),
    "hessian: memory_limit negative": (lambda: within(-1, hessian().dense), RANGE, "memory_limit"),
    "hessian: uninitialised group": (lambda: hessian(process_group="world"), RankError, "process_group"),
    "gauge: no adapter": (lambda: hessian().gauge(), EMPTY, "blocks"),
    "gauge: unknown weight": (lambda: gauge().direction("h.0.attn.K", torch.eye(2).double()), NAME, "name"),
    "gauge: xi of another rank": (lambda: gauge().direction("weight", r(3, 3)), SHAPE, "xi"),
    "gauge: xi in float32": (lambda: gauge().direction("weight", torch.eye(2)), DTYPE, "xi"),
    "gauge: short gradient": (lambda: gauge().response("weight", r(2, 2), r(3)), SHAPE, "gradient"),
    "gauge: short vectors": (lambda: gauge().removed(r(3)), SHAPE, "vectors"),
    "gauge: operator of one block": (lambda: gauge().projected(hessian()["0.bias"]), SHAPE, "operator"),
    "LayerScale: a matrix": (lambda: cv.exact.LayerScale(r(2, 2)), SHAPE, "scale"),
    "LayerScale: input of another width": (lambda: cv.exact.LayerScale(r(2))(r(3, 4)), SHAPE, "X"),
    "blocks: of a name": (lambda: cv.blocks_of("gpt2"), MODEL, "model"),
    "blocks: of a batch without rows": (lambda: cv.blocks_of(NETWORK, X[:0]), EMPTY, "batch"),
    "blocks: of a batch of lists": (lambda: cv.blocks_of(NETWORK, ([[1.0]], Y)), BatchError, "batch"),
    "blocks: of weights without data": (lambda: cv.blocks_of(nn.Linear(2, 2, device="meta"), r(1, 2)), DEVICE, "model"),
    "blocks: nothing selected": (lambda: cv.blocks_of(NETWORK).select("attn"), NAME, None),
    # ---- estimates
    "trace: not square": (lambda: estimate.trace(Oblong()), SHAPE, "operator"),
    "trace: no products": (lambda: estimate.trace(OPERATOR, matvecs=0), RANGE, "matvecs"),
    "trace: tolerance zero": (lambda: estimate.trace(OPERATOR, tolerance=0.0), RANGE, "tolerance"),
    "trace: tolerance nan": (lambda: estimate.trace(OPERATOR, tolerance=NAN), RANGE, "tolerance"),
    "trace: unknown method": (lambda: estimate.trace(OPERATOR, method="magic"), RANGE, "method"),
    "trace: operator gives nan": (lambda: estimate.trace(Broken()), FINITE, None),
    "norm: no products": (lambda: estimate.frobenius_norm(OPERATOR, matvecs=-3), RANGE, "matvecs"),
    "norm: unknown method": (lambda: estimate.frobenius_norm(OPERATOR, method="magic"), RANGE, "method"),
    "diagonal: not square": (lambda: estimate.diagonal(Oblong()), SHAPE, "operator"),
    "diagonal: no products": (lambda: estimate.diagonal(OPERATOR, matvecs=0), RANGE, "matvecs"),
    "density: not square": (lambda: estimate.density(Oblong()), SHAPE, "operator"),
    "density: no products": (lambda: estimate.density(OPERATOR, matvecs=0), RANGE, "matvecs"),
    "lanczos: no eigenvalues": (lambda: estimate.lanczos(OPERATOR, 0), RANGE, "k"),
    "lanczos: more than there are": (lambda: estimate.lanczos(OPERATOR, 10), RANGE, "k"),
    "lanczos: unknown end": (lambda: estimate.lanczos(OPERATOR, 1, "XX"), RANGE, "which"),
    "lanczos: start of another size": (lambda: estimate.lanczos(OPERATOR, 1, start=r(8)), SHAPE, "start"),
    "lanczos: operator gives nan": (lambda: estimate.lanczos(Broken(), 1), FINITE, None),
    # ---- closed forms
    "feed-forward: W1 of one dimension": (lambda: feedforward(W1=r(6)), SHAPE, "W1"),
    "feed-forward: W2 of other rows": (lambda: feedforward(W2=r(5, 3)), SHAPE, "W2"),
    "feed-forward: bias of another length": (lambda: feedforward(b1=r(5)), SHAPE, "b1"),
    "feed-forward: unknown activation": (lambda: feedforward(activation="swish2"), RANGE, "activation"),
    "feed-forward: nan": (lambda: feedforward(W2=r(6, 3) * NAN), FINITE, "W2"),
    "feed-forward: gate of another shape": (lambda: feedforward(W_gate=r(4, 5)), SHAPE, "W_gate"),
    "feed-forward: X of another width": (lambda: feedforward().hessian(r(2, 5), cv.losses.MSE(r(2, 3))), SHAPE, "X"),
    "feed-forward: X empty": (lambda: feedforward().hessian(r(0, 4), cv.losses.MSE(r(1, 3))), EMPTY, "X"),
    "feed-forward: MSE without targets": (lambda: feedforward().hessian(X, cv.losses.MSE()), LOSS, "loss"),
    "feed-forward: cross-entropy without targets": (
        lambda: feedforward().hessian(X, cv.losses.CrossEntropy(unembedding=r(3, 7))), LOSS, "loss",
    ),
    "feed-forward: loss of a model": (lambda: feedforward().hessian(X, mse_loss), LOSS, "loss"),
    "feed-forward: loss with a penalty": (
        lambda: feedforward().hessian(X, cv.losses.Regularised(mse_loss, lambda parameters: X.sum())), LOSS, "loss",
    ),
    "feed-forward: classes on the first axis": (
        lambda: feedforward().hessian(X, cv.losses.CrossEntropy(torch.arange(6) % 3, axis=1)), None, None,
    ),
    "cross-entropy: targets a number": (lambda: cv.losses.CrossEntropy(0), LOSS, "targets"),
    "cross-entropy: classes first, and an unembedding": (
        lambda: cv.losses.CrossEntropy(unembedding=r(3, 7), axis=1), LOSS, "axis",
    ),
    "layer norm: gamma a matrix": (lambda: cv.exact.LayerNorm(r(4, 4)), SHAPE, "gamma"),
    "layer norm: beta of another length": (lambda: cv.exact.LayerNorm(r(4), r(5)), SHAPE, "beta"),
    "layer norm: eps negative": (lambda: cv.exact.LayerNorm(r(4), eps=-1.0), RANGE, "eps"),
    "layer norm: eps nan": (lambda: cv.exact.LayerNorm(r(4), eps=NAN), RANGE, "eps"),
    "layer norm: constant token without eps": (
        lambda: cv.exact.LayerNorm(r(4), eps=0.0).jacobian(torch.ones(2, 4).double()), None, None,
    ),
    "rms norm: gamma integer": (lambda: cv.exact.RMSNorm(torch.ones(4, dtype=torch.int64)), DTYPE, "gamma"),
    "query-key norm: gamma a matrix": (lambda: cv.exact.QueryKeyNorm(r(4, 4)), SHAPE, "gamma"),
    "query-key norm: beta of another length": (lambda: cv.exact.QueryKeyNorm(r(4), r(3)), SHAPE, "beta"),
    "query-key norm: eps negative": (lambda: cv.exact.QueryKeyNorm(r(4), eps=-1.0), RANGE, "eps"),
    "query-key norm: width no divisor": (lambda: cv.exact.QueryKeyNorm(r(4), width=3), RANGE, "width"),
    "query-key norm: features no multiple": (lambda: cv.exact.QueryKeyNorm(r(4))(r(2, 6)), SHAPE, "gamma"),
    "mlp: no layers": (lambda: cv.exact.LinearMLP([]), EMPTY, "weights"),
    "mlp: layers that do not meet": (lambda: cv.exact.LinearMLP([r(4, 3), r(4, 2)]), SHAPE, None),
    "block: unknown placement": (lambda: block(placement="after"), RANGE, "placement"),
    "block: norm where none has a place": (lambda: block(norm1=NORM, placement="none"), RANGE, None),
    "block: norms missing": (lambda: block(placement="pre"), RANGE, None),
    "block: widths that differ": (lambda: block(attention=attention(5)), SHAPE, None),
    "scalar: weights of other lengths": (lambda: cv.exact.ScalarAttention(r(3), r(4), 1.0), SHAPE, None),
    # ---- attention for second derivatives
    "sdpa: key of another width": (lambda: cv.attention.sdpa(QUERY, r(1, 2, 5, 3), QUERY), SHAPE, "key"),
    "sdpa: value of another length": (lambda: cv.attention.sdpa(QUERY, QUERY, r(1, 2, 4, 4)), SHAPE, "value"),
    "sdpa: mask of another size": (
        lambda: cv.attention.sdpa(QUERY, QUERY, QUERY, torch.ones(4, 4, dtype=torch.bool)), MASK, "attn_mask",
    ),
    "sdpa: integer mask": (
        lambda: cv.attention.sdpa(QUERY, QUERY, QUERY, torch.ones(5, 5, dtype=torch.int64)), None, "attn_mask",
    ),
    "sdpa: dropout": (lambda: cv.attention.sdpa(QUERY, QUERY, QUERY, dropout_p=0.1), RANGE, "dropout_p"),
    "sdpa: mask and causal": (
        lambda: cv.attention.sdpa(QUERY, QUERY, QUERY, torch.ones(5, 5, dtype=torch.bool), is_causal=True), None, None,
    ),
    "sdpa: scale nan": (lambda: cv.attention.sdpa(QUERY, QUERY, QUERY, scale=NAN), RANGE, "scale"),
    "sdpa: heads that do not divide": (
        lambda: cv.attention.sdpa(r(1, 4, 5, 4), r(1, 3, 5, 4), r(1, 3, 5, 4), enable_gqa=True), SHAPE, None,
    ),
    "sdpa: mixed dtypes": (lambda: cv.attention.sdpa(QUERY, QUERY.float(), QUERY), DTYPE, "key"),
    # ---- data and models
    "addition: no sequences": (lambda: tasks.addition(0), RANGE, "sequences"),
    "addition: no digits": (lambda: tasks.addition(4, digits=0), RANGE, "digits"),
    "gpt2: no width": (lambda: GPT2(d=0), RANGE, "d"),
    "gpt2: unknown norm": (lambda: GPT2(norm="post2"), RANGE, "norm"),
    # ---- analysis
    "taylor: unknown direction": (lambda: analysed("taylor", "sideways"), RANGE, "direction"),
    "taylor: direction of another size": (lambda: analysed("taylor", r(42)), SHAPE, "direction"),
    "taylor: zero direction": (lambda: analysed("taylor", torch.zeros(43).double()), RANGE, "direction"),
    "taylor: direction with nan": (lambda: analysed("taylor", r(43) * NAN), FINITE, "direction"),
    "taylor: radii that fall": (lambda: analysed("taylor", radii=[1.0, 0.5]), RANGE, "radii"),
    "taylor: radii negative": (lambda: analysed("taylor", radii=[-1.0, 0.5]), RANGE, "radii"),
    "taylor: tolerance above one": (lambda: analysed("taylor", tolerance=2.0), RANGE, "tolerance"),
    "divergence: no steps": (lambda: analysed("divergence", steps=0), RANGE, "steps"),
    "divergence: no kick": (lambda: analysed("divergence", kick=0.0), RANGE, "kick"),
    "divergence: negative rates": (lambda: analysed("divergence", [-0.1]), RANGE, "learning_rates"),
    "landscape: three directions": (lambda: analysed("landscape", ["top", "bottom", "random"]), SHAPE, "directions"),
    "landscape: parallel directions": (lambda: analysed("landscape", ["top", "top"]), RANGE, "directions"),
    "landscape: even points": (lambda: analysed("landscape", points=4), RANGE, "points"),
    "landscape: radius zero": (lambda: analysed("landscape", radius=0.0), RANGE, "radius"),
    "convergence: negative distance": (lambda: analysed("convergence", distances=[-1.0]), RANGE, "distances"),
    "convergence: no orders": (lambda: analysed("convergence", orders=0), RANGE, "orders"),
    "convergence: batches too large": (lambda: analysed("convergence", batch=5), EMPTY, "batches"),
    "convergence: smoothness zero": (lambda: analysed("convergence", smoothness=0.0), RANGE, "smoothness"),
    "data sufficiency: tolerance zero": (lambda: analysed("data_sufficiency", 0.0), RANGE, "tolerance"),
    "data sufficiency: level one": (lambda: analysed("data_sufficiency", 0.1, level=1.0), RANGE, "level"),
    "data sufficiency: negative distance": (
        lambda: analysed("data_sufficiency", 0.1, distance=-1.0), RANGE, "distance",
    ),
    "scaling: two sizes": (lambda: cv.analysis.scaling(lambda size, seed: None, [1, 2]), EMPTY, "sizes"),
    "scaling: size zero": (lambda: cv.analysis.scaling(lambda size, seed: None, [0, 1, 2]), RANGE, "sizes"),
    "scaling: no seeds": (lambda: cv.analysis.scaling(lambda size, seed: None, [1, 2, 3], []), EMPTY, "seeds"),
    "power law: two sizes": (lambda: power_law({1: [1.0], 2: [2.0]}), EMPTY, "measurements"),
    "power law: a negative value": (lambda: power_law({1: [1.0], 2: [2.0], 3: [-1.0]}), RANGE, "measurements"),
    "power law: a size without values": (lambda: power_law({1: [1.0], 2: [2.0], 3: []}), EMPTY, "measurements"),
    "power law: nan": (lambda: power_law({1: [1.0], 2: [2.0], 3: [NAN]}), FINITE, "measurements"),
    "required data: target zero": (
        lambda: cv.analysis.required_data({1: [1.0], 2: [2.0], 4: [4.1]}, 0.0), RANGE, "target",
    ),
    "required data: far beyond the data": (
        lambda: cv.analysis.required_data({1: [1.0], 2: [2.0], 4: [4.1]}, 1e9), RANGE, None,
    ),
    "findings: learning rate zero": (lambda: cv.analysis.Findings(learning_rate=0.0), RANGE, "learning_rate"),
    "findings: momentum one": (lambda: cv.analysis.Findings(momentum=1.0), RANGE, "momentum"),
    "propagation: no layers known": (lambda: cv.analysis.propagation(NETWORK, (X, Y), mse_loss), MODEL, "model"),
    # ---- changes of the weights
    "sensitivity: no change": (lambda: analysed("sensitivity", NETWORK), EMPTY, "changed"),
    "sensitivity: a number": (lambda: analysed("sensitivity", 1.0), MODEL, "changed"),
    "sensitivity: another architecture": (lambda: analysed("sensitivity", OTHER), MODEL, "changed"),
    "sensitivity: another shape": (
        lambda: analysed("sensitivity", NETWORK.state_dict() | {"0.weight": r(5, 3)}), SHAPE, "changed",
    ),
    "sensitivity: a tensor missing": (lambda: analysed("sensitivity", {"0.weight": r(5, 4)}), MODEL, "changed"),
    "sensitivity: integers": (
        lambda: analysed("sensitivity", NETWORK.state_dict() | {"2.bias": torch.ones(3, dtype=torch.int8)}),
        DTYPE,
        "changed",
    ),
    "sensitivity: nan": (
        lambda: analysed("sensitivity", NETWORK.state_dict() | {"2.bias": r(3) * NAN}), FINITE, "changed",
    ),
    "sensitivity: overflow": (
        lambda: analysed("sensitivity", NETWORK.state_dict() | {"2.bias": r(3) * 1e200}), FINITE, "changed",
    ),
    "sensitivity: a folder that is not there": (lambda: analysed("sensitivity", "nowhere"), NotAModelError, "model"),
    "sensitivity: unknown unit": (lambda: analysed("sensitivity", recipes.int4, unit="token"), RANGE, "unit"),
    "sensitivity: scale nan": (lambda: analysed("sensitivity", recipes.int4, scales=[NAN]), RANGE, "scales"),
    "recipes: a group that does not divide": (lambda: recipes.int4(NETWORK, group=3), SHAPE, "group"),
    "recipes: no group": (lambda: recipes.int4(NETWORK, group=0), RANGE, "group"),
    "recipes: four do not divide five": (lambda: recipes.prune_2_4(NETWORK), SHAPE, "model"),
    "recipes: share": (lambda: recipes.prune(NETWORK, 2.0), RANGE, "share"),
    "recipes: no heads": (lambda: recipes.drop_heads(NETWORK), EMPTY, "model"),
    "recipes: no such block": (lambda: recipes.mix(NETWORK, {"9.weight": recipes.int4}), NAME, "blocks"),
    "menu: no formats": (lambda: analysed("menu", {}), EMPTY, "formats"),
    "allocate: budget too small": (
        lambda: cv.analysis.allocate(analysed("menu", {"int4": (recipes.int4, 4.0)}), 3.0), RANGE, "budget",
    ),
    "surgeon: another size": (lambda: cv.analysis.surgeon(hessian().outer, "2.bias", r(4)), SHAPE, "delta"),
    "surgeon: a mask of numbers": (
        lambda: cv.analysis.surgeon(hessian().outer, "2.bias", r(3), r(3)), SHAPE, "fixed",
    ),
    "surgeon: negative damping": (
        lambda: cv.analysis.surgeon(hessian().outer, "2.bias", r(3), damping=-1.0), RANGE, "damping",
    ),
    "surgeon: no step": (
        lambda: cv.analysis.round_and_repair(hessian().outer, "2.weight", r(3, 5), lambda i, w: w, 0), RANGE, "step",
    ),
    "gptq: another gram": (lambda: cv.analysis.gptq(r(3, 5), r(4, 4), lambda i, w: w), SHAPE, "gram"),
    # ---- approximations
    "kfac: of a bias": (lambda: cv.approximations.kfac(hessian(), "0.bias"), MODEL, "block"),
    "kfac: unknown sharing": (
        lambda: cv.approximations.kfac(hessian(), "0.weight", sharing="mean"), RANGE, "sharing",
    ),
    "kfac: no name": (lambda: cv.approximations.kfac(hessian()), EMPTY, "name"),
    "kfac: unknown block": (lambda: cv.approximations.kfac(hessian(), "h.0.attn.Q"), NAME, "block"),
    "gradient_source: no samples": (lambda: hessian().gradient_source("0.weight", samples=0), RANGE, "samples"),
    "kfac: of a number": (lambda: cv.approximations.kfac(1.0), DTYPE, "H"),
    "kfac: of a functional part": (
        lambda: cv.approximations.kfac(attention().hessian(X, cv.losses.MSE(r(6, 4))).total, "Q"), MODEL, "part",
    ),
    "kfac: of a sweep that keeps nothing": (
        lambda: cv.approximations.kfac(cv.sweep(NETWORK, mse_loss, BATCHES, samples=8, keep=()), "0.weight"),
        MODEL,
        "name",
    ),
    "heads: of a weight without": (lambda: cv.approximations.heads(hessian(), "0.weight"), RANGE, "block"),
    "layers: of one weight": (
        lambda: cv.approximations.layers(cv.approximations.source_of(hessian(), "0.weight")), MODEL, "block",
    ),
    "kronecker: rank zero": (lambda: cv.approximations.kronecker(hessian(), "0.weight", rank=0), RANGE, "rank"),
    "kronecker: more terms than there are": (
        lambda: cv.approximations.kronecker(hessian(), "0.weight", rank=17), RANGE, "rank",
    ),
    "kronecker: a rank that is not whole": (
        lambda: cv.approximations.kronecker(hessian(), "0.weight", rank=2.0), RANGE, "rank",
    ),
    "shampoo: unknown power": (lambda: cv.approximations.shampoo(hessian(), "0.weight", power=1), RANGE, "power"),
    "kl_shampoo: no damping": (
        lambda: cv.approximations.kl_shampoo(hessian(), "0.weight", damping=0.0), RANGE, "damping",
    ),
    "kl_shampoo: damping infinite": (
        lambda: cv.approximations.kl_shampoo(hessian(), "0.weight", damping=float("inf")), RANGE, "damping",
    ),
    "diagonal: of a block off the diagonal": (
        lambda: cv.approximations.diagonal(attention().hessian(X, cv.losses.MSE(r(6, 4))).outer["Q", "K"]), SHAPE, "H",
    ),
    "kfac: a name that is a number": (lambda: cv.approximations.kfac(hessian(), 3), DTYPE, "name"),
    "layers: a text": (lambda: cv.approximations.layers(hessian(), "0.weight"), NAME, "names"),
    "joined: nothing": (lambda: cv.approximations.joined([]), EMPTY, "sources"),
    "empirical: no labels": (lambda: cv.approximations.empirical(hessian(), "0.weight"), MODEL, "approximation"),
    "approximation: unknown name": (
        lambda: cv.approximations.approximation(hessian(), "adam", "0.weight"), RANGE, "approximations",
    ),
    "approximation: a name that is a number": (
        lambda: cv.approximations.approximation(hessian(), 4, "0.weight"), DTYPE, "approximations",
    ),
    "approximation: option that is no number": (
        lambda: cv.approximations.approximation(hessian(), "kronecker:two", "0.weight"), RANGE, "approximations",
    ),
    "approximation: damping negative": (
        lambda: cv.approximations.kfac(hessian(), "0.weight").solve(r(20), -1.0), RANGE, "damping",
    ),
    "approximation: singular without damping": (
        lambda: cv.approximations.kfac(hessian(batches=[(X[:1], Y[:1])]), "0.weight").solve(r(20), 0.0),
        SINGULAR,
        "damping",
    ),
    "approximation: right side of another size": (
        lambda: cv.approximations.diagonal(hessian(), "0.weight").solve(r(19), 1.0), SHAPE, "b",
    ),
    "factors: a folder without": (
        lambda: cv.approximations.read_factors("nowhere", NETWORK), cv.CurvoscopeError, "folder",
    ),
    "factors: unknown kind": (lambda: cv.approximations.read_factors(".", NETWORK, kind="adam"), RANGE, "kind"),
    "audit: unknown block": (lambda: cv.analysis.audit(hessian(), ["0.weights"]), NAME, "blocks"),
    "audit: heads of a bias": (lambda: cv.analysis.audit(hessian(), ["0.bias"], ["heads"]), RANGE, "block"),
    "audit: unknown part": (lambda: cv.analysis.audit(hessian(), part="inner"), RANGE, "part"),
    "audit: damping negative": (lambda: cv.analysis.audit(hessian(), damping=-1.0), RANGE, "damping"),
    "audit: singular without damping": (
        lambda: cv.analysis.audit(hessian(), ["0.weight"], ["kfac"], damping=0.0), RANGE, "damping",
    ),
    "audit: damping infinite": (lambda: cv.analysis.audit(hessian(), damping=float("inf")), RANGE, "damping"),
    "audit: damping of a sweep": (
        lambda: cv.analysis.audit(cv.sweep(NETWORK, mse_loss, BATCHES, samples=8, keep=["*"]), damping=0.1),
        RANGE,
        "damping",
    ),
    "audit: a sweep of few samples": (
        lambda: cv.analysis.audit(cv.sweep(NETWORK, mse_loss, BATCHES, samples=16, keep=["*"])), RANGE, "samples",
    ),
    "audit: operator of another size": (
        lambda: cv.analysis.audit(hessian(), ["0.weight"], [hessian()["0.bias"]]), SHAPE, "approximations",
    ),
    "audit: approximation that is a number": (
        lambda: cv.analysis.audit(hessian(), ["0.weight"], [1.0]), DTYPE, "approximations",
    ),
    "audit: a dictionary of names": (
        lambda: cv.analysis.audit(hessian(), ["0.weight"], [{"0.weight": "kfac"}]), DTYPE, "approximations",
    ),
    "audit: a block that is a number": (lambda: cv.analysis.audit(hessian(), [0]), DTYPE, "blocks"),
    "audit: a block twice in one weight": (
        lambda: cv.analysis.audit(hessian(), [("0.weight", "0.weight")]), NAME, "blocks",
    ),
    "sampled audit: a text": (lambda: cv.analysis.SampledAudit("kfac"), DTYPE, "approximations"),
    "sampled audit: groups of one name": (
        lambda: cv.analysis.SampledAudit(["kfac"], groups=["0.weight"]), DTYPE, "groups",
    ),
    "audit: sweep that keeps nothing": (
        lambda: cv.analysis.audit(cv.sweep(NETWORK, mse_loss, BATCHES, samples=8, keep=())), EMPTY, "sweep",
    ),
    "audit: total of a sweep": (
        lambda: cv.analysis.audit(cv.sweep(NETWORK, mse_loss, BATCHES, samples=8, keep=["*"]), part="total"),
        RANGE,
        "part",
    ),
    "block-diagonal: one block": (lambda: cv.analysis.block_diagonal_error(hessian(), ["0.weight"]), EMPTY, "blocks"),
    "sweep: outputs without derivatives": (
        lambda: cv.sweep(Stopped(), nn.CrossEntropyLoss(), BATCHES, samples=8), MODEL, "model",
    ),
    "sweep: a loss that the model computes": (
        lambda: cv.sweep(Scoring(), lambda outputs, _: outputs[1], BATCHES, samples=8), LOSS, "loss_fn",
    ),
    "sweep: names of blocks": (lambda: cv.sweep(NETWORK, mse_loss, BATCHES, blocks="*"), NAME, "blocks"),
    "block-diagonal: of nothing": (lambda: cv.analysis.block_diagonal_error(None), DTYPE, "H"),
    "block-diagonal: an empty group": (
        lambda: cv.analysis.block_diagonal_error(hessian(), ["0.weight", ()]), EMPTY, "blocks",
    ),
    "block-diagonal: a block twice": (
        lambda: cv.analysis.block_diagonal_error(hessian(), ["0.weight", "0.weight"]), NAME, "blocks",
    ),
    "sweep: keep what is not there": (
        lambda: cv.sweep(NETWORK, mse_loss, BATCHES, samples=8, keep=["h.*"]), NAME, "patterns",
    ),
    # ---- training
    "monitor: every zero": (lambda: monitor(every=0), RANGE, "every"),
    "monitor: budget zero": (lambda: monitor(budget=0.0), RANGE, "budget"),
    "monitor: budget above one": (lambda: monitor(budget=1.5), RANGE, "budget"),
    "monitor: budget nan": (lambda: monitor(budget=NAN), RANGE, "budget"),
    "monitor: too few products": (lambda: monitor(matvecs=4), RANGE, "matvecs"),
    "monitor: empty probe": (lambda: monitor(probe=[]), EMPTY, "probe"),
    "monitor: a logger that cannot log": (lambda: monitor(logger=3), LoggerError, "logger"),
    "monitor: an unknown logger": (lambda: monitor(logger="comet"), RANGE, "logger"),
    "monitor: a logger without a run": (lambda: monitor(logger="tensorboard"), LoggerError, "logger"),
    "monitor: no learning rate": (lambda: monitor().step(0.5), RANGE, "lr"),
    "monitor: learning rate nan": (lambda: monitor().step(0.5, NAN), RANGE, "lr"),
    "monitor: blocks of another model": (
        lambda: monitor(blocks=cv.blocks_of(OTHER)), MODEL, "model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call, kind, argument", CALLS.values(), ids=CALLS)
def test_calls(call, kind, argument):
    before = [p.detach().clone() for p in NETWORK.parameters()], X.clone(), MATRIX.clone(), torch.get_rng_state()
    with pytest.raises(kind or cv.CurvoscopeError) as caught:
        call()
    assert isinstance(caught.value, cv.CurvoscopeError)
    assert str(caught.value).startswith(f"{caught.value.argument}: ") and caught.value.argument.isidentifier()
    assert argument is None or caught.value.argument == argument
    after = [p.detach() for p in NETWORK.parameters()], X, MATRIX, torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))
    assert all(p.grad is None and p.requires_grad for p in NETWORK.parameters())


COMMANDS = {
    "analyze: a model that is not there": ("analyze nowhere", "model"),
    "analyze: a file that is no model": ("analyze plain.txt", "model"),
    "analyze: a folder without a configuration": ("analyze folder", "model"),
    "analyze: options of the other kind": ("analyze gpt2-tiny --d 8", "d"),
    "analyze: blocks that the default has not": ("analyze --blocks h.9.*", "blocks"),
    "analyze: no width": ("analyze --d 0", "d"),
    "analyze: no sequences": ("analyze --sequences 0", "sequences"),
    "analyze: nothing selected": ("analyze gpt2-tiny --blocks nothing", "blocks"),
    "analyze: tolerance zero": ("analyze gpt2-tiny --tolerance 0", "tolerance"),
    "analyze: tolerance and products": ("analyze gpt2-tiny --tolerance 0.1 --matvecs 8", "tolerance"),
    "analyze: one product": ("analyze gpt2-tiny --matvecs 1", "matvecs"),
    "analyze: text that is not there": ("analyze gpt2-tiny --text nowhere.txt", "text"),
    "analyze: empty text": ("analyze gpt2-tiny --text empty.txt", "text"),
    "analyze: length zero": ("analyze gpt2-tiny --length 0", "length"),
    "analyze: longer than the model": ("analyze gpt2-tiny --length 100000", "length"),
    "analyze: text for images": ("analyze vit-tiny --text plain.txt", "text"),
    "analyze: another task than the model's": ("analyze gpt2-tiny --task masked", "task"),
    "analyze: a task for addition": ("analyze addition --task causal", "task"),
    "analyze: targets for addition": ("analyze addition --targets random", "targets"),
    "analyze: targets that are not there": ("analyze vit-tiny --targets nowhere.txt", "targets"),
    "analyze: targets that are no numbers": ("analyze vit-tiny --sequences 1 --targets plain.txt", "targets"),
    "analyze: targets for a text": ("analyze gpt2-tiny --targets plain.txt", "targets"),
    "analyze: out is a file": ("analyze --out plain.txt", "out"),
    "audit: a model that is not there": ("audit nowhere", "model"),
    "audit: nothing selected": ("audit --blocks nothing", "blocks"),
    "audit: few samples": ("audit --samples 31", "samples"),
    "audit: unknown approximation": ("audit --d 4 --sequences 2 --approximations adam", "approximations"),
    "audit: heads of a feed-forward layer": (
        "audit --d 4 --sequences 2 --blocks h.0.mlp.up --approximations heads",
        "block",
    ),
    "audit: out is a file": ("audit --out plain.txt", "out"),
    "spectrum: a model that is not there": ("spectrum nowhere", "model"),
    "spectrum: no products": ("spectrum --matvecs 0", "matvecs"),
    "spectrum: nothing selected": ("spectrum --blocks nothing", "blocks"),
    "spectrum: out is a file": ("spectrum --out plain.txt", "out"),
    "sensitivity: nothing that changes": ("sensitivity addition", "changed"),
    "sensitivity: two changes": ("sensitivity addition --recipe int4 --prune 0.5", "changed"),
    "sensitivity: unknown recipe": ("sensitivity addition --recipe int5", "recipe"),
    "sensitivity: a group without a recipe": ("sensitivity addition --prune 0.5 --group 4", "group"),
    "sensitivity: asymmetric floating point": ("sensitivity addition --recipe fp8 --asymmetric", "asymmetric"),
    "sensitivity: a group that does not divide": ("sensitivity addition --d 4 --recipe int4 --group 3", "group"),
    "sensitivity: share above one": ("sensitivity addition --d 4 --sequences 2 --prune 1.5", "share"),
    "sensitivity: a folder that is not there": ("sensitivity addition nowhere", "model"),
    "sensitivity: budget too small": ("sensitivity addition --d 4 --recipe int4 --group 4 --budget 2", "budget"),
    "sensitivity: nothing selected": ("sensitivity addition --recipe int4 --blocks nothing", "blocks"),
    "watch: no steps": ("watch --steps 0", "steps"),
    "watch: unknown optimizer": ("watch --optimizer lion", "optimizer"),
    "watch: learning rate zero": ("watch --lr 0", "lr"),
    "watch: every zero": ("watch --every 0", "every"),
    "watch: budget zero": ("watch --budget 0", "budget"),
    "watch: no run to resume": ("watch --resume --out folder", "resume"),
    "watch: unknown logger": ("watch --logger comet --out made", "logger"),
    "watch: no width": ("watch --d 0", "d"),
    "watch: out is a file": ("watch --out plain.txt", "out"),
    "reproduce: a figure that is not there": ("reproduce fig9", "NAME"),
    "reproduce: no jobs": ("reproduce scalar --quick --jobs 0", "jobs"),
    "reproduce: store of another program": ("reproduce scalar --quick --store other.sqlite", "store"),
    "reproduce: store that is no database": ("reproduce scalar --quick --store plain.txt", "store"),
    "reproduce: out is a file": ("reproduce scalar --quick --out plain.txt", "out"),
    "export: a run that is not there": ("export nowhere", "RUN"),
    "export: unknown format": ("export folder --format xls", "format"),
    "export: a file that is no store": ("export plain.txt", None),
    "bench: no checkout": ("bench", "bench"),
    "report: a run that is not there": ("report nowhere", "RUN"),
    "report: a folder without a run": ("report folder", "RUN"),
    "report: a file that is no run": ("report plain.txt", "RUN"),
    "explore: a run that is not there": ("explore nowhere", "RUN"),
    "explore: a folder without a run": ("explore folder --output page.html", "RUN"),
    "explore: a file that is no run": ("explore plain.txt", "RUN"),
    "explore: a page of no run": ("explore --output page.html", "output"),
}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A directory with things that are no run, no model and no store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.txt").write_text("Plain text. " * 100)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "note.json").write_text(json.dumps({"note": 1}))
    with sqlite3.connect(tmp_path / "other.sqlite") as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    return tmp_path


@pytest.mark.parametrize("line, argument", COMMANDS.values(), ids=COMMANDS)
def test_commands(desk, call, line, argument):
    before = {path: path.is_file() and path.read_bytes() for path in desk.rglob("*")}
    code, out, err = call(*line.split())
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert argument is None or err.startswith(f"error: {argument}: "), err
    assert {path: path.is_file() and path.read_bytes() for path in desk.rglob("*")} == before


def test_the_catalogue_is_long_enough():
    assert len(CALLS) + len(COMMANDS) >= 150
    assert issubclass(StoreError, cv.CurvoscopeError)
