"""Adapters in closed form against nested autodiff in float64, their gauge directions, and what has no closed form."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd

import curvoscope as cv
from adapter_cases import Beside, Inside, Model, Quantised, Twice, adapted, batch, gradient, peft
from curvoscope.curvature import trainable
from curvoscope.errors import BlockNameError, DtypeError, EmptyError, ShapeError
from curvoscope.operators.block_matrix import Tiles
from curvoscope.operators.kronecker import KroneckerSum
from reference import normal, relative

LOSS = cv.losses.CrossEntropy()


def truth(model, batches, blocks):
    """The Hessian over the blocks by jacfwd(grad), which knows nothing of adapters."""
    ((tokens, targets),) = batches
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    start = blocks.gather(parameters).clone()

    def loss(vector):
        moved = {name: one.clone() for name, one in parameters.items()}
        for block, part in zip(blocks.values(), vector.split(list(blocks.sizes.values())), strict=True):
            for piece, entries in block.parts(part):
                spread = torch.zeros_like(moved[piece.parameter])
                here = piece.of(torch.arange(spread.numel()).view(spread.shape)).flatten()
                there = entries - piece.of(moved[piece.parameter]).reshape(-1)
                moved[piece.parameter] = moved[piece.parameter] + spread.flatten().index_add(0, here, there).view(
                    spread.shape
                )
        return nn.functional.cross_entropy(functional_call(model, moved, (tokens,)).flatten(0, 1), targets.flatten())

    return jacfwd(grad(loss))(start)


def assert_blocks(H, dense, exact=True, tolerance=1e-9):
    for i, row in enumerate(H.names):
        assert (H.method_of(row) == "exact") == exact, row
        for column in H.names[i:]:
            here = dense[H.total.ranges[row], H.total.ranges[column]]
            assert relative(H[row, column].dense(), here, dense) < tolerance, (row, column)


@pytest.mark.parametrize(("style", "depth"), [(Beside, 2), (Inside, 1)])
def test_total(style, depth):
    """Every pair of blocks, also between layers, and the weights themselves beside the adapters."""
    model = adapted(style, ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")[: 4 - depth], depth)
    for name, parameter in model.named_parameters():
        if "layers.0.self_attn.q_proj" in name:
            parameter.requires_grad_(True)
    blocks = trainable(model, cv.blocks_of(model))
    assert {"h.0.attn.Q", "h.0.attn.Q.A", "h.0.attn.Q.B", "h.0.attn.b_Q"} <= set(blocks)
    assert_blocks(cv.hessian(model, LOSS, batch(), blocks), truth(model, batch(), blocks))


@pytest.mark.parametrize("split", ["model", "layer"])
def test_parts(split):
    """Outer and functional part, over two batches, against products by autodiff."""
    model, data = adapted(Inside), batch() + batch(1, seed=5)
    H, R = (cv.hessian(model, LOSS, data, split=split, method=method) for method in ("exact", "autodiff"))
    pairs = [("attn.Q.A", "attn.Q.B"), ("attn.O.A", "attn.V.B"), ("attn.O.B",) * 2, ("mlp.up.A", "mlp.up.B")]
    for part in ("outer", "functional"):
        for pair in pairs:
            row, column = (f"h.0.{name}" for name in pair)
            expected = getattr(R, part)[row, column].dense()
            assert relative(getattr(H, part)[row, column].dense(), expected) < 1e-9, (part, pair)


def test_what_a_block_answers():
    """Terms stay terms, heads stay apart, and every number is exact."""
    model = adapted(Inside)
    H = cv.hessian(model, LOSS, batch(), method="exact")
    kinds = {
        "attn.Q.A": KroneckerSum,
        "attn.Q.B": Tiles,
        "attn.O.A": Tiles,
        "attn.O.B": KroneckerSum,
        "mlp.up.B": KroneckerSum,
    }
    for name, kind in kinds.items():
        for matrix in (H.outer, H.functional, H.total):
            block = matrix[f"h.0.{name}"]
            assert isinstance(block.resolved, kind)
            dense = block.dense()
            size = float(dense.norm()) or 1.0
            v = normal(1)(len(dense))
            assert block.trace().exact and block.frobenius_norm().exact
            assert abs(block.frobenius_norm() - dense.norm()) <= 1e-12 * size
            assert abs(block.trace() - dense.trace()) <= 1e-12 * size
            assert float((block.diagonal() - dense.diagonal()).abs().max()) <= 1e-12 * size
            assert float((block @ v - dense @ v).norm()) <= 1e-12 * size * float(v.norm())
            assert relative(block.eigenvalues().value, torch.linalg.eigvalsh(dense), dense) < 1e-11


def test_two_adapters_on_one_weight():
    model = adapted(Beside, names=("self_attn.v_proj",))
    model.layers[0].self_attn.v_proj = Twice(model.layers[0].self_attn.v_proj, rank=1).double()
    blocks = cv.blocks_of(model).select("*.[AB]*")
    assert len(blocks) == 4
    assert_blocks(cv.hessian(model, LOSS, batch(), blocks), truth(model, batch(), blocks))


def test_quantised():
    model = adapted(Quantised)
    H = cv.hessian(model, LOSS, batch())
    blocks = trainable(model, cv.blocks_of(model))
    assert "quantised" in H.plan["h.0.attn.Q.A", "outer"].reason
    assert_blocks(H, truth(model, batch(), blocks), exact=False)
    with pytest.raises(cv.CurvoscopeError, match=r"h\.0\.attn\.Q\.A.*quantised"):
        cv.hessian(model, LOSS, batch(), method="exact")


# ---- gauge directions


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("style", [Beside, Quantised])
def test_gauge_identities(style, seed):
    """g . v = 0, H v from the gradient alone, and nothing of v is left by the projection."""
    model = adapted(style, seed=seed)
    blocks = trainable(model, cv.blocks_of(model))
    H, g = cv.hessian(model, LOSS, batch()), gradient(model, LOSS, batch(), blocks)
    gauge, draw = H.gauge(), normal(seed)
    assert gauge.names == ["h.0.attn.Q", "h.0.attn.V", "h.0.attn.O", "h.0.mlp.up"] and gauge.dimension == 16
    for name in gauge.names:
        xi = draw(2, 2)
        v = gauge.direction(name, xi)
        size = float(v.norm())
        assert abs(float(g @ v)) <= 1e-10 * size * float(g.norm())
        assert float((H @ v - gauge.response(name, xi, g)).norm()) <= 1e-10 * size * float(g.norm())
        assert float(gauge.removed(v).norm()) <= 1e-10 * size
        other = draw(len(v), 3)
        left = gauge.removed(other)
        assert float((v @ left).abs().max()) <= 1e-10 * size * float(other.norm())  # orthogonal to the directions
        torch.testing.assert_close(gauge.removed(left), left, rtol=1e-10, atol=1e-10)


def test_projected():
    """P H P with P from the singular vectors of all directions."""
    model = adapted(Inside)
    H = cv.hessian(model, LOSS, batch())
    gauge = H.gauge()
    units = torch.eye(4, dtype=torch.float64).view(4, 2, 2)
    directions = torch.stack([gauge.direction(name, xi) for name in gauge.names for xi in units], 1)
    Q = torch.linalg.qr(directions).Q
    P = torch.eye(len(Q), dtype=torch.float64) - Q @ Q.T
    expected = P @ H.dense() @ P
    projected = gauge.projected(H.total)
    assert relative(projected.dense(), expected) < 1e-10
    values = torch.linalg.eigvalsh(expected).abs()
    assert int((values < 1e-12 * values.max()).sum()) >= gauge.dimension
    assert abs(float(projected.eigenvalues(1, "LA")[0]) - float(torch.linalg.eigvalsh(expected)[-1])) < 1e-8


def test_zero_factor():
    """As adapters begin: B is zero, and A alone spans the directions."""
    model = adapted(Inside, names=("self_attn.q_proj",))
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.second.zero_()
    gauge = cv.hessian(model, LOSS, batch()).gauge()
    v = gauge.direction("h.0.attn.Q", torch.eye(2, dtype=torch.float64))
    assert gauge.dimension == 4 and float(gauge.removed(v).norm()) < 1e-12 < float(v.norm())
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.first.zero_()
    assert cv.hessian(model, LOSS, batch()).gauge().dimension == 0


def test_gauge_errors():
    model = adapted(Inside)
    H = cv.hessian(model, LOSS, batch())
    gauge, eye = H.gauge(), torch.eye(2, dtype=torch.float64)
    with pytest.raises(BlockNameError, match=r"no adapter on 'h\.0\.attn\.K' among h\.0\.attn\.Q"):
        gauge.direction("h.0.attn.K", eye)
    with pytest.raises(ShapeError, match=r"xi: expected \(2, 2\), got \(3, 3\)"):
        gauge.direction("h.0.attn.Q", torch.eye(3, dtype=torch.float64))
    with pytest.raises(DtypeError, match="xi"):
        gauge.direction("h.0.attn.Q", eye.float())
    with pytest.raises(ShapeError, match="gradient: expected"):
        gauge.response("h.0.attn.Q", eye, torch.zeros(3))
    with pytest.raises(ShapeError, match="vectors: expected"):
        gauge.removed(torch.zeros(3))
    with pytest.raises(ShapeError, match="operator: expected"):
        gauge.projected(H["h.0.attn.Q.A"])
    with pytest.raises(EmptyError, match="no adapter has both its A and its B"):
        cv.hessian(model, LOSS, batch(), cv.blocks_of(model).select("*.A")).gauge()


# ---- PEFT


@pytest.mark.slow
def test_fused_weight():
    """GPT-2's A moves queries, keys and values at once."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 6, "n_layer": 1, "n_head": 2, "n_inner": 5, "n_positions": 4, "vocab_size": 7}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")
    model = peft(transformers.GPT2LMHeadModel(config), r=2, lora_alpha=3, target_modules=["c_attn", "c_proj", "c_fc"])
    H, R = (cv.hessian(model, LOSS, batch(), method=method) for method in ("exact", "autodiff"))
    assert H.names[:4] == ["h.0.attn.QKV.A", "h.0.attn.Q.B", "h.0.attn.K.B", "h.0.attn.V.B"]
    assert_blocks(H, R.dense())
    assert H.gauge().names[0] == "h.0.attn.QKV" and H.gauge().dimension == 4 * len(H.gauge().names)
    g = gradient(model, lambda out, y: LOSS(out, y), batch(), trainable(model, cv.blocks_of(model)))
    xi = normal(3)(2, 2)
    v = H.gauge().direction("h.0.attn.QKV", xi)
    assert float((H @ v - H.gauge().response("h.0.attn.QKV", xi, g)).norm()) <= 1e-10 * float(v.norm())


@pytest.mark.slow
def test_behind_norms():
    """Qwen3 normalises queries and keys, which is read off the graph of a model without its adapters."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    config = transformers.Qwen3Config(**sizes, intermediate_size=5, vocab_size=7, attn_implementation="sdpa")
    plain = transformers.Qwen3ForCausalLM(config)
    for path, module in list(plain.named_modules()):
        if type(module).__name__ == "Qwen3RMSNorm":  # computes in float32
            norm = nn.RMSNorm(module.weight.shape[0], module.variance_epsilon)
            norm.weight = module.weight
            plain.set_submodule(path, norm)
    model = peft(plain, r=2, lora_alpha=3, target_modules=["q_proj", "k_proj", "o_proj"])
    blocks = trainable(model, cv.blocks_of(model, batch()[0]))
    H, R = (cv.hessian(model, LOSS, batch(), blocks, method=method) for method in ("exact", "autodiff"))
    assert_blocks(H, R.dense())


@pytest.mark.slow
def test_dora():
    """PEFT holds the norm fixed in its backward pass; the Hessian is that of the loss."""
    draw = normal(4)
    x, y = draw(6, 5), draw(6, 3)
    model = peft(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), r=2, use_dora=True, target_modules=["0"])
    H = cv.hessian(model, nn.MSELoss(), [(x, y)])
    weights = {name.removeprefix("base_model.model."): one.detach() for name, one in model.named_parameters()}
    A, B = (weights[f"0.lora_{part}.default.weight"].T for part in "AB")
    scale = model.base_model.model[0].scaling["default"]

    def loss(A, B, m):
        V = weights["0.base_layer.weight"].T + scale * A @ B
        hidden = (x @ (V * (m / V.square().sum(0).sqrt())) + weights["0.base_layer.bias"]).tanh()
        return (hidden @ weights["2.weight"].T + weights["2.bias"] - y).square().mean()

    start = A, B, weights["0.lora_magnitude_vector.default.weight"]
    expected = jacfwd(grad(loss, argnums=(0, 1, 2)), argnums=(0, 1, 2))(*start)
    for i, row in enumerate(H.names):
        assert H.method_of(row) == "autodiff" and "DoRA" in H.plan[row, "outer"].reason
        for j, column in enumerate(H.names):
            here = expected[i][j].reshape(math.prod(H.shapes[row]), -1)
            assert relative(H[row, column].dense(), here) < 1e-9


@pytest.mark.slow
def test_ia3():
    model = peft(Model(), kind="IA3Config", target_modules=["k_proj"], feedforward_modules=[])
    H = cv.hessian(model, LOSS, batch())
    assert H.names == ["h.0.attn.K.ia3"] and "IA3" in H.plan["h.0.attn.K.ia3", "outer"].reason
    blocks = trainable(model, cv.blocks_of(model))
    assert_blocks(H, truth(model, batch(), blocks), exact=False)
