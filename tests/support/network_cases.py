"""Transformer blocks and stacks as plain torch functions of their weights, beside the exact layers."""

import math

import torch
from hypothesis import strategies as st

import curvoscope as cv
from curvoscope.papers.theorems.autodiff import differentiate
from curvoscope.papers.theorems.calculus import assemble
from layer_cases import PRIMITIVES
from reference import rotations

EPS = 0.1
TOLERANCE = 1e-9
LABELS = {"W_gate": "gate", "W1": "up", "W2": "down", "b_gate": "b_gate", "b1": "b_up", "b2": "b_down"}


class Draw:
    """Random tensors in float64 from one seed."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def loss(self, kind, shape):
        Y = self(*shape)
        if kind == "mse":
            return cv.losses.MSE(Y)
        if kind == "cross-entropy":
            targets = torch.randint(0, 5, shape[:-1], generator=self.generator)
            return cv.losses.CrossEntropy(targets, self(shape[-1], 5))
        return {
            "token": lambda F: ((F * Y).sum(-1).sin() + F.pow(3).sum(-1)).mean(),
            "sequence": lambda F: (F * Y).sum((-1, -2)).sin().mean() + F.square().mean(),
            "batch": lambda F: (F * Y).sum().sin() + F.square().mean(),
        }[kind]


class BlockCase:
    """A block, its weights by name, and the same block from primitives: `network(p, X, add)`.

    `add(name, values)` is called on the output of every layer, so that a test can move it.
    """

    def __init__(
        self,
        draw,
        d=3,
        placement="pre",
        heads=1,
        kv_heads=None,
        widths=(2, 2),
        hidden=4,
        causal=True,
        norm="layer",
        activation="gelu",
        gated=False,
        biases=False,
        rotary=None,
    ):
        self.placement, self.heads, self.kv_heads, self.causal = placement, heads, kv_heads or heads, causal
        self.activation, self.gated, self.widths, self.rotary = activation, gated, widths, rotary
        key, value = widths
        sizes = {
            "Q": (d, heads * key),
            "K": (d, self.kv_heads * key),
            "V": (d, self.kv_heads * value),
            "O": (heads * value, d),
        }
        weights = {name: draw(*size) / size[0] ** 0.5 for name, size in sizes.items()}
        bias = {f"b_{name}": draw(size[1]) for name, size in sizes.items()} if biases else {}
        self.attention = cv.exact.SelfAttention(
            *weights.values(), **bias, heads=heads, kv_heads=kv_heads, causal=causal, biases=biases, rotary=rotary
        )
        mlp = {"W1": draw(d, hidden) / d**0.5, "b1": draw(hidden), "W2": draw(hidden, d) / hidden**0.5, "b2": draw(d)}
        if gated:
            mlp |= {"W_gate": draw(d, hidden) / d**0.5}
        self.feedforward = cv.exact.FeedForward(**mlp, activation=activation)
        self.weights = {f"attn.{name}": values for name, values in (weights | bias).items()}
        self.weights |= {f"mlp.{LABELS[name]}": values for name, values in mlp.items()}
        norms = []
        for i in (1, 2) if placement != "none" else ():
            gamma, beta = 1 + draw(d) / 2, draw(d)
            self.weights[f"norm{i}.gamma"] = gamma
            if norm == "layer":
                self.weights[f"norm{i}.beta"] = beta
            norms.append(cv.exact.LayerNorm(gamma, beta, EPS) if norm == "layer" else cv.exact.RMSNorm(gamma, EPS))
        self.block = cv.exact.TransformerBlock(self.attention, self.feedforward, *norms, placement=placement)

    def network(self, p, X, add=lambda name, values: values):
        def normalised(name, x):
            return add(name, normalise(x, p[f"{name}.gamma"].flatten(), p.get(f"{name}.beta")))

        def attended(x):
            return add("attn", self.attend(p, x))

        def fed(x):
            phi = PRIMITIVES[self.activation]
            h = x @ p["mlp.up"] + p["mlp.b_up"].flatten()
            z = phi(x @ p["mlp.gate"]) * h if self.gated else phi(h)
            return add("mlp", z @ p["mlp.down"] + p["mlp.b_down"].flatten())

        if self.placement == "pre":
            Y = X + attended(normalised("norm1", X))
            return Y + fed(normalised("norm2", Y))
        if self.placement == "post":
            Y = normalised("norm1", X + attended(X))
            return normalised("norm2", Y + fed(Y))
        Y = X + attended(X)
        return Y + fed(Y)

    def attend(self, p, x):
        def heads(name, count):
            values = x @ p[f"attn.{name}"]
            if f"attn.b_{name}" in p:
                values = values + p[f"attn.b_{name}"].flatten()
            split = torch.stack(values.chunk(count, -1), -3)
            if self.rotary is not None and name != "V":
                R = rotations(x.shape[-2], self.widths[0], self.rotary)
                split = torch.einsum("lpq,...lq->...lp", R, split)
            return split.repeat_interleave(self.heads // count, -3)

        q, k, v = heads("Q", self.heads), heads("K", self.kv_heads), heads("V", self.kv_heads)
        scores = q @ k.mT / math.sqrt(self.widths[0])
        if self.causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~visible, -math.inf)
        out = torch.cat((scores.softmax(-1) @ v).unbind(-3), -1) @ p["attn.O"]
        return out + p["attn.b_O"].flatten() if "attn.b_O" in p else out


def normalise(x, gamma, beta):
    centred = x if beta is None else x - x.mean(-1, keepdim=True)
    y = gamma * centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if beta is None else y + beta.flatten()


class Compared:
    """A block, an input and a loss, with the Hessian and what autodiff says of it."""

    def __init__(self, batch=(2, 3), kind="mse", wrt_input=True, seed=0, **options):
        draw = Draw(seed)
        self.case = BlockCase(draw, **options)
        d = self.case.block.d
        self.X, self.loss = draw(*batch, d), draw.loss(kind, (*batch, d))
        self.H = self.case.block.hessian(self.X, self.loss, wrt_input=wrt_input)
        parameters = {**self.case.weights, "X": self.X}
        self.parameters = {name: parameters[name] for name in self.H.names}
        self.truth = differentiate(lambda p: self.case.network(p, p.get("X", self.X)), self.loss, self.parameters)
        self.v = draw(self.H.shape[0], 2)

    def parts(self):
        H, truth = self.H, self.truth
        return (H.outer, truth.outer), (H.functional, truth.functional), (H.total, truth.hessian)

    @property
    def scale(self):
        return max(block.abs().max() for block in self.truth.hessian.values())

    def assert_whole(self):
        for found, expected in self.parts():
            expected = assemble(expected, self.H.names)
            assert_close(found.dense(), expected, self.scale)
            assert_close(found @ self.v, expected @ self.v, self.scale * len(expected))

    def assert_blocks(self):
        """Each block alone, asked for above the diagonal or below."""
        for found, expected in self.parts():
            for number, ((row, column), block) in enumerate(expected.items()):
                if (self.H.names.index(row) <= self.H.names.index(column)) == bool(number % 3):
                    assert_close(found[row, column].dense(), block, self.scale)


def assert_close(found, expected, scale=None):
    assert found.shape == expected.shape
    scale = expected.abs().max() if scale is None else scale
    assert (found - expected).abs().max() <= TOLERANCE * (1e-6 + scale)


block_cases = st.fixed_dictionaries(
    {
        "batch": st.lists(st.integers(1, 3), min_size=1, max_size=2),
        "kind": st.sampled_from(["mse", "cross-entropy", "token", "sequence", "batch"]),
        "d": st.integers(2, 3),
        "placement": st.sampled_from(["pre", "post", "none"]),
        "heads": st.integers(1, 2),
        "widths": st.tuples(st.integers(1, 2), st.integers(1, 2)),
        "hidden": st.integers(1, 4),
        "causal": st.booleans(),
        "norm": st.sampled_from(["layer", "rms"]),
        "activation": st.sampled_from(["relu", "gelu", "silu"]),
        "gated": st.booleans(),
        "biases": st.booleans(),
        "seed": st.integers(0, 10**6),
    }
)
