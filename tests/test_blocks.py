import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck

from curvoscope.blocks import ROW, STORED, TRANSPOSED, Block, Blocks, Layout, Piece, flat
from curvoscope.errors import BlockNameError, DtypeError, EmptyError, ModelError, RangeError, ShapeError
from reference import normal

PER_HEAD_OUT, PER_HEAD_IN, ROW_OF_HEADS = Layout((1,), (0, 2)), Layout((0, 1), (2,)), Layout((), (0, 1))


def fused(part):
    """Q, K or V of a fused nn.Linear with 2 heads of width 2 on width 5: weight (12, 5), bias (12,)."""
    return slice(4 * part, 4 * part + 4)


SHAPES = {
    "linear": (4, 3),
    "conv1d": (3, 4),
    "fused": (12, 5),
    "fused_bias": (12,),
    "W_Q": (3, 5, 2),
    "W_O": (3, 2, 5),
    "b_Q": (3, 2),
    "gamma": (6,),
    "beta": (6,),
    "patches": (4, 3, 2, 2),
    "scalar": (),
}
BLOCKS = Blocks(
    [
        Block("linear", (Piece.whole("linear", (4, 3), TRANSPOSED),)),
        Block("conv1d", (Piece.whole("conv1d", (3, 4), STORED),), tied=("other.conv1d",)),
        *(
            Block(f"h.0.attn.{name}", (Piece("fused", (12, 5), (fused(i), slice(None)), TRANSPOSED),), heads=2, axis=1)
            for i, name in enumerate("QKV")
        ),
        *(
            Block(f"h.0.attn.b_{name}", (Piece("fused_bias", (12,), (fused(i),), ROW),), heads=2, axis=1)
            for i, name in enumerate("QKV")
        ),
        Block("h.1.attn.Q", (Piece.whole("W_Q", (3, 5, 2), PER_HEAD_OUT),), heads=3, axis=1),
        Block("h.1.attn.O", (Piece.whole("W_O", (3, 2, 5), PER_HEAD_IN),), heads=3, axis=0),
        Block("h.1.attn.b_Q", (Piece.whole("b_Q", (3, 2), ROW_OF_HEADS),), heads=3, axis=1),
        Block("h.1.norm1", (Piece.whole("gamma", (6,), ROW), Piece.whole("beta", (6,), ROW))),
        Block("patches", (Piece.whole("patches", (4, 3, 2, 2), flat(4)),)),
        Block("scalar", (Piece.whole("scalar", (), flat(0)),)),
    ]
)
# The entry in row i and column j of each block's matrix, written out.
ENTRIES = {
    "linear": lambda t, i, j: t["linear"][j, i],
    "conv1d": lambda t, i, j: t["conv1d"][i, j],
    "h.0.attn.Q": lambda t, i, j: t["fused"][j, i],
    "h.0.attn.K": lambda t, i, j: t["fused"][4 + j, i],
    "h.0.attn.V": lambda t, i, j: t["fused"][8 + j, i],
    "h.0.attn.b_Q": lambda t, i, j: t["fused_bias"][j],
    "h.0.attn.b_K": lambda t, i, j: t["fused_bias"][4 + j],
    "h.0.attn.b_V": lambda t, i, j: t["fused_bias"][8 + j],
    "h.1.attn.Q": lambda t, i, j: t["W_Q"][j // 2, i, j % 2],
    "h.1.attn.O": lambda t, i, j: t["W_O"][i // 2, i % 2, j],
    "h.1.attn.b_Q": lambda t, i, j: t["b_Q"][j // 2, j % 2],
    "h.1.norm1": lambda t, i, j: t[("gamma", "beta")[i]][j],
    "patches": lambda t, i, j: t["patches"][i, j // 4, j // 2 % 2, j % 2],
    "scalar": lambda t, i, j: t["scalar"],
}


class Model(nn.Module):
    """Parameters of the shapes above."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))


def tensors(seed, count=None):
    draw = normal(seed)
    return {name: draw((*(() if count is None else (count,)), *shape)) for name, shape in SHAPES.items()}


def zeros(count=None):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors(0, count).items()}


@pytest.mark.parametrize("name", BLOCKS.names)
def test_the_matrix_has_the_entries_written_out(name):
    found, t = BLOCKS[name].matrix(tensors(1)), tensors(1)
    rows, columns = BLOCKS.shapes[name]
    assert found.shape == (rows, columns)
    for i, j in itertools.product(range(rows), range(columns)):
        assert found[i, j] == ENTRIES[name](t, i, j)
    assert torch.equal(BLOCKS[name].gather(tensors(1)), found.flatten())


def test_every_layout_is_tried():
    assert set(ENTRIES) == set(BLOCKS)
    assert BLOCKS.parameters == set(SHAPES)


@pytest.mark.parametrize("count", [None, 1, 3])
@pytest.mark.parametrize("blocks", [BLOCKS, BLOCKS.per_head()], ids=["whole", "per_head"])
def test_gather_and_scatter_are_inverse_and_adjoint(blocks, count):
    t = tensors(2, count)
    for block in blocks.values():
        vector = normal(3)(*(() if count is None else (count,)), block.size)
        into = zeros(count)
        block.scatter(vector, into)
        assert torch.equal(block.gather(into), vector)
        inner = sum((into[name] * t[name]).sum() for name in SHAPES)
        torch.testing.assert_close(inner, (vector * block.gather(t)).sum(), rtol=1e-12, atol=1e-12)
        assert sum(int((into[name] != 0).sum()) for name in SHAPES) == vector.numel()  # nothing else is touched


@pytest.mark.parametrize("count", [None, 2])
def test_all_blocks_at_once(count):
    t, into = tensors(4, count), zeros(count)
    vector = BLOCKS.gather(t)
    assert vector.shape[-1] == sum(BLOCKS.sizes.values()) == sum(x.numel() for x in tensors(4).values())
    BLOCKS.scatter(vector, into)
    for name in SHAPES:
        assert torch.equal(into[name], t[name])


@pytest.mark.parametrize("name", BLOCKS.names)
def test_both_are_differentiable(name):
    block = BLOCKS[name]
    inputs = [tensor.requires_grad_() for tensor in tensors(5).values()]

    def gathered(*values):
        return block.gather(dict(zip(SHAPES, values, strict=True)))

    def scattered(vector):
        into = zeros()
        block.scatter(vector, into)
        return tuple(into[piece.parameter] for piece in block.pieces)

    assert gradcheck(gathered, inputs)
    assert gradcheck(scattered, [normal(6)(block.size).requires_grad_()])


def test_gather_of_a_matrix_as_stored_copies_nothing():
    t = tensors(7)
    assert BLOCKS["conv1d"].gather(t).data_ptr() == t["conv1d"].data_ptr()


@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if block.heads is not None])
def test_heads_side_by_side_are_the_whole(name):
    block, t = BLOCKS[name], tensors(8)
    parts = BLOCKS.per_head().select(f"{name}.[0-9]")
    assert parts.names == [f"{name}.{i}" for i in range(block.heads)]
    assert torch.equal(torch.cat([part.matrix(t) for part in parts.values()], block.axis), block.matrix(t))


def test_per_head_leaves_the_others_alone_and_covers_as_much():
    per_head = BLOCKS.per_head()
    assert {name: per_head[name] for name in per_head if name in BLOCKS} == {
        name: block for name, block in BLOCKS.items() if block.heads is None
    }
    assert per_head.covers(Model())
    assert per_head.per_head() == per_head


def test_the_mapping():
    assert list(BLOCKS) == BLOCKS.names == list(ENTRIES)
    assert len(BLOCKS) == 14
    assert BLOCKS["linear"].shape == BLOCKS.shapes["linear"] == (3, 4)
    assert BLOCKS.sizes["h.1.norm1"] == 12
    assert "linear" in BLOCKS
    assert "nothing" not in BLOCKS
    assert len({*BLOCKS.values()}) == 14  # blocks can be hashed


def test_select_keeps_the_order_of_the_model_and_repeats_nothing():
    assert BLOCKS.select("*.attn.[QKV]").names == ["h.0.attn.Q", "h.0.attn.K", "h.0.attn.V", "h.1.attn.Q"]
    assert BLOCKS.select("scalar", "h.1.*", "*norm1").names == [
        "h.1.attn.Q",
        "h.1.attn.O",
        "h.1.attn.b_Q",
        "h.1.norm1",
        "scalar",
    ]
    assert BLOCKS.select("h.0.attn.Q")["h.0.attn.Q"] == BLOCKS["h.0.attn.Q"]


@given(st.lists(st.sampled_from(BLOCKS.names), min_size=1, max_size=5))
def test_names_select_themselves(names):
    assert BLOCKS.select(*names).names == [name for name in BLOCKS if name in names]


def test_a_pattern_without_a_match_names_the_nearest_blocks():
    with pytest.raises(BlockNameError, match=r"'h\.0\.atn\.Q' matches none of 14 blocks; nearest: h\.0\.attn\.Q") as e:
        BLOCKS.select("*.norm1", "h.0.atn.Q")
    assert e.value.argument == "patterns"
    with pytest.raises(BlockNameError, match=r"'\*\.ATTN\.Q' matches none"):
        BLOCKS.select("*.ATTN.Q")
    with pytest.raises(BlockNameError, match=r"there is no 'h\.1\.norm' among 14 names; nearest: h\.1\.norm1"):
        BLOCKS["h.1.norm"]
    with pytest.raises(EmptyError, match="at least one"):
        BLOCKS.select()


def test_covers_means_each_entry_once():
    model = Model()
    assert BLOCKS.covers(model)
    assert not BLOCKS.select("*.attn.*").covers(model)
    again = Block("again", (Piece("fused", (12, 5), (slice(3, 5), slice(0, 1)), TRANSPOSED),))
    assert not Blocks([*BLOCKS.values(), again]).covers(model)
    shrunk = Blocks(block for name, block in BLOCKS.items() if name != "h.0.attn.K")
    assert not shrunk.covers(model)
    assert not Blocks([*shrunk.values(), replaced("h.0.attn.Q")]).covers(model)  # as many entries, some of them twice
    missing = Block("missing", (Piece.whole("missing", (2,), ROW),))
    assert not Blocks([*BLOCKS.values(), missing]).covers(model)
    model.late = nn.Parameter(torch.zeros(2))
    assert not BLOCKS.covers(model)
    named = [
        Block(block.name, block.pieces, ("late",)) if block.name == "linear" else block for block in BLOCKS.values()
    ]
    assert Blocks(named).covers(model)


def replaced(name):
    return Block("twice", BLOCKS[name].pieces)


def test_check_says_what_does_not_fit():
    BLOCKS.check(Model())
    model = Model()
    del model.linear
    with pytest.raises(ModelError, match="no parameter 'linear', part of block 'linear'"):
        BLOCKS.check(model)
    model = Model()
    model.fused = nn.Parameter(torch.zeros(9, 5))
    with pytest.raises(ShapeError, match=r"fused: is \(9, 5\), was \(12, 5\).*blocks_of again"):
        BLOCKS.check(model)
    model = Model()
    model.fused_bias.requires_grad_(False)
    with pytest.raises(ModelError, match=r"fused_bias: is frozen.*requires_grad_\(True\).*'h\.0\.attn\.b_Q'"):
        BLOCKS.check(model)
    BLOCKS.select("*.attn.[QKV]").check(model)  # only what is selected counts
    model = Model()
    model.W_Q = nn.Parameter(torch.zeros(3, 5, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(DtypeError, match=r"W_Q: is torch.int8.*without quantisation"):
        BLOCKS.check(model)
    both = Blocks([*BLOCKS.values(), BLOCKS["h.0.attn.Q"].head(1)])
    with pytest.raises(RangeError, match=r"blocks: 'h\.0\.attn\.Q' and 'h\.0\.attn\.Q\.1' share entries of 'fused'"):
        both.check(Model())


def test_tensors_that_do_not_fit():
    block, norm = BLOCKS["linear"], BLOCKS["h.1.norm1"]
    with pytest.raises(ModelError, match="tensors: has no 'linear'"):
        block.gather({})
    with pytest.raises(ShapeError, match=r"linear: expected \(4, 3\), or n of them, got \(3, 4\)"):
        block.gather({"linear": torch.zeros(3, 4)})
    with pytest.raises(ShapeError, match=r"vector: expected \(12,\) or \(n, 12\), got \(11,\)"):
        block.scatter(torch.zeros(11), zeros())
    with pytest.raises(ShapeError, match=r"'gamma' with \(6,\) cannot take vectors \(2, 12\)"):
        norm.scatter(torch.zeros(2, 12), zeros())
    with pytest.raises(ShapeError, match=r"'gamma' with \(2, 6\) cannot take vectors \(12,\)"):
        norm.scatter(torch.zeros(12), zeros(2))
    with pytest.raises(ShapeError, match="vector: expected"):
        BLOCKS.scatter(torch.zeros(3), zeros())


def test_blocks_that_make_no_sense():
    with pytest.raises(RangeError, match="is not a part of its shape"):
        Piece("w", (4, 3), (slice(0, 0), slice(None)), STORED)
    with pytest.raises(RangeError, match="is not a part of its shape"):
        Piece("w", (4, 3), (slice(0, 4, 2), slice(None)), STORED)
    with pytest.raises(ShapeError, match="do not fit its shape"):
        Piece("w", (4, 3), (slice(None),), STORED)
    with pytest.raises(ShapeError, match="do not fit its shape"):
        Piece("w", (4, 3), (slice(None), slice(None)), Layout((0,), (0,)))
    with pytest.raises(ShapeError, match="do not fit"):
        Block("norm", (Piece.whole("gamma", (6,), ROW), Piece.whole("beta", (5,), ROW)))
    with pytest.raises(RangeError, match="cannot be divided among 3 heads"):
        Block("Q", (Piece.whole("w", (4, 4), STORED),), heads=3, axis=1)
    with pytest.raises(RangeError, match="give both or none"):
        Block("Q", (Piece.whole("w", (4, 4), STORED),), heads=2)
    with pytest.raises(RangeError, match="has no heads"):
        BLOCKS["linear"].head(0)
    with pytest.raises(RangeError, match="got head 2, expected 0 to 1"):
        BLOCKS["h.0.attn.Q"].head(2)
    with pytest.raises(BlockNameError, match="'linear' occurs twice"):
        Blocks([BLOCKS["linear"], BLOCKS["linear"]])
    with pytest.raises(EmptyError, match="there are none"):
        Blocks([])


def test_the_table_shows_the_map():
    rows = {line.split()[0]: line for line in BLOCKS.table().splitlines()}
    assert rows["block"].split() == ["block", "shape", "parameter", "slice", "layout", "heads", "tied", "to"]
    assert rows["h.0.attn.K"].split() == ["h.0.attn.K", "5", "x", "4", "fused", "[4:8,", ":]", "transposed", "2"]
    assert rows["conv1d"].split() == ["conv1d", "3", "x", "4", "conv1d", "[:,", ":]", "as", "stored", "other.conv1d"]
    assert "axes 1 x 0,2" in rows["h.1.attn.Q"]
    assert rows["beta"].split() == ["beta", "[:]", "one", "row"]
    assert repr(BLOCKS) == f"14 blocks, 223 entries\n{BLOCKS.table()}"


def test_a_long_map_is_shortened_in_its_repr_only():
    many = Blocks(Block(f"w{i}", (Piece.whole(f"w{i}", (2, 2), STORED),)) for i in range(100))
    assert len(many.table().splitlines()) == 101
    assert len(repr(many).splitlines()) == 42
    assert "lines more; print table() for all" in repr(many)
    assert repr(many).endswith(many.table().splitlines()[-1])


def test_heads_of_a_tensor_that_holds_queries_keys_and_values():
    """(3, heads, d, k), as `torch.einsum` takes it: the first axis of the columns has one entry."""
    tensors = {"qkv": torch.arange(3 * 2 * 5 * 4.0).view(3, 2, 5, 4)}
    piece = Piece("qkv", (3, 2, 5, 4), (slice(1, 2), *[slice(None)] * 3), Layout((2,), (0, 1, 3)))
    keys = Blocks([Block("h.0.attn.K", (piece,), heads=2, axis=1)]).per_head()
    for head in range(2):
        assert torch.equal(keys[f"h.0.attn.K.{head}"].matrix(tensors), tensors["qkv"][1, head])
