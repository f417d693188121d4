"""What families add to attention: norms of queries and keys, other positions, soft caps and sinks, against autodiff."""

import math

import pytest
import torch

import curvoscope as cv
from curvoscope.errors import RangeError, ShapeError
from curvoscope.exact.attention.rotary import PositionMatrices
from reference import dense_hessian, normal, relative

N, L, D, HEADS, GROUPS, D_K, D_V, OUT = 2, 4, 3, 4, 2, 4, 2, 3
BIASES = ("b_Q", "b_K", "b_V", "b_O")
WIDE = {"Q": HEADS * D_K, "K": GROUPS * D_K, "V": GROUPS * D_V}


def _weights(seed=0):
    r = normal(seed)
    p = {"Q": r(D, WIDE["Q"]), "K": r(D, WIDE["K"]), "V": r(D, WIDE["V"]), "O": r(HEADS * D_V, OUT)}
    return p | {name: r(1, WIDE.get(name[-1], OUT)) for name in BIASES}


def _interleaved(sequences=1, heads=1):
    """Features 0 and 1 of each query turn by angles of their own, the others stay: partial, between neighbours."""
    angles = normal(7)(sequences, heads, L)
    R = torch.eye(D_K, dtype=torch.float64).repeat(sequences, heads, L, 1, 1)
    R[..., 0, 0] = R[..., 1, 1] = angles.cos()
    R[..., 1, 0], R[..., 0, 1] = angles.sin(), -angles.sin()
    return R


def _normed(x, gamma, beta, eps, width, centred):
    groups = x.unflatten(-1, (-1, width))
    groups = groups - groups.mean(-1, keepdim=True) if centred else groups
    hat = (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    return hat * gamma.repeat(x.shape[-1] // len(gamma)) + beta.repeat(x.shape[-1] // len(gamma))


def _norm(length, width, centred, seed):
    r = normal(seed)
    return r(length), r(length), 0.1, width, centred


def _case(name):
    """Options of the layer, and of the same written down plainly: norms by role, matrices, cap, sinks."""
    each = {"Q": _norm(D_K, D_K, False, 1), "K": _norm(D_K, D_K, False, 2)}
    every = {"Q": _norm(WIDE["Q"], WIDE["Q"], True, 1), "K": _norm(WIDE["K"], WIDE["K"], False, 2)}
    own = {"Q": _norm(WIDE["Q"], D_K, True, 1), "K": _norm(WIDE["K"], D_K, True, 2)}  # gamma of each head
    norms = {"norm": each, "norm and positions": each, "over all heads": every, "of each head": own, "all": own}
    R = _interleaved(N, HEADS if name == "all" else 1)
    plain = {
        "norms": norms.get(name, {}),
        "turned": R if name in ("positions", "norm and positions", "all") else None,
        "softcap": 1.5 if name in ("capped", "all") else None,
        "sinks": normal(3)(HEADS) if name in ("sinks", "all") else None,
    }
    options = {
        f"{role.lower()}_norm": cv.exact.QueryKeyNorm(*one[:3], width=one[3], centred=one[4])
        for role, one in plain["norms"].items()
    }
    if plain["turned"] is not None:
        options |= {"rotary": PositionMatrices(R), "key_rotary": PositionMatrices(R[:, :: HEADS // GROUPS])}
    return options | {key: plain[key] for key in ("softcap", "sinks")}, plain


def _plainly(p, X, norms, turned, softcap, sinks):
    x = p["X"].reshape(X.shape) if "X" in p else X
    made = {role: x @ p[role] + p[f"b_{role}"] for role in "QKV"}
    made |= {role: _normed(made[role], *one) for role, one in norms.items()}
    outputs = []
    for h in range(HEADS):
        g = h // (HEADS // GROUPS)
        q, k = made["Q"].unflatten(-1, (HEADS, -1))[:, :, h], made["K"].unflatten(-1, (GROUPS, -1))[:, :, g]
        if turned is not None:
            R, S = (turned[:, one if turned.shape[1] > 1 else 0] for one in (h, g * (HEADS // GROUPS)))
            q, k = (R @ q[..., None])[..., 0], (S @ k[..., None])[..., 0]
        T = q @ k.mT / math.sqrt(D_K)
        T = T if softcap is None else softcap * (T / softcap).tanh()
        T = T.masked_fill(~torch.ones(L, L, dtype=torch.bool).tril(), -math.inf)
        T = T if sinks is None else torch.cat([T, sinks[h].expand(N, L, 1)], -1)
        outputs.append(T.softmax(-1)[..., :L] @ made["V"].unflatten(-1, (GROUPS, -1))[:, :, g])
    return torch.cat(outputs, -1) @ p["O"] + p["b_O"]


VARIANTS = ("norm and positions", "capped", "sinks", "all")
ALONE = ("norm", "over all heads", "of each head", "positions")


def _layer(p, options):
    biases = (p[name][0] for name in BIASES)
    return cv.exact.SelfAttention(
        *(p[role] for role in "QKVO"), *biases, heads=HEADS, kv_heads=GROUPS, causal=True, **options
    )


@pytest.mark.parametrize("name", [*VARIANTS, *(pytest.param(one, marks=pytest.mark.slow) for one in ALONE)])
def test_every_block_and_part(name):
    options, plain = _case(name)
    p, X, Y = _weights(), normal(4)(N, L, D), normal(5)(N, L, OUT)
    layer = _layer(p, options)
    p["X"] = X.reshape(N * L, D)

    def loss(F):
        return ((F * Y).logsumexp(-1).sum() + (F**4).sum() / 10) / 3

    truth = dense_hessian(lambda chosen: _plainly(chosen, X, **plain), p, loss)
    assert relative(layer(X), _plainly(p, X, **plain)) < 1e-12
    H = layer.hessian(X, loss, biases=True, wrt_input=True)
    v = normal(6)(len(truth.total), 2)
    for part in ("total", "outer", "functional"):
        matrix, expected = getattr(H, part), getattr(truth, part)
        assert relative(matrix @ v, expected @ v, truth.total @ v) < 1e-10
        for row in H.names:
            for column in H.names:
                entries = expected[matrix.ranges[row], matrix.ranges[column]]
                assert relative(matrix[row, column].dense(), entries, truth.total) < 1e-10, (part, row, column)
    for role in "QVO":
        expected = truth.outer[H.outer.ranges[role], H.outer.ranges[role]]
        assert abs(H.outer[role].trace() - float(expected.trace())) < 1e-10 * float(expected.trace())
        assert abs(H.outer[role].frobenius_norm() - float(expected.norm())) < 1e-10 * float(expected.norm())
    heads = layer.hessian(X, loss, biases=True, per_head=True)
    whole = H.total["Q"].dense().view(D, HEADS, D_K, D, HEADS, D_K)
    assert relative(heads["Q.1", "Q.2"].dense(), whole[:, 1, :, :, 2].reshape(D * D_K, -1), truth.total) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sinks", "norm and positions"])
def test_contractions_without_forming_a_block(name):
    options, plain = _case(name)
    p, X, Y = _weights(), normal(4)(N, L, D), normal(5)(N, L, OUT)
    truth = dense_hessian(lambda chosen: _plainly(chosen, X, **plain), p, lambda F: (F - Y).square().mean())
    H = _layer(p, options).hessian(X, cv.losses.MSE(Y), biases=True)
    tolerance = 1e-12 * float(truth.total.abs().max()) * len(truth.total)
    for part in ("total", "outer", "functional"):
        matrix, whole = getattr(H, part), getattr(truth, part)
        for row in H.names:
            for column in H.names:
                expected = whole[matrix.ranges[row], matrix.ranges[column]]
                assert abs(matrix[row, column].frobenius_norm() - float(expected.norm())) < tolerance
            block, expected = matrix[row], whole[matrix.ranges[row], matrix.ranges[row]]
            assert abs(block.trace() - float(expected.trace())) < tolerance
            assert float((block.diagonal() - expected.diagonal()).abs().max()) < tolerance
            assert abs(block.spectral_norm() - float(torch.linalg.matrix_norm(expected, 2))) < tolerance


def test_the_split_at_the_scores_and_bounds_need_bilinear_scores():
    options, _ = _case("capped")
    p, X, loss = _weights(), normal(4)(N, L, D), cv.losses.MSE(normal(5)(N, L, OUT))
    layer = cv.exact.SelfAttention(*(p[role] for role in "QKVO"), heads=HEADS, kv_heads=GROUPS, **options)
    with pytest.raises(RangeError, match="softcap: the split at the scores"):
        layer.hessian(X, loss).t_functional  # noqa: B018
    with pytest.raises(RangeError, match="norms of queries and keys, soft caps and sinks"):
        cv.exact.bounds.attention(layer, X, loss)


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"softcap": 0.0}, RangeError, "softcap: got 0.0, expected a positive number"),
        ({"sinks": torch.zeros(3).double()}, ShapeError, r"sinks: expected \(4,\), a logit for each head, got \(3,\)"),
        ({"sinks": torch.zeros(4).double(), "activation": "linear"}, RangeError, "sinks: need a softmax"),
        (
            {"q_norm": cv.exact.QueryKeyNorm(torch.ones(8).double())},
            ShapeError,
            "q_norm: has width 8, expected 4 or 16",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options, error, said):
    p = _weights()
    with pytest.raises(error, match=said):
        cv.exact.SelfAttention(*(p[role] for role in "QKVO"), heads=HEADS, kv_heads=GROUPS, **options)
