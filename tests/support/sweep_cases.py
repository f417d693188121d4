"""Small models of every kind that a sweep meets: each case is a model, its loss and its batches."""

import torch
import transformers
from torch import nn

from adapter_cases import Beside, Inside, adapted, batch
from curvoscope.losses import CrossEntropy


def words(*shapes, vocabulary=23):
    torch.manual_seed(1)
    return [torch.randint(1, vocabulary, shape) for shape in shapes]


def labelled(*shapes):
    return [{"input_ids": ids, "labels": ids} for ids in words(*shapes)]


def gpt2(layers=2):
    config = transformers.GPT2Config(vocab_size=23, n_embd=8, n_head=2, n_layer=layers, n_positions=16)
    return transformers.GPT2LMHeadModel(config), None, labelled((2, 7), (1, 5))


def llama():
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=12,
    )
    return transformers.LlamaForCausalLM(config), None, labelled((2, 7))


def bert(layers=2):
    config = transformers.BertConfig(
        vocab_size=23, hidden_size=8, num_attention_heads=2, num_hidden_layers=layers, intermediate_size=12
    )
    (ids,) = words((3, 6))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    ids[1, 4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return transformers.BertForMaskedLM(config), None, [batch]


def t5():
    config = transformers.T5Config(
        vocab_size=23, d_model=8, d_kv=4, num_heads=2, num_layers=2, d_ff=12, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), None, labelled((2, 5))


def albert():
    config = transformers.AlbertConfig(
        vocab_size=23,
        embedding_size=6,
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=3,
        intermediate_size=12,
    )
    return transformers.AlbertForMaskedLM(config), None, labelled((2, 5))


def vit():
    config = transformers.ViTConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=12, image_size=8, patch_size=4
    )
    torch.manual_seed(2)
    batch = {"pixel_values": torch.randn(3, 3, 8, 8).double(), "labels": torch.tensor([0, 1, 1])}
    return transformers.ViTForImageClassification(config), None, [batch]


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=23,
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        intermediate_size=12,
        num_local_experts=3,
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config), None, labelled((2, 5))


def encoder(layers=2):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    X, Y = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    return nn.TransformerEncoder(layer, layers), nn.MSELoss(), [(X, Y), (X[:1, :3], Y[:1, :3])]


def convolutions():
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 5))
    return model, nn.CrossEntropyLoss(label_smoothing=0.1), [(torch.randn(4, 3, 5).double(), torch.arange(4))]


class Unusual(nn.Module):
    """Weights on the left, in slices, in products of their own, and one used three times, once transposed."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.randn(12, 4))
        self.left = nn.Parameter(torch.randn(3, 5))
        self.low, self.high = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
        self.shared = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):  # (n, 5, 4)
        q, k, v = (x @ part.T for part in self.fused.chunk(3))
        y = (q @ k.mT).softmax(-1) @ v @ (self.low @ self.high)
        y = y @ self.shared + torch.tanh(y @ self.shared) @ self.shared.T
        return torch.stack([self.left @ one for one in y]) * self.scale


def unusual():
    X = torch.randn(2, 5, 4).double()
    return Unusual(), nn.MSELoss(), [(X, X[:, :3])]


def beside():
    """LoRA with A and B as modules, on a frozen model."""
    return adapted(Beside), CrossEntropy(), batch()


def inside():
    """LoRA with A and B as parameters of its own, on a frozen model."""
    return adapted(Inside), CrossEntropy(), batch()
