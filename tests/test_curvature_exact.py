"""The same numbers in closed form and by autodiff, for every family and every part; and who gets which."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import curvoscope as cv
from autodiff_cases import GPT, MLP, cross_entropy, points, tokens, truth
from curvoscope.autodiff.matrix import AutodiffBlock
from curvoscope.blocks import Blocks
from curvoscope.closed import closed_forms
from curvoscope.closed.layers import ClosedFormLayers
from curvoscope.curvature import CrossEntropy, MeanLoss, blocks_of, hessian
from curvoscope.errors import BlockNameError, MemoryLimitError, ModelError
from curvoscope.estimate import Estimate
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.papers.networks import GPT2
from curvoscope.settings import current
from family_cases import shaken
from reference import normal, relative

PARTS = ("total", "outer", "functional")
LAYERS = ("*.attn.*", "*.mlp.*")
WORDS, LENGTH = 11, 4
SIZES = {"hidden_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 5}


def _words(rows=3, length=LENGTH):
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(rows))


def _text(padding=True):
    """Padding on the right in one row, on the left in another: there a causal model's first query sees nothing."""
    batch = {"input_ids": _words(), "labels": _words().flip(0)}
    if padding:
        seen = torch.ones(3, LENGTH, dtype=torch.int64)
        seen[0, 3:] = seen[1, :1] = 0
        batch |= {"attention_mask": seen, "labels": batch["labels"].masked_fill(seen == 0, -100)}
    return [batch]


def _hf(name, config, attention):
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, name)
    return shaken(model_class(model_class.config_class(**config, attn_implementation=attention)))


def _gpt2(attention="sdpa", padding=True):
    sizes = {"n_embd": 6, "n_layer": 2, "n_head": 2, "n_inner": 5, "n_positions": LENGTH, "vocab_size": WORDS}
    return _hf("GPT2LMHeadModel", sizes | {"bos_token_id": 0, "eos_token_id": 0}, attention), None, _text(padding)


def _llama(biases=True, kv_heads=2, padding=True):
    """Its norms compute in float32; torch's own take their places, so that 1e-9 can be asked for."""
    options = {"num_key_value_heads": kv_heads, "vocab_size": WORDS, "head_dim": 4}  # heads wider than d / heads
    options |= {"hidden_size": 4, "num_attention_heads": 4}
    model = _hf("LlamaForCausalLM", SIZES | options | {"attention_bias": biases, "mlp_bias": biases}, "sdpa")
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(module.weight.shape[0], module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(path, norm)
    return model, None, _text(padding)


def _bert(name="BertForMaskedLM", attention="sdpa"):
    model = _hf(name, SIZES | {"vocab_size": WORDS, "max_position_embeddings": LENGTH}, attention)
    if name == "BertForMaskedLM":
        return model, None, _text()
    return model, CrossEntropy(), [{**_text()[0], "labels": torch.tensor([0, 1, 1])}]


def _vit():
    images = normal(3)(2, 3, 4, 4)
    model = _hf("ViTForImageClassification", SIZES | {"image_size": 4, "patch_size": 2}, "sdpa")
    return model, CrossEntropy(), [{"pixel_values": images, "labels": torch.tensor([1, 0])}]


def _encoder(norm_first, batch_first, bias=True, activation="relu", **call):
    layer = nn.TransformerEncoderLayer(
        6, 2, 5, 0.0, norm_first=norm_first, batch_first=batch_first, bias=bias, activation=activation
    )
    model = shaken(nn.TransformerEncoder(layer, 2, nn.LayerNorm(6), enable_nested_tensor=False))
    x, y = normal(4)(3, LENGTH, 6), normal(5)(3, LENGTH, 6)
    if not batch_first:
        x, y = x.transpose(0, 1).contiguous(), y.transpose(0, 1).contiguous()
    return model, nn.MSELoss(), [({"src": x, **call}, y)]


def _own(norm, activation, residual=True):
    model = GPT2(d=4, depth=2, norm=norm, activation=activation, vocabulary=6, context=5, residual=residual)
    return shaken(model), CrossEntropy(), [tokens(3, 4)]


class Alone(nn.Module):
    """Attention and nothing else; the same tensor for query, key and value."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x, mask=None):
        return self.attention(x, x, x, attn_mask=mask)[0]


def _alone(unbatched=False):
    x, y = (normal(6)(LENGTH, 6), normal(7)(LENGTH, 6)) if unbatched else (normal(6)(2, LENGTH, 6), normal(7)(2, 4, 6))
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[0, 1] = mask[2, 0] = True
    return shaken(Alone()), nn.MSELoss(), [({"x": x, "mask": mask}, y)]


PADDED = torch.tensor([[False] * 4, [False, False, True, True], [False, False, False, True]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
CASES = {
    "own": lambda: _own("none", "softmax"),
    "own, linear": lambda: _own("pre", "linear"),
    "own, no residual": lambda: _own("pre", "softmax", residual=False),
    "nanoGPT": lambda: (GPT(2), CrossEntropy(), [tokens(3, 4)]),
    "GPT-2": _gpt2,
    "GPT-2, eager": lambda: _gpt2("eager"),
    "Llama": _llama,
    "Llama, no biases, one key head, no padding": lambda: _llama(False, 1, padding=False),
    "BERT": _bert,
    "BERT, eager, classes": lambda: _bert("BertForSequenceClassification", "eager"),
    "ViT": _vit,
    "TransformerEncoder, pre, padding": lambda: _encoder(True, True, src_key_padding_mask=PADDED),
    "TransformerEncoder, post, tokens first": lambda: _encoder(False, False, activation="gelu"),
    "TransformerEncoder, causal, no biases": lambda: _encoder(True, True, False, mask=CAUSAL, is_causal=True),
    "MultiheadAttention": _alone,
    "MultiheadAttention, one sequence": lambda: _alone(unbatched=True),
}
# Both splits of those whose layers are cut in different ways; the others' second split, and variants, are slow tests
FAST = ("own", "GPT-2", "BERT", "MultiheadAttention")
SLOW = ("own, linear", "GPT-2, eager", "Llama, no biases, one key head, no padding", "BERT, eager, classes")


def _families():
    for case in CASES:
        for split in ("model", "layer"):
            slow = case in SLOW or (split == "layer" and case not in FAST)
            yield pytest.param(case, split, marks=pytest.mark.slow if slow else ())


def _layers(blocks):
    """Names of the blocks of each layer."""
    layers: dict[str, list[str]] = {}
    for name in blocks:
        kind = "attn" if ".attn." in name else "mlp"
        layers.setdefault(f"{name.partition(f'.{kind}.')[0]}.{kind}", []).append(name)
    return list(layers.values())


def _assert_same(model, loss, batches, split="model", per_head=False, patterns=("*",), **options):
    """The blocks of every layer, and each with its neighbour, to 1e-9 of the block (of 1e-4 of the largest entry)."""
    chosen = blocks_of(model)
    chosen = chosen.per_head() if per_head else chosen
    chosen = Blocks(b for name, b in chosen.select(*patterns).items() if ".attn." in name or ".mlp." in name)
    exact, autodiff = (
        hessian(model, loss, batches, chosen, split=split, method=method, **options) for method in ("exact", "autodiff")
    )
    assert {exact.method_of(name) for name in chosen} == {"exact"}
    assert {autodiff.method_of(name) for name in chosen} == {"autodiff"}
    for names in _layers(chosen):
        total = autodiff.total.select(names).dense()
        for part in PARTS:
            expected = getattr(autodiff, part).select(names)
            dense = expected.dense()
            for row, column in {*zip(names, names, strict=True), *zip(names, names[1:] + names[:1], strict=True)}:
                found = getattr(exact, part)[row, column]
                assert not isinstance(found.resolved, AutodiffBlock)
                here = expected.ranges[row], expected.ranges[column]
                scale = max(float(total[here].abs().max()), 1e-4 * float(total.abs().max()))
                error = float((found.dense() - dense[here]).abs().max()) / scale
                assert error < 1e-9, (part, row, column, error)


@pytest.mark.parametrize("case, split", list(_families()))
def test_every_family(case, split):
    """A layer below others and the last one, attention and feed-forward."""
    patterns = ("h.0.attn.*", "*h.1.mlp.*") if split == "model" else ("*h.1.attn.*", "*h.0.mlp.*")
    _assert_same(*CASES[case](), split, patterns=("*",) if "MultiheadAttention" in case else patterns)


@pytest.mark.parametrize("case", ["Llama", "MultiheadAttention"])
def test_single_heads(case):
    _assert_same(*CASES[case](), per_head=True, patterns=("h.0.attn.*",))


class TestLosses:
    @pytest.mark.parametrize("micro_batch", [None, 1])
    def test_batches_of_unequal_length_and_padding(self, micro_batch):
        model, inputs, targets = GPT(2), *tokens(4, 5)
        batches = [(inputs[:1, :3], targets[:1, :3]), (inputs[1:], targets[1:])]
        _assert_same(model, CrossEntropy(), batches, patterns=("h.0.attn.[QVO]",), micro_batch=micro_batch)

    def test_a_batch_without_targets_has_no_part_in_it(self):
        model, inputs, targets = GPT(), *tokens(3, 4)
        batches = [(inputs, torch.full_like(targets, -100)), (inputs, targets)]
        _assert_same(model, CrossEntropy(), batches)

    @pytest.mark.parametrize("split", ["model", "layer"])
    def test_a_loss_that_mixes_tokens_and_sequences(self, split):
        def loss(logits, targets):
            return logits.pow(3).mean().tanh() + (logits[0] * logits[1]).mean() + logits.mean((0, 1)).square().sum()

        _assert_same(GPT(), MeanLoss(loss, lambda outputs, targets: 1), [tokens(2, 3)], split)

    def test_a_loss_without_curvature(self):
        _assert_same(GPT(), lambda logits, targets: logits[..., 0].mean(), [tokens(2, 3)], patterns=("*.attn.*",))

    def test_squared_error(self):
        inputs, _ = tokens(3, 4)
        _assert_same(GPT(), nn.MSELoss(), [(inputs, normal(1)(3, 4, 6))], "layer")


def test_dense_truth():
    """jacfwd of grad of the network as one function of its weights."""
    model, (inputs, targets) = GPT(2), tokens(3, 4)
    blocks = blocks_of(model).select(*LAYERS)
    dense = truth(model, inputs, lambda F: cross_entropy(F, targets), blocks)
    H = hessian(model, CrossEntropy(), [(inputs, targets)], blocks, method="exact")
    for names in _layers(blocks):
        for part in PARTS:
            for i, row in enumerate(names):
                for column in names[i:]:
                    here = H.total.ranges[row], H.total.ranges[column]
                    found = getattr(H, part)[row, column].dense()
                    assert relative(found, getattr(dense, part)[here], dense.total) < 1e-9


class TestAnswers:
    def test_plain_numbers(self):
        model = GPT(2)
        H = hessian(model, CrossEntropy(), [tokens()])
        for part, name in (("outer", "h.1.attn.Q"), ("functional", "h.0.mlp.up"), ("total", "h.1.attn.V")):
            block = getattr(H, part)[name]
            dense = block.dense()
            assert block.trace().exact and abs(block.trace() - float(dense.trace())) < 1e-12
            assert block.frobenius_norm().exact
            assert abs(block.frobenius_norm() - float(dense.norm())) < 1e-10 * float(dense.norm())
            assert relative(block.diagonal(), dense.diagonal(), dense) < 1e-12
            assert torch.equal(block.eigenvalues(), torch.linalg.eigvalsh(dense))
            assert isinstance(block.trace(matvecs=8), Estimate)
        assert isinstance(H.outer["h.0.mlp.down"].resolved, KroneckerSum)

    def test_parts_add_up_and_a_value_weight_has_no_functional_part_at_its_layer(self):
        for split in ("model", "layer"):
            H = hessian(GPT(2), CrossEntropy(), [tokens()], split=split)
            for name in ("h.0.attn.V", "h.0.attn.Q", "h.1.mlp.up"):
                total = H[name].dense()
                assert relative(H.outer[name].dense() + H.functional[name].dense(), total) < 1e-12
        assert not H.functional["h.0.attn.V"].dense().any()

    def test_auto_takes_closed_forms_where_they_are(self):
        H = hessian(GPT(2), CrossEntropy(), [tokens()])
        methods = {name: H.method_of(name) for name in H.names}
        layers = {name for name in H.names if ".attn." in name or ".mlp." in name}
        assert {name for name, method in methods.items() if method == "exact"} == layers
        other = hessian(GPT(2), CrossEntropy(), [tokens()], method="autodiff")
        for pair in (
            ("embed", "h.0.attn.Q"),
            ("h.0.attn.Q", "h.1.attn.Q"),
            ("h.0.attn.Q", "h.0.mlp.up"),
            ("h.0.norm1",) * 2,
        ):
            assert isinstance(H.total[pair].resolved, AutodiffBlock)
            assert torch.equal(H.total[pair].dense(), other.total[pair].dense())
        with pytest.raises(BlockNameError, match=r"h\.7\.attn\.Q"):
            H.method_of("h.7.attn.Q")

    @pytest.mark.parametrize(
        "ask",
        [
            lambda H: H["h.1.atn.Q"],
            lambda H: H.total["embed", "h.1.atn.Q"],
            lambda H: H.method_of("h.1.atn.Q"),
            lambda H: H.stacked("h.1.atn.Q"),
            lambda H: H.gradient_source("h.1.atn.Q"),
            lambda H: cv.analysis.audit(H, ["h.1.atn.Q"]),
        ],
        ids=["block", "pair", "method_of", "stacked", "gradient_source", "audit"],
    )
    def test_an_unknown_name_among_many_shows_the_nearest(self, ask):
        H = hessian(GPT(2), CrossEntropy(), [tokens()])
        with pytest.raises(BlockNameError) as raised:
            ask(H)
        _, message = str(raised.value).split(": ", 1)
        start = f"there is no 'h.1.atn.Q' among {len(H.names)} names; nearest: h.1.attn.Q, "
        assert message.startswith(start) and len(message) < len(start) + 40

    def test_select_keeps_the_closed_forms(self):
        H = hessian(GPT(2), CrossEntropy(), [tokens()])
        some = H.total.select(["h.1.attn.V", "h.1.attn.Q"])
        assert some["h.1.attn.V", "h.1.attn.Q"].shape == (16, 16)
        assert not isinstance(some["h.1.attn.Q"].resolved, AutodiffBlock)

    def test_nothing_runs_before_a_block_is_asked_for(self):
        model, calls = GPT(), []
        model.register_forward_hook(lambda *_: calls.append(1))
        counts = {}
        for method in ("auto", "autodiff"):
            calls.clear()
            H = hessian(model, CrossEntropy(), [tokens()], method=method)
            H @ normal(1)(H.shape[0])
            H.outer @ normal(2)(H.shape[0])
            counts[method] = len(calls)
        assert counts["auto"] == counts["autodiff"]

    def test_a_whole_weight_beside_a_single_head(self):
        model, batches = GPT(), [tokens()]
        both = blocks_of(model).select("h.0.attn.[QV]")
        blocks = Blocks([both["h.0.attn.Q"].head(1), both["h.0.attn.V"]])
        H = hessian(model, CrossEntropy(), batches, blocks, method="exact")
        expected = hessian(model, CrossEntropy(), batches, blocks, method="autodiff").dense()
        assert isinstance(H["h.0.attn.Q.1", "h.0.attn.V"].resolved, AutodiffBlock)
        found = [[H[row, column].dense() for column in blocks] for row in blocks]
        assert relative(torch.cat([torch.cat(row, 1) for row in found]), expected) < 1e-9

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_precision(self, dtype):
        model, batches = GPT(2).to(dtype), [tokens()]
        H = hessian(model, CrossEntropy(), batches, method="exact", blocks=blocks_of(model).select(*LAYERS))
        reference = hessian(model.double(), CrossEntropy(), batches)
        for name in ("h.0.attn.Q", "h.1.mlp.up", "h.1.attn.K"):
            assert H[name].dtype == torch.float32
            assert relative(H[name].dense().double(), reference[name].dense()) < 1e-4


class TestFallingBack:
    def test_more_products_than_it_saves(self, monkeypatch):
        model = GPT(2)  # S couples the 5 tokens behind h.0.attn, h.0.mlp; width 4
        for saved, exact in ((0, 0), (1, 3), (64, 4)):
            monkeypatch.setattr("curvoscope.closed.plan.DEFAULT_MATVECS", saved)
            H = hessian(model, CrossEntropy(), [tokens()])
            assert (
                sum(H.method_of(f"h.{i}.{name}") == "exact" for i in (0, 1) for name in ("attn.Q", "mlp.up")) == exact
            )
        monkeypatch.setattr("curvoscope.closed.plan.DEFAULT_MATVECS", 0)
        H = hessian(model, CrossEntropy(), [tokens()], _attention(model), method="exact")
        assert H.method_of("h.0.attn.Q") == "exact"  # where it is asked for there is no limit

    def test_a_loss_that_mixes_counts(self):
        """20 tokens of width 4 are coupled, which is seen on the way; a bias of 4 entries saves 16 products."""
        mixing = MeanLoss(lambda logits, targets: logits.mean().square(), lambda outputs, targets: 1)
        model = GPT()
        blocks = blocks_of(model).select("h.0.attn.b_V")
        assert hessian(model, mixing, [tokens()], blocks).method_of("h.0.attn.b_V") == "autodiff"
        assert hessian(model, CrossEntropy(), [tokens()], blocks).method_of("h.0.attn.b_V") == "exact"

    def test_memory(self, monkeypatch):
        model = GPT(2)
        monkeypatch.setattr(closed_forms.checks, "memory_budget", lambda: current().memory_limit or 10_000)
        assert hessian(model, CrossEntropy(), [tokens()]).method_of("h.0.attn.Q") == "autodiff"
        H = hessian(model, CrossEntropy(), [tokens()], blocks_of(model).select("h.0.mlp.up"), method="exact")
        with pytest.raises(MemoryLimitError, match="fewer tokens"):
            H["h.0.mlp.up"].dense()

    def test_single_precision_inside(self):
        """Llama's eager softmax is float32: no closed form to rounding."""
        sizes = SIZES | {"vocab_size": WORDS, "num_key_value_heads": 2, "head_dim": 4}
        model = _hf("LlamaForCausalLM", sizes, "eager")
        H = hessian(model, None, _text(padding=False))
        assert H.method_of("h.1.attn.Q") == "autodiff" and H.method_of("h.1.mlp.up") == "exact"
        with pytest.raises(ModelError, match=r"h\.0\.attn\.Q.*precision.*method='auto'"):
            hessian(model, None, _text(padding=False), blocks_of(model).select("*.attn.Q"), method="exact")

    def test_tied_weights(self):
        model = GPT(2)
        model.h[1].mlp.c_proj.weight = model.h[0].mlp.c_proj.weight
        blocks = blocks_of(model).select("*.mlp.*")
        H = hessian(model, CrossEntropy(), [tokens()], blocks)
        assert H.method_of("h.0.mlp.down") == "autodiff"
        with pytest.raises(ModelError, match=r"h\.0\.mlp\.down: it is tied to h\.1\.mlp\.c_proj\.weight"):
            hessian(model, CrossEntropy(), [tokens()], blocks, method="exact")

    def test_weights_that_act_beside_their_layer(self):
        class Penalised(GPT):
            def forward(self, words):
                return super().forward(words) + self.h[0].attn.c_proj.weight.square().sum()

        loss = nn.MSELoss()
        data = [(tokens()[0], normal(1)(4, 5, 6))]
        model = Penalised()
        H = hessian(model, loss, data)
        assert H.method_of("h.0.attn.O") == "autodiff" and H.method_of("h.0.mlp.up") == "exact"
        with pytest.raises(ModelError, match="also affects the loss other than through"):
            hessian(model, loss, data, _attention(model), method="exact")

    def test_a_layer_that_runs_twice(self):
        class Twice(GPT):
            def forward(self, words):
                x = self.wte(words)
                for layer in (*self.h, *self.h):
                    x = layer(x)
                return self.lm_head(x)

        H = hessian(Twice(), CrossEntropy(), [tokens()])
        assert {H.method_of(name) for name in H.names} == {"autodiff"}

    def test_unknown_models(self):
        with pytest.raises(ModelError, match=r"up\.weight.*no closed form is known.*method='auto'"):
            hessian(MLP(), nn.MSELoss(), [points()], method="exact")
        with pytest.raises(ModelError, match=r"embed: it is tied.*positions, h\.0\.norm1"):
            hessian(GPT(), CrossEntropy(), [tokens()], method="exact")

    def test_transformer_lens_stays_with_autodiff(self):
        lens = pytest.importorskip("transformer_lens")
        if not hasattr(lens, "TransformerBridge"):
            pytest.skip("TransformerBridge is tested from version 4 on")
        sizes = {"n_layers": 1, "d_model": 6, "n_heads": 2, "d_head": 3, "n_ctx": LENGTH, "d_vocab": WORDS, "d_mlp": 5}
        model = lens.TransformerBridge.boot_native(sizes | {"act_fn": "gelu"})
        assert ClosedFormLayers(model, blocks_of(model)).sites == {}


def _attention(model):
    return blocks_of(model).select("*.attn.[QKVO]")


class TestSafety:
    def test_the_model_is_left_as_it_was(self):
        model, batches = GPT(2), [tokens()]
        before = copy.deepcopy(model.state_dict())
        random = torch.get_rng_state()
        H = hessian(model, CrossEntropy(), batches, _attention(model), method="exact")
        H.outer["h.0.attn.Q"].trace()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), random)
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("run", [3, 4, 5, 7])
    def test_also_after_an_exception_inside_the_model(self, error, run):
        model, calls = GPT(), []

        def stop(*_):
            calls.append(1)
            if len(calls) == run:
                raise error("stop")

        handle = model.ln_f.register_forward_hook(stop)
        before = copy.deepcopy(model.state_dict())
        H = hessian(model, CrossEntropy(), [tokens()])
        with pytest.raises(error):
            for part in PARTS:
                getattr(H, part)["h.0.attn.Q"].dense()
        handle.remove()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        expected = hessian(model, CrossEntropy(), [tokens()], method="autodiff")
        for part in PARTS:  # nothing half-made is left behind
            found = getattr(H, part)["h.0.attn.Q"].dense()
            assert relative(found, getattr(expected, part)["h.0.attn.Q"].dense()) < 1e-9

    def test_the_hessian_is_that_of_the_weights_when_it_was_made(self):
        model = GPT()
        H = hessian(model, CrossEntropy(), [tokens()], copy=True)
        expected = hessian(model, CrossEntropy(), [tokens()], method="autodiff")["h.0.attn.Q"].dense()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        assert relative(H["h.0.attn.Q"].dense(), expected) < 1e-9

    def test_a_function_of_the_weights_agrees_with_a_finite_difference(self):
        """The gradient at h.1.attn.V moved by a small step of the same weights."""
        model, (inputs, targets) = GPT(2), tokens()
        block = blocks_of(model)["h.1.attn.V"]
        H = hessian(model, CrossEntropy(), [(inputs, targets)])
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        v = normal(3)(block.size)

        def gradient(step):
            moved = {name: p.clone() for name, p in parameters.items()}
            block.scatter(block.gather(moved) + step * v, moved)
            moved = {name: p.requires_grad_() for name, p in moved.items()}
            loss = cross_entropy(functional_call(model, moved, (inputs,)), targets)
            names = list(moved)
            found = torch.autograd.grad(loss, [moved[name] for name in names])
            return block.gather(dict(zip(names, found, strict=True)))

        step = 1e-5
        assert relative(H["h.1.attn.V"] @ v, (gradient(step) - gradient(-step)) / (2 * step)) < 1e-6
