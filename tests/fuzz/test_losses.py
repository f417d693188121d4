"""Value, gradient G and Hessian S of every loss at random outputs, targets ignored or not, against autodiff."""

import torch
from hypothesis import strategies as st
from torch.func import grad, jacfwd

from curvoscope import losses
from fuzz_cases import TOLERANCE, assert_agrees, dtypes, kinds
from loss_cases import Draws


@st.composite
def outputs(draw):
    """A loss, and an output (N, L, m) of a size from tiny to saturating."""
    case = Draws(draw(st.integers(0, 10**6)), draw(dtypes))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(3))
    case.make_loss(draw(kinds), shape)
    return case, draw(st.sampled_from([1e-3, 1.0, 10.0])) * case.normal(*shape)


def test_gradient_and_curvature(fuzz):
    def check(problem):
        case, F = problem
        found = losses.at(case.own_loss, case.own(F), squeeze=False)
        n = F.numel()
        S = jacfwd(grad(case.loss))(F).reshape(n, n)
        G, value = grad(case.loss)(F), float(case.loss(F))
        size = 1 + abs(value) + float(F.abs().max()) * float(S.abs().max())
        assert abs(found.value - value) <= TOLERANCE[case.dtype] * size
        assert_agrees(found.gradient, G, float(G.abs().max()) + size, "G")
        identity = torch.eye(n, dtype=case.dtype).view(n, *F.shape)
        applied = found.curvature.apply(identity).reshape(n, n)
        assert_agrees(applied, S, float(S.abs().max()) + size, "S")

    fuzz(check, outputs(), examples=6)


def test_softmax_curvature_through_ports(fuzz):
    """P S_t P'^T for ports of any kind, a range of tokens at a time."""

    def check(seed, sizes, kind, dtype):
        m, e, words, tokens = sizes
        case = Draws(seed, dtype)
        U, W, F = case.normal(m, words), case.normal(e, m), case.normal(1, tokens, m)
        targets = torch.randint(0, words, (1, tokens), generator=case.generator)
        loss = losses.CrossEntropy(targets, U)
        S = jacfwd(grad(loss))(F).reshape(tokens, m, tokens, m)
        port = {"none": None, "weights": W, "slice": slice(0, max(1, m // 2))}[kind]
        own = case.own(port) if isinstance(port, torch.Tensor) else port
        found = losses.CrossEntropy(targets, case.own(U)).at(case.own(F)).curvature
        P = losses.through(torch.eye(m, dtype=torch.float64), port).T
        start = seed % tokens
        expected = torch.stack([P @ S[t, :, t] @ P.T for t in range(start, tokens)])
        size = float(P.abs().max()) ** 2 * float(U.abs().max()) ** 2
        assert_agrees(found.between(own, own, start, tokens), expected, size, "between")
        assert_agrees(found.diagonal(own, start, tokens), expected.diagonal(dim1=1, dim2=2), size, "diagonal")

    sizes = st.tuples(*(st.integers(1, 5) for _ in range(2)), st.integers(2, 6), st.integers(1, 4))
    fuzz(check, st.integers(0, 10**6), sizes, st.sampled_from(["none", "weights", "slice"]), dtypes, examples=6)
