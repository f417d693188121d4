"""The numbers of a state, all from closed forms."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from curvoscope import losses
from curvoscope.exact import LayerNorm, ScalarAttention, ScalarSpectrum, SelfAttention
from curvoscope.exact.attention.hessian import AttentionHessian
from curvoscope.explorer.state import State, bounds
from curvoscope.losses import LossAt

CURVES = (("Q", "Q", "outer"), ("Q", "Q", "functional"), ("Q", "K", "functional"), ("V", "V", "outer"))
"""The norms whose growth with σ is shown: four exponents."""
SIGMAS = tuple(float(sigma) for sigma in 10 ** np.linspace(-2, 1, 7))
SINKS = tuple(float(sink) for sink in np.linspace(0, 8, 9))

_VOCABULARY = 10
_AT_MOST = {name: int(bounds(name)[1]) for name in ("L", "d", "d_k", "heads")}
_background = ThreadPoolExecutor(1, thread_name_prefix="eigenvalues")
_one_curve = threading.Lock()


class Beside(losses.CrossEntropy):
    """Cross-entropy of Z = F + stream against π + ρ (onehot - π), held fixed: G = ρ U (π - onehot)/L, S as ever."""

    def __init__(self, targets: Tensor, unembedding: Tensor, stream: Tensor, residual: float) -> None:
        super().__init__(targets, unembedding)
        self._stream, self._residual = stream, residual

    def at(self, F: Tensor) -> LossAt:
        """G and S at F (1, L, d)."""
        found = super().at(F + self._stream)
        logarithm = self.logits(F + self._stream).log_softmax(-1)
        entropy = -float((logarithm.exp() * logarithm).sum(-1).mean())
        value = (1 - self._residual) * entropy + self._residual * found.value
        return LossAt(value, self._residual * found.gradient, found.curvature)


class Pulled(losses.MSE):
    """Squared error of Z = F + stream against Z + ρ (Y - Z), held fixed: G = ρ 2/n (Z - Y), S as ever."""

    def __init__(self, Y: Tensor, stream: Tensor, residual: float) -> None:
        super().__init__(Y - stream)
        self._share = residual

    def at(self, F: Tensor) -> LossAt:
        """G and S at F (1, L, d)."""
        found = super().at(F)
        return LossAt(self._share**2 * found.value, self._share * found.gradient, found.curvature)


@dataclass(frozen=True)
class Problem:
    """A layer, its input X (L, d), its loss at the layer's output, and a mask (L, L) that is added to the scores."""

    layer: SelfAttention
    X: Tensor
    loss: losses.LossFunction
    mask: Tensor | None

    def hessian(self) -> AttentionHessian:
        """Over W_Q, W_K and W_V."""
        return self.layer.hessian(self.X, self.loss, self.mask)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity
class Matrices:
    """What a state shows first: `attention` (heads, L, L), and the Hessian of `problem` in its three parts (n, n).

    `borders` are the ends of the blocks `names` in 0...n, `norms` the Frobenius norms of the blocks of each part. The
    `eigenvalues` (n,) of the total take longest: they are under way while the rest is drawn.
    """

    state: State
    hessian: AttentionHessian
    loss: float
    attention: np.ndarray
    names: tuple[str, ...]
    borders: tuple[int, ...]
    dense: dict[str, np.ndarray]
    norms: dict[tuple[str, str, str], float]
    eigenvalues: Future


@dataclass(frozen=True)
class Curves:
    """Curves over a scale: `growth` (curves, sigmas) are the norms of `CURVES` at `SIGMAS`, `here` at the state's own
    σ; `scalar` the spectra of the scalar model at `SINKS`, then at the state's own sink."""

    matrices: Matrices
    growth: np.ndarray
    here: tuple[float, ...]
    scalar: tuple[ScalarSpectrum, ...]

    @property
    def state(self) -> State:
        """The state that they belong to."""
        return self.matrices.state


@dataclass(frozen=True)
class ExplorerSpectra:
    """Eigenvalues at a state.

    `eigenvalues` (n,) of the total ascend; `pairs` are the positive eigenvalues of its T-functional part, descending,
    each `d_k` times there and as often with a minus; `bulk` are those that the total has for sure, and how often;
    `scalar` is the spectrum of the scalar model.
    """

    matrices: Matrices
    eigenvalues: np.ndarray
    pairs: np.ndarray
    bulk: np.ndarray
    multiplicity: int
    scalar: ScalarSpectrum

    @property
    def state(self) -> State:
        """The state that they belong to."""
        return self.matrices.state


def problem(state: State, sigma: float | None = None) -> Problem:
    """The layer, input and loss of a state, or the same at another scale of the input.

    Draws are cut out of larger ones: with one token or column more, those that were there stay.
    """
    draws, (L, d) = _draws(state.seed), (state.L, state.d)
    X = (state.sigma if sigma is None else sigma) * draws["X"][:L, :d]
    query, key = (_columns(draws[name][: state.heads, :d, : state.d_k]) for name in ("W_Q", "W_K"))
    layer = SelfAttention(
        query,
        key,
        _columns(draws["W_V"][: state.heads, :d, :d]),
        heads=state.heads,
        combine="sum",
        activation=state.attention,
        temperature=state.temperature,
        causal=state.mask == "causal",
    )
    mask = towards_first(L, state.sink) if state.sink else None
    stream = state.skip * X
    seen = LayerNorm(torch.ones(d, dtype=X.dtype))(X) if state.norm == "pre" else X
    if state.loss == "ce":
        loss = Beside(draws["targets"][:L], draws["U"][:d] / d**0.5, stream, state.residual)
        return Problem(layer, seen, loss, mask)
    return Problem(layer, seen, Pulled(draws["Y"][:L, :d], stream, state.residual), mask)


def towards_first(length: int, sink: float) -> Tensor:
    """An attention sink: (L, L), added to the scores of the first key."""
    mask = torch.zeros(length, length, dtype=torch.float64)
    mask[:, 0] = sink
    return mask


@lru_cache(maxsize=2)  # the state on the page, and the one before
def matrices(state: State) -> Matrices:
    """Attention, the parts of the Hessian and their norms."""
    posed, H, outer, functional = _whole(state.model_copy(update={"residual": 1.0}))
    if state.residual != 1:
        posed = problem(state)
        H = posed.hessian()
    dense = {"outer": outer, "functional": state.residual * functional}
    dense["total"] = dense["outer"] + dense["functional"]
    # numpy's LAPACK takes 30 ms for 768 rows, torch's 50 ms
    eigenvalues = _background.submit(np.linalg.eigvalsh, dense["total"].numpy())
    ranges = H.total.ranges
    passed = posed.layer.forward_pass(posed.X, posed.mask)
    return Matrices(
        state=state,
        hessian=H,
        loss=losses.at(posed.loss, passed.F, passed.squeeze).value,
        attention=passed.A[0].numpy(),
        names=tuple(H.names),
        borders=(0, *(found.stop for found in ranges.values())),
        dense={part: values.numpy() for part, values in dense.items()},
        norms={
            (row, column, part): float(values[ranges[row], ranges[column]].norm())
            for i, row in enumerate(H.names)
            for column in H.names[i:]
            for part, values in dense.items()
        },
        eigenvalues=eigenvalues,
    )


@lru_cache(maxsize=2)
def _whole(state: State) -> tuple[Problem, AttentionHessian, Tensor, Tensor]:
    """At a residual of one: the Hessian, its outer part, which is free of it, and its functional part, linear in it."""
    posed = problem(state)
    H = posed.hessian()
    return posed, H, H.outer.dense(), H.functional.dense()


def curves(found: Matrices) -> Curves:
    """Growth and the scalar model. Requests are handled one at a time."""
    with _one_curve:
        return _curves(found)


@lru_cache(maxsize=2)
def _curves(found: Matrices) -> Curves:
    here = tuple(found.norms[curve] for curve in CURVES)
    state = found.state
    scalar = *_scalar_curve(state.model_copy(update={"sink": 0.0})), _scalar_at(state, state.sink)
    return Curves(matrices=found, growth=_growth(state), here=here, scalar=scalar)


@lru_cache(maxsize=2)
def spectra(found: Matrices) -> ExplorerSpectra:
    """Wait for the eigenvalues. The curves are not waited for: the two are computed side by side."""
    H = found.hessian
    bulk, multiplicity = H.bulk()
    pairs = torch.cat([torch.linalg.svdvals(B) for B in H.t_functional.gradients])
    return ExplorerSpectra(
        matrices=found,
        eigenvalues=found.eigenvalues.result(),
        pairs=pairs.sort(descending=True).values.numpy(),
        bulk=bulk.numpy(),
        multiplicity=multiplicity,
        scalar=_scalar_at(found.state, found.state.sink),
    )


def exponents(state: State) -> tuple[float | None, ...]:
    """The power of σ with which each of `CURVES` grows while the attention does not move (equation 5), None: zero.

    Linear attention is itself quadratic in X, but for the part that a sink adds; behind a norm nothing grows.
    """
    powers: list[float | None] = [6.0, 5.0, 3.0, 2.0]
    if state.attention == "linear":
        powers[1] = None
        powers[3] = 2.0 if state.sink else 6.0
    if state.residual == 0:
        powers[1] = powers[2] = None
    return tuple(None if power is None else 0.0 if state.norm == "pre" else power for power in powers)


def _growth(state: State) -> np.ndarray:
    """The norms of `CURVES`, (curves, sigmas): functional parts are linear in the residual, as G is, outer ones free
    of it."""
    shares = [state.residual if part == "functional" else 1.0 for _, _, part in CURVES]
    return np.array(shares)[:, None] * _whole_growth(state.model_copy(update={"sigma": 1.0, "residual": 1.0}))


@lru_cache(maxsize=4)
def _whole_growth(state: State) -> np.ndarray:
    """The same at a residual of one; no scale of X but `SIGMAS` matters."""
    columns = []
    for sigma in SIGMAS:
        H = problem(state, sigma).hessian()
        columns.append([float(getattr(H, part)[row, column].frobenius_norm()) for row, column, part in CURVES])
    return np.array(columns).T


def scalar_problem(state: State) -> tuple[ScalarAttention, Tensor, Tensor]:
    """The scalar model that goes with a state: weights of width d_k, tokens x (L,) of scale σ, targets y (L,)."""
    draws, L = _draws(state.seed), state.L
    model = ScalarAttention(draws["w_Q"][: state.d_k], draws["w_K"][: state.d_k], 1.0, causal=state.mask == "causal")
    return model, state.sigma * draws["x"][:L], draws["y"][:L]


@lru_cache(maxsize=4)
def _scalar_curve(state: State) -> tuple[ScalarSpectrum, ...]:
    """At `SINKS`; the state's own does not matter."""
    return tuple(_scalar_at(state, sink) for sink in SINKS)


def _scalar_at(state: State, sink: float) -> ScalarSpectrum:
    model, x, y = scalar_problem(state)
    loss = Pulled(y[:, None], torch.zeros_like(y)[:, None], state.residual)
    return model.spectrum(x, loss=loss, mask=towards_first(len(x), sink))


@lru_cache(maxsize=4)
def _draws(seed: int) -> dict[str, Tensor]:
    """Everything random, at the largest sizes; weights (heads, d, ·) before they are divided by √d."""
    heads, L, d, d_k = (_AT_MOST[name] for name in ("heads", "L", "d", "d_k"))
    generator = torch.Generator().manual_seed(seed)
    normal: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "X": normal(L, d),
        "Y": normal(L, d),
        "W_Q": normal(heads, d, d_k),
        "W_K": normal(heads, d, d_k),
        "W_V": normal(heads, d, d),
        "U": normal(d, _VOCABULARY),
        "targets": torch.randint(_VOCABULARY, (L,), generator=generator),
        "x": normal(L),
        "y": normal(L),
        "w_Q": normal(d_k),
        "w_K": normal(d_k),
    }


def _columns(weights: Tensor) -> Tensor:
    """(heads, d, p) -> (d, heads p), divided by √d: the scores are of order σ²."""
    heads, d, width = weights.shape
    return weights.transpose(0, 1).reshape(d, heads * width) / d**0.5
