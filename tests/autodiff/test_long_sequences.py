"""Past a number of scores cv.hessian runs attention in memory linear in the length, by whatever name it is called."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from autodiff_cases import GPT, cross_entropy, tokens, truth, truth_of
from curvoscope.attention import sdpa
from curvoscope.autodiff import kernels
from curvoscope.autodiff.kernels import long_attention
from curvoscope.curvature import CrossEntropy, blocks_of, hessian
from largest import Largest
from reference import normal, relative

torch_sdpa = functional.scaled_dot_product_attention


@pytest.fixture
def calls(monkeypatch):
    """Every length counts as long; the shapes of the queries that our attention is called with."""
    seen = []

    def spy(query, *more, **options):
        seen.append(tuple(query.shape))
        return sdpa(query, *more, **options)

    monkeypatch.setattr(kernels, "_MANY", 1)
    monkeypatch.setattr(kernels, "sdpa", spy)
    return seen


class Encoder(nn.Module):
    """nn.MultiheadAttention, which looks the function up inside torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(6, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(4, 6)
        self.double().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        return self.head(self.encoder(self.embedding(x), mask=mask, is_causal=True))


def _assert_same(H, dense, tolerance: float = 1e-10) -> None:
    assert relative(H.total.dense(), dense.total) < tolerance
    assert relative(H.outer.dense(), dense.outer, dense.total) < tolerance
    assert relative(H.functional.dense(), dense.functional, dense.total) < tolerance
    v = normal(1)(H.shape[0])
    assert relative(H @ v, dense.total @ v) < tolerance


@pytest.mark.parametrize("build", [GPT, Encoder])
def test_same_hessian_and_parts(build, calls):
    """A name imported into the model's module, and torch's own modules; one vector and many at once."""
    model, (inputs, targets) = build(), tokens()
    blocks = blocks_of(model)
    _assert_same(
        hessian(model, CrossEntropy(), [(inputs, targets)], blocks=blocks, method="autodiff"),
        truth(model, inputs, lambda F: cross_entropy(F, targets), blocks),
    )
    assert set(calls) == {(4, 2, 5, 2)}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hugging_face(family, calls):
    """A causal model with padding, and one whose query heads share keys."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=6, vocab_size=11, **ends)
    else:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11}
        config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **ends)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().double()
    ids = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if family == "gpt2":
        mask[1, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    chosen = blocks_of(model).select("h.0.attn.[QKV]")
    H = hessian(model, None, [batch], blocks=chosen, method="autodiff")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    parameters = {name: p.detach() for name, p in model.named_parameters() if name in chosen.parameters}
    dense = truth_of(
        lambda p: torch.func.functional_call(model, p, (), {**inputs, "use_cache": False}).logits,
        parameters,
        lambda F: cross_entropy(F[:, :-1], batch["labels"][:, 1:]),
        chosen,
    )
    _assert_same(H, dense, 1e-10 if family == "gpt2" else 1e-6)  # Llama has norms and rotations in float32
    assert calls


class Long(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x)[:, None] for part in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


def test_nothing_of_the_size_of_the_scores_is_made():
    """Neither when the loss is looked at nor in the products, at the size at which the switch is made by itself."""
    r = normal(3, torch.float32)
    model, batch = Long(), (r(1, 2048, 2), r(1, 2048, 2))
    with Largest() as largest:
        H = hessian(model, nn.MSELoss(), [batch], method="autodiff")
        v = r(H.shape[0])
        found = H @ v
    assert largest.size <= 2048**2 / 8
    model = model.double()
    leaves = [p for _, p in model.named_parameters()]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = (model(batch[0].double()) - batch[1].double()).square().mean()
    gradient = torch.autograd.grad(loss, leaves, create_graph=True)
    directions = [
        part.view_as(p) for part, p in zip(v.double().split([p.numel() for p in leaves]), leaves, strict=True)
    ]
    exact = torch.autograd.grad(gradient, leaves, directions)
    assert relative(found.double(), torch.cat([x.flatten() for x in exact])) < 1e-4


class TestTheNameInTorch:
    def test_is_put_back(self, calls):
        with long_attention():
            assert functional.scaled_dot_product_attention is not torch_sdpa
            with long_attention():
                pass
            assert functional.scaled_dot_product_attention is not torch_sdpa
        assert functional.scaled_dot_product_attention is torch_sdpa

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_is_put_back_after_an_exception(self, error):
        class Failing(Long):
            def forward(self, x):
                super().forward(x)
                raise error

        with pytest.raises(error):
            hessian(Failing(), nn.MSELoss(), [(torch.ones(1, 3, 2), torch.ones(1, 3, 2))])
        assert functional.scaled_dot_product_attention is torch_sdpa

    def test_is_put_back_when_threads_overlap(self):
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with long_attention():
                inside.set()
                leave.wait(10)

        thread = threading.Thread(target=other)
        with long_attention():
            thread.start()
            inside.wait(10)
        leave.set()
        thread.join(10)
        assert functional.scaled_dot_product_attention is torch_sdpa

    def test_what_others_put_there_stays(self, monkeypatch):
        def theirs(*tensors, **options):
            return torch_sdpa(*tensors, **options)

        monkeypatch.setattr(functional, "scaled_dot_product_attention", theirs)
        with long_attention():
            assert functional.scaled_dot_product_attention is theirs
        assert functional.scaled_dot_product_attention is theirs

    def test_few_scores_and_dropout_are_left_to_torch(self, monkeypatch):
        monkeypatch.setattr(kernels, "sdpa", None)
        x = torch.ones(1, 1, 4, 2)
        with long_attention():
            functional.scaled_dot_product_attention(x, x, x)
            torch_sdpa(x, x, x)
        monkeypatch.setattr(kernels, "_MANY", 1)
        with long_attention():
            functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            functional.scaled_dot_product_attention(x, x, x, None, 0.5)
