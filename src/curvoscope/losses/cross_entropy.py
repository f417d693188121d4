"""Cross-entropy: value, gradient and Hessian in closed form, a few tokens at a time.

For token t with target y_t and probabilities p_t = softmax(f_t), with weights w_t (1/n for the n tokens that count,
0 for the others):

    G_t = w_t (p_t - e_y)            S_t u = w_t (p_t . u - p_t <p_t, u>)

G is the only tensor of the size of the logits that is kept; p_t is read from it. S_t u = S_t u' with u' = u - u_y. The
target's own entry of p_t . u' is 0, so S_t u' needs only the entries of G_t at the other words, and it keeps its digits
if p_t is nearly one-hot. Any word can take the place of y here; G then differs by a constant.
"""

from collections.abc import Iterator
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, pad

from curvoscope import checks
from curvoscope.errors import DeviceError, DtypeError, LossError, RangeError, ShapeError
from curvoscope.losses.counting import measure
from curvoscope.losses.curvatures import PerToken, Port, through
from curvoscope.losses.objectives import ClosedLoss, LossFunction, MeanLoss, Objective, logits_of

_CHUNK = 2**18  # numbers a chunk: stays in the cache, and a large vocabulary adds no memory to speak of


def softmax_gradient(probabilities: Tensor, index: Tensor, weights: Tensor | float) -> Tensor:
    """w (p - sum(p) e_y) for p (..., v), y `index` (..., 1), w (..., 1), without 1 - p at y."""
    others = probabilities.scatter(-1, index, 0.0)
    return others.scatter_(-1, index, -others.sum(-1, keepdim=True)).mul_(weights)


def softmax_product(gradient: Tensor, index: Tensor, weights: Tensor, direction: Tensor) -> Tensor:
    """S u for u (..., v), from G = w (p - e_y), y `index` (..., 1) and w (..., 1)."""
    product = (direction - direction.gather(-1, index)).mul_(gradient)  # w p . u'
    mean = product.sum(-1, keepdim=True) / weights.where(weights != 0, 1.0)  # of an ignored token: 0 / 1
    product.addcmul_(gradient, mean, value=-1)
    return product.scatter_add_(-1, index, -mean * weights)  # G_y = w (p_y - 1)


class CrossEntropyGradient(torch.autograd.Function):
    """G (T, v) of logits (T, v); its backward pass is the product with S."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Logits (T, v), words y (T, 1), weights (T, 1) -> G (T, v)."""
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits):
            gradient[rows] = softmax_gradient(torch.softmax(logits[rows], -1), index[rows], weights[rows])
        ctx.save_for_backward(gradient, index, weights)
        return gradient

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor, None, None]:
        """S u for u (T, v)."""
        gradient, index, weights = ctx.saved_tensors
        if torch._C._functorch.is_legacy_batchedtensor(direction):  # several vectors at once: nothing in place
            return softmax_product(gradient, index, weights, direction), None, None
        result = torch.empty_like(gradient)
        for rows in _chunks(gradient):
            result[rows] = softmax_product(gradient[rows], index[rows], weights[rows], direction[rows])
        return result, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    tokens, vocabulary = logits.shape
    step = max(1, _CHUNK // vocabulary)
    yield from (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


class SoftmaxCurvature(PerToken):
    """Cross-entropy after logits F U: S_t = w_t U (diag p_t - p_t p_t^T) U^T, never formed in full.

    The variance under p_t is taken around its mean, so that it keeps its digits when p_t is nearly one-hot.

    Args:
        weights: w_t, (N, L).
        probabilities: p_t, (N, L, v).
        unembedding: U, (m, v).

    Example:
        >>> import torch, curvoscope as cv
        >>> half = torch.full((1, 1, 2), 0.5)
        >>> S = cv.losses.SoftmaxCurvature(torch.ones(1, 1), half, torch.tensor([[1.0, -1.0]]))
        >>> S.apply(torch.ones(1, 1, 1))
        tensor([[[1.]]])
    """

    def __init__(self, weights: Tensor, probabilities: Tensor, unembedding: Tensor) -> None:
        self._weights, self._probabilities, self._unembedding = weights, probabilities, unembedding

    def apply(self, direction: Tensor) -> Tensor:
        """S dF, by token w U (p . u - p (p^T u)) with u = U^T dF.

        Args:
            direction: dF (..., N, L, m).

        Returns:
            The products, of the shape of `direction`.
        """
        likeliest, weights = self._probabilities.argmax(-1, keepdim=True), self._weights[..., None]
        u = direction @ self._unembedding
        gradient = softmax_gradient(self._probabilities, likeliest, weights)
        return softmax_product(gradient, likeliest.expand(*u.shape[:-1], 1), weights, u) @ self._unembedding.mT

    def root(self) -> Tensor:
        """R_t = w_t^(1/2) U (diag s - p s^T) with s = p^(1/2) elementwise, so that S_t = R_t R_t^T: (N, L, m, v)."""
        p, spread = self._probabilities, self._probabilities.sqrt()
        root = torch.diag_embed(spread) - p[..., :, None] * spread[..., None, :]
        return self._unembedding @ (self._weights.sqrt()[..., None, None] * root)

    def between(self, left: Port, right: Port, start: int, stop: int) -> Tensor:
        """w P U (diag p - p p^T) U^T P'^T for tokens start to stop, (t, e, e'); as `TokenCurvature.between`."""
        probabilities = self._probabilities.flatten(0, 1)[start:stop]
        weights = self._weights.flatten()[start:stop]
        first = self._centred(left, probabilities)
        second = first if left is right else self._centred(right, probabilities)
        return (first * (weights[:, None] * probabilities)[:, None, :]) @ second.mT

    def diagonal(self, port: Port, start: int, stop: int) -> Tensor:
        """w times the variance of P U under p_t, for tokens start to stop: (t, e); as `TokenCurvature.diagonal`."""
        probabilities = self._probabilities.flatten(0, 1)[start:stop]
        weights = self._weights.flatten()[start:stop]
        return weights[:, None] * (self._centred(port, probabilities).square() @ probabilities[:, :, None])[..., 0]

    def workspace(self, left: Port, right: Port) -> int:
        """Numbers that `between` needs for a token: twice the centred unembeddings, (e, v) and (e', v)."""
        seen = (through(self._unembedding.mT[:1], port).shape[1] for port in (left, right))
        return 2 * sum(seen) * self._unembedding.shape[1]

    def by_words(self, port: Port) -> Tensor | None:
        """The unembedding seen through a port: features B with P S_t P'^T = B^T E_t B', E_t from `word_covariance`.

        Args:
            port: W_O (e, m), a slice of the output's columns, or None for all of them.

        Returns:
            B (v, e); None if there are more words v than values e.
        """
        seen = through(self._unembedding.mT, port)
        return seen if seen.shape[0] <= seen.shape[1] else None

    def word_covariance(self, start: int, stop: int) -> Tensor:
        """E_t = w (diag p - p p^T) for tokens start to stop, (t, v, v); its rows sum to zero to the last digit."""
        probabilities = self._probabilities.flatten(0, 1)[start:stop]
        weights = self._weights.flatten()[start:stop]
        products = (weights[:, None] * probabilities)[:, :, None] * probabilities[:, None, :]
        products.diagonal(dim1=1, dim2=2).zero_()
        return torch.diag_embed(products.sum(-1)) - products

    def _centred(self, port: Port, probabilities: Tensor) -> Tensor:
        """P U minus its mean under p_t, (t, e, v)."""
        seen = through(self._unembedding.mT, port).mT
        return seen - (probabilities @ seen.mT)[:, :, None]


class SoftmaxRows(NamedTuple):
    """What cross-entropy is made of: logits (T, v), words y (T, 1) and weights (T, 1).

    `rest` (T, v), w (sum(q) e_y - q) for targets q that are probabilities: what they add to the G of the word y.
    """

    logits: Tensor
    words: Tensor
    weights: Tensor
    rest: Tensor | None = None


class CrossEntropy(ClosedLoss):
    """Mean over the targets of -log softmax(F U + b)[target]; targets equal to `ignore_index` do not count.

    With w_t = 1/n for each of the n targets that count:

        G_t = w_t U (p_t - onehot_t)            S_t = w_t U (diag p_t - p_t p_t^T) U^T

    With targets it is a loss for a layer, without for a model. Floating-point targets of the shape of the logits are
    probabilities of the classes: the mean over positions of -sum_c target_c log softmax(F U + b)_c.

    Args:
        targets: (N, L) or (L,), the targets of a layer's output F (N, L, m). None: they come with the batches of a
            model.
        unembedding: U, (m, v). None: the outputs are logits.
        bias: b, (v,).
        ignore_index: targets that do not count.
        shift: position i predicts target i + 1, as in a causal language model.
        axis: where the logits have their classes; 1 is the layout of `torch.nn.functional.cross_entropy`.

    Example:
        >>> import torch, curvoscope as cv
        >>> loss = cv.losses.CrossEntropy()
        >>> inputs, targets = torch.ones(1, 3, 2).double(), torch.tensor([[0, 1, 1]])
        >>> H = cv.hessian(torch.nn.Linear(2, 2).double(), loss, [(inputs, targets)])
        >>> H.terms
        3.0
        >>> layer = cv.exact.LinearMLP([torch.eye(2).double()])
        >>> round(float(layer.hessian(inputs, loss.bound(targets))["W1"].trace()), 12)
        1.0
    """

    convex = True

    def __init__(
        self,
        targets: Tensor | None = None,
        unembedding: Tensor | None = None,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        shift: bool = False,
        axis: int = -1,
    ) -> None:
        super().__init__(targets)
        self.unembedding, self.bias = unembedding, bias
        self.ignore_index, self.shift, self.axis = ignore_index, shift, axis
        if unembedding is not None and checks.floating("unembedding", unembedding).ndim != 2:
            raise ShapeError("unembedding", f"expected (m, vocabulary), got {tuple(unembedding.shape)}")
        if bias is not None:
            checks.floating("bias", bias, like=unembedding)
            if bias.ndim != 1 or (unembedding is not None and bias.shape != unembedding.shape[1:]):
                vocabulary = "vocabulary" if unembedding is None else unembedding.shape[1]
                raise ShapeError("bias", f"expected ({vocabulary},), got {tuple(bias.shape)}")
        for name, number in (("ignore_index", ignore_index), ("axis", axis)):
            if not isinstance(number, Integral):
                raise LossError(name, f"got {number!r}, expected a whole number")
        if axis != -1 and not (unembedding is None and bias is None):
            raise LossError("axis", f"got {axis}; an unembedding or a bias gives logits with the classes last: -1")
        if targets is not None:
            self._check(targets)

    @classmethod
    def of_torch(cls, loss_fn: LossFunction) -> Objective | None:
        """The same loss as a function of torch that is a mean: `cross_entropy` or a `CrossEntropyLoss`.

        Args:
            loss_fn: any loss function.

        Returns:
            A `CrossEntropy`; a `MeanLoss` that counts the terms, for class weights or label smoothing; None for another
            function, or if the reduction is not "mean".
        """
        if loss_fn is cross_entropy:
            return cls(axis=1)
        if type(loss_fn) is not nn.CrossEntropyLoss or loss_fn.reduction != "mean":
            return None
        if loss_fn.weight is None and loss_fn.label_smoothing == 0:
            return cls(ignore_index=loss_fn.ignore_index, axis=1)
        return MeanLoss(loss_fn, partial(_class_weights, loss_fn))

    def _check(self, targets: Tensor) -> None:
        """Raise unless the targets are right as far as can be told without the outputs."""
        if not isinstance(targets, Tensor):
            seen = f"expected a tensor, got {type(targets).__name__}"
            raise LossError("targets", f"{seen}; for the index of targets to ignore write ignore_index=...")
        U = self.unembedding
        probabilities = targets.is_floating_point() and (U is None or targets.shape[-1:] == U.shape[1:])
        if targets.dtype == torch.bool or (targets.is_floating_point() and not probabilities):
            raise DtypeError("targets", f"expected integers, got {targets.dtype}")
        if U is not None and targets.device != U.device:
            raise DeviceError("targets", f"is on {targets.device}, the unembedding on {U.device}")
        if probabilities:
            checks.floating("targets", targets)
            return
        read = targets[..., 1:] if self.shift else targets
        counted = read[read != self.ignore_index]
        if not counted.numel():
            which = "that follow a position " if self.shift else ""
            raise RangeError("targets", f"all {which}equal ignore_index = {self.ignore_index}; the mean has no terms")
        if U is not None:
            _check_range(counted, U.shape[1])

    def bound(self, targets: Tensor) -> "CrossEntropy":
        """The same loss for a layer, with `targets` of its own: see `CrossEntropy`."""
        return CrossEntropy(targets, self.unembedding, self.bias, self.ignore_index, self.shift, self.axis)

    def __call__(self, outputs: Any, targets: Any = None) -> Tensor:
        """The mean over the targets that count, without a copy of the logits."""
        found = self.rows(logits_of(outputs), targets)
        total = found.logits.new_zeros(())
        for rows in _chunks(found.logits):
            logits, index, weights = found.logits[rows], found.words[rows], found.weights[rows, 0]
            losses = cross_entropy(logits, index[:, 0], reduction="none")
            total = total + torch.where(weights != 0, losses * weights, 0.0).sum()
            if found.rest is not None:
                total = total + (found.rest[rows] * (logits - logits.gather(-1, index))).sum()
        return total

    def terms(self, outputs: Any, targets: Any) -> int:
        """The number of targets that count; with probabilities as targets, the number of positions.

        Args:
            outputs: F, or a model's output that has it as `logits` or as its first entry.
            targets: of the batch; None for the loss's own.

        Returns:
            The number n that the mean divides by.
        """
        F = logits_of(outputs)
        wanted = self.wanted(targets, F)
        if wanted.is_floating_point():
            return self.rows(F, targets).words.numel()
        counted = wanted[..., 1:] if self.shift else wanted
        return int((counted != self.ignore_index).sum())

    def gradient(self, outputs: Any, targets: Any = None) -> tuple[list[Tensor], list[Tensor]]:
        """G = dl/dF in closed form.

        Args:
            outputs: F, or a model's output that has it as `logits` or as its first entry.
            targets: of the batch; None for the loss's own.

        Returns:
            The lists [F] and [G]. G can be differentiated: its vector-Jacobian product is the product with S.
        """
        F = logits_of(outputs)
        logits, index, weights, rest = self.rows(F, targets)
        found = CrossEntropyGradient.apply(logits, index, weights)
        found = found if rest is None else found + rest
        if self.unembedding is not None:
            found = found @ self.unembedding.mT
        axis = self.class_axis(F)
        return [F], [found.view(F.movedim(axis, -1).shape).movedim(-1, axis)]

    def curvature(self, F: Tensor) -> SoftmaxCurvature:
        """S for the loss's own targets.

        Args:
            F: the output of a layer, (N, L, m).

        Returns:
            S at F, which is not formed in full.
        """
        if self.axis != -1:
            raise LossError("axis", f"got {self.axis}; a layer's output has its classes last: -1")
        logits, _, weights, _ = self.rows(F, None)
        shape, words = F.shape[:-1], logits.shape[-1]
        U = torch.eye(words, dtype=F.dtype, device=F.device) if self.unembedding is None else self.unembedding.detach()
        return SoftmaxCurvature(weights.view(shape), logits.softmax(-1).view(*shape, words), U.clone())

    def logits(self, F: Tensor) -> Tensor:
        """F U + b (..., v), for an output F (..., m); F itself without unembedding and bias."""
        if self.unembedding is not None:
            checks.floating("unembedding", self.unembedding, like=F)
            if F.shape[-1] != self.unembedding.shape[0]:
                rows, columns = self.unembedding.shape[0], F.shape[-1]
                raise ShapeError("unembedding", f"has {rows} rows, the output {columns} columns")
            F = F @ self.unembedding
        return F if self.bias is None else F + self.bias

    def class_axis(self, logits: Tensor) -> int:
        """The axis of the classes: `axis`, or the last one if the logits have only one."""
        if logits.ndim == 1:
            return -1
        if not -logits.ndim <= self.axis < logits.ndim:
            raise LossError("axis", f"got {self.axis} for logits of shape {tuple(logits.shape)}")
        return self.axis

    def rows(self, F: Tensor, targets: Any) -> SoftmaxRows:
        """The logits, one row per position, with what their loss needs.

        Args:
            F: the output that the loss reads, (..., m), or with its classes on `axis`.
            targets: word numbers, or probabilities of the shape of the logits; None for the loss's own.

        Returns:
            A `SoftmaxRows`; the weight of a target that does not count is 0.
        """
        targets, logits = self.wanted(targets, F), self.logits(F)
        if targets.is_floating_point():
            return self._rows_of_probabilities(logits, targets)
        axis, shape = self.class_axis(logits), tuple(logits.shape)
        logits = logits.movedim(axis, -1)
        if targets.shape != logits.shape[:-1]:
            cure = "" if axis == -1 else f" with classes on axis {axis}; cv.losses.CrossEntropy() has them on the last"
            raise ShapeError("targets", f"got {tuple(targets.shape)} for logits {shape}{cure}")
        if self.shift:
            targets = pad(targets[..., 1:], (0, 1), value=self.ignore_index)
        counted = targets != self.ignore_index
        _check_range(targets[counted], logits.shape[-1])
        weights = counted.to(logits.dtype) / counted.sum().clamp_min(1)
        index = targets.where(counted, 0).long()
        return SoftmaxRows(logits.reshape(-1, logits.shape[-1]), index.reshape(-1, 1), weights.reshape(-1, 1))

    def _rows_of_probabilities(self, logits: Tensor, targets: Tensor) -> SoftmaxRows:
        if self.shift:
            raise LossError("targets", f"expected integers, got {targets.dtype}: `shift` is for words that follow")
        if targets.shape != logits.shape:
            shapes = f"{tuple(targets.shape)} of {targets.dtype} for logits {tuple(logits.shape)}"
            raise ShapeError("targets", f"got {shapes}; expected integers, or probabilities of the shape of the logits")
        axis = self.class_axis(logits)
        logits, targets = (values.movedim(axis, -1).reshape(-1, values.shape[axis]) for values in (logits, targets))
        index, mean = targets.argmax(-1, keepdim=True), 1 / len(targets)
        return SoftmaxRows(logits, index, mean * targets.sum(-1, keepdim=True), softmax_gradient(targets, index, -mean))


def _class_weights(loss: nn.CrossEntropyLoss, outputs: Any, targets: Tensor) -> float:
    """The mean divides by the sum of the targets' class weights; with probabilities as targets, by the positions."""
    found = measure(loss, outputs, targets).tally
    return found.outputs / outputs.shape[1 if outputs.ndim > 1 else 0] if found.observed is None else found.observed


def _check_range(targets: Tensor, vocabulary: int) -> None:
    """Raise if a target is outside the vocabulary."""
    if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= vocabulary):
        worst = int(targets.min()) if int(targets.min()) < 0 else int(targets.max())
        raise RangeError("targets", f"{worst} is outside the vocabulary 0 to {vocabulary - 1}")
