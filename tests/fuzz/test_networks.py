"""Transformer blocks in closed form, and `cv.hessian` of small models over any blocks, against autodiff."""

import re

import torch
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from autodiff_cases import GPT, MLP, points, tokens, truth_of
from autodiff_cases import cross_entropy as mean_cross_entropy
from curvoscope.curvature import CrossEntropy, blocks_of, hessian
from curvoscope.errors import ModelError
from curvoscope.papers.networks import GPT2
from family_cases import shaken
from fuzz_cases import LEAST, TOLERANCE, assert_agrees, dtypes
from network_cases import Compared, block_cases
from reference import Dense

PARTS = ("total", "outer", "functional")
seeds = st.integers(0, 2**16)


def test_blocks_in_closed_form(fuzz):
    def check(options, shared, rotary):
        if shared:
            options |= {"kv_heads": 1}
        if rotary:
            options |= {"rotary": 10.0, "widths": (2, options["widths"][1])}
        Compared(**options).assert_whole()

    fuzz(check, block_cases, st.booleans(), st.booleans(), examples=1)


def _squared_error(outputs, targets):
    """From primitives: torch's own fails under jacfwd(grad)."""
    return (outputs - targets).square().mean()


def _mlp(draw):
    activation = draw(st.sampled_from([nn.GELU, nn.SiLU, nn.Tanh]))
    return MLP(activation), nn.MSELoss(), _squared_error, points(draw(st.integers(1, 4)))


def _nano_gpt(draw):
    return GPT(draw(st.integers(1, 2))), CrossEntropy(), mean_cross_entropy, tokens(draw(st.integers(1, 3)), 4)


def _gpt2(draw):
    norm, activation = draw(st.sampled_from(["none", "pre"])), draw(st.sampled_from(["softmax", "linear"]))
    model = GPT2(d=4, depth=draw(st.integers(1, 2)), norm=norm, activation=activation, vocabulary=6, context=5)
    return shaken(model), CrossEntropy(), mean_cross_entropy, tokens(draw(st.integers(1, 3)), 4)


def _encoder(draw):
    first, bias = draw(st.booleans()), draw(st.booleans())
    layer = nn.TransformerEncoderLayer(4, 2, 3, 0.0, norm_first=first, batch_first=True, bias=bias, activation="gelu")
    model = shaken(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    generator = torch.Generator().manual_seed(draw(seeds))
    x, y = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return model, nn.MSELoss(), _squared_error, (x, y)


@st.composite
def models(draw):
    """A model, its loss (as `hessian` takes it, and plainly), data, and some of its blocks, by name or by pattern."""
    model, loss, plain, data = draw(st.sampled_from([_mlp, _nano_gpt, _gpt2, _encoder]))(draw)
    blocks = blocks_of(model)
    if draw(st.booleans()):
        blocks = blocks.per_head()
    chosen = draw(st.lists(st.sampled_from(list(blocks)), min_size=1, max_size=3, unique=True))
    if draw(st.booleans()):  # the same part of all layers, or of all heads
        chosen = [re.sub(r"\d", "?", chosen[0])]
    return model, loss, plain, data, blocks.select(*chosen)


def test_models(fuzz):
    def check(problem, method, split, dtype, number):
        model, loss, plain, (inputs, targets), blocks = problem
        used = {name: p.detach() for name, p in model.named_parameters() if name in blocks.parameters}
        truth = truth_of(lambda p: functional_call(model, p, (inputs,)), used, lambda F: plain(F, targets), blocks)
        own = model.to(dtype)
        cast = [t.to(dtype) if t.is_floating_point() else t for t in (inputs, targets)]
        try:
            H = hessian(own, loss, [tuple(cast)], blocks, method=method, split=split)
        except ModelError as error:
            assert method == "exact" and error.argument in ("method", "split", "blocks"), error
            return
        truth = Dense(*(part.detach() for part in (truth.total, truth.outer, truth.functional)))
        size = max(float(getattr(truth, part).abs().max()) for part in PARTS)
        names = list(blocks)
        assert list(H.names) == names
        for part in PARTS if split == "model" else ("total",):
            matrix, expected = getattr(H, part), getattr(truth, part)
            v = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
            assert_agrees(matrix @ v.to(dtype), expected @ v, size * len(v), f"{part} product")
            row, column = names[number % len(names)], names[number // 7 % len(names)]
            block = expected[matrix.ranges[row], matrix.ranges[column]]
            assert_agrees(matrix[row, column].dense(), block, size, f"{part} {row} {column}")
            if row == column:
                trace = matrix[row].trace()
                rounding = TOLERANCE[dtype] * max(LEAST, size) * len(block)  # some are zero
                error = 8 * getattr(trace, "stderr", 0.0) + rounding
                assert abs(float(trace) - float(block.trace())) <= error, f"{part} trace"
        name = names[number % len(names)]
        try:
            together = H.outer[name].dense() + H.functional[name].dense()
        except ModelError as error:  # an embedding that words are read out with acts beside its own output
            assert split == "layer" and name == "embed" and "other than through the output" in str(error), error
            return
        assert_agrees(together, H.total[name].dense().double(), size, f"{name}: outer + functional")

    methods = st.sampled_from(["auto", "autodiff", "exact"])
    fuzz(check, models(), methods, st.sampled_from(["model", "layer"]), dtypes, seeds, examples=2)
