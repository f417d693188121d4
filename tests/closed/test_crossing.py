"""Cross-attention in closed form against autodiff: two sequences of different lengths, masks, several families."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from adapter_cases import Attention, assert_parts
from family_cases import shaken
from reference import normal

WORDS, D, HEADS = 11, 6, 2
SIZES = {"encoder_layers": 1, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
SIZES |= {"vocab_size": WORDS, "d_model": D, "encoder_ffn_dim": 5, "decoder_ffn_dim": 5, "dropout": 0.0}
SIZES |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}


def words(*shape):
    return torch.randint(3, WORDS, shape, generator=torch.Generator().manual_seed(len(shape)))


def decoder(depth=2):
    """Two layers: tokens mix behind the first one."""
    layer = nn.TransformerDecoderLayer(D, HEADS, 5, 0.0, batch_first=True)
    draw = normal(1)
    data = [((draw(2, 3, D), draw(2, 4, D)), draw(2, 3, D)), ((draw(1, 2, D), draw(1, 5, D)), draw(1, 2, D))]
    return shaken(nn.TransformerDecoder(layer, depth)), nn.MSELoss(), data


def hugging_face(name, config, inputs):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config))
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "T5LayerNorm":  # computes in float32
            norm = nn.RMSNorm(module.weight.shape[0], module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(path, norm)
    target = words(2, 3)
    return shaken(model), None, [{**inputs, "decoder_input_ids": target, "labels": target.flip(0)}]


def text():
    seen = torch.ones(2, 5, dtype=torch.int64)
    seen[1, 3:] = 0
    return {"input_ids": words(2, 5), "attention_mask": seen}


def bart():
    config = SIZES | {"decoder_layers": 2, "max_position_embeddings": 8, "forced_eos_token_id": None}
    return hugging_face("BartForConditionalGeneration", config, text())


def t5():
    config = {"vocab_size": WORDS, "d_model": D, "d_kv": 4, "num_heads": HEADS, "num_layers": 1, "d_ff": 5}
    config |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return hugging_face("T5ForConditionalGeneration", config, text())


def whisper():
    config = SIZES | {"decoder_layers": 1, "num_mel_bins": 4, "max_source_positions": 4, "max_target_positions": 8}
    config |= {"suppress_tokens": None, "begin_suppress_tokens": None}
    return hugging_face("WhisperForConditionalGeneration", config, {"input_features": normal(3)(2, 4, 8)})


@pytest.mark.parametrize("make", [decoder, *(pytest.param(one, marks=pytest.mark.slow) for one in (bart, t5, whisper))])
def test_every_block(make):
    model, loss, data = make()
    first = data[0]
    inputs = {k: v for k, v in first.items() if k != "labels"} if isinstance(first, dict) else first
    blocks = cv.blocks_of(model, inputs).select("*h.0.cross.*")
    H, R = (cv.hessian(model, loss, data, blocks, method=method) for method in ("exact", "autodiff"))
    assert {"Q", "K", "V", "O"} <= {name.rpartition(".")[2] for name in H.names}
    assert_parts(H, R)


def test_heads_and_answers():
    model, loss, data = decoder(1)
    blocks = cv.blocks_of(model, data[0]).select("h.0.cross.[QKV]").per_head()
    H, R = (cv.hessian(model, loss, data[:1], blocks, method=method) for method in ("exact", "autodiff"))
    for name in H.names:
        dense = R[name].dense()
        assert H[name].trace().exact and abs(H[name].trace() - dense.trace()) <= 1e-9 * float(dense.norm())
        assert abs(H[name].frobenius_norm() - dense.norm()) <= 1e-9 * float(dense.norm())


class Wider(nn.Module):
    """Attention, then attention to a memory of another width."""

    def __init__(self):
        super().__init__()
        self.before = Attention()
        self.q, self.k, self.v, self.o = nn.Linear(D, D), nn.Linear(4, D), nn.Linear(4, D), nn.Linear(D, D)

    def forward(self, x, memory):
        x = x + self.before(x)
        q, k, v = (
            one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q(x), self.k(memory), self.v(memory))
        )
        mixed = (q @ k.mT).softmax(-1) @ v
        return x + self.o(mixed.transpose(1, 2).flatten(2))


def test_what_has_no_closed_form():
    draw = normal(2)
    data = [((draw(2, 3, D), draw(2, 4, 4)), draw(2, 3, D))]
    model = shaken(Wider())
    blocks = cv.blocks_of(model, data[0]).select("h.0.cross.*")
    assert cv.hessian(model, nn.MSELoss(), data, blocks).method_of("h.0.cross.Q") == "autodiff"
    with pytest.raises(cv.CurvoscopeError, match="both must have the same width"):
        cv.hessian(model, nn.MSELoss(), data, blocks, method="exact")
