"""Handwritten digits and the block paper's network on them: a vision Transformer of one post-norm block with one head.

    x = patches W_E + b_E + positions                   (N, 16, d): 8 x 8 pixels in patches of 2 x 2
    y = LN1(x + attention(x))                           one head, biases, an output projection
    z = LN2(y + gelu(y W_up + b_up) W_down + b_down)
    logits = mean_t z_t W_U + b_U                       (N, 10): no class token

As in the paper's code, where its text differs: GELU, cross-entropy, affine LayerNorms with eps, an output projection.
The images ship with scikit-learn: nothing is downloaded.
"""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvoscope.blocks import Blocks
from curvoscope.families.block_maps import blocks_of
from curvoscope.papers.experiments.extras import check_installed
from curvoscope.papers.experiments.figure import Configuration

_CLASSES, _TOKENS, _PIXELS = 10, 16, 4
_TRAINING = 1437  # images to train on; the other 360 are for the accuracy
_ORDER = 0  # seed of the order of the images, the same for all: those of one writer follow each other in the file

GROUPS: dict[str, tuple[str, ...]] = {
    "patches": ("embed.*",),
    "query": ("h.0.attn.Q", "h.0.attn.b_Q"),
    "key": ("h.0.attn.K",),
    "key bias": ("h.0.attn.b_K",),
    "value": ("h.0.attn.V", "h.0.attn.b_V"),
    "output": ("h.0.attn.O", "h.0.attn.b_O"),
    "norm 1": ("h.0.norm1",),
    "feed-forward": ("h.0.mlp.*",),
    "norm 2": ("h.0.norm2",),
    "head": ("head.*",),
}
"""Patterns of the blocks of each parameter group. The key's bias shifts all scores of a query alike: it does nothing,
and so has a group of its own."""


class Digits(Configuration):
    """The network and its training, as in the paper's code but for the rate: AdamW, warm-up, clipped gradients.

    `checkpoints` are the steps that are looked at, in ascending order, and `images` the first so many training images,
    on which curvature and losses are measured.
    """

    d: int = 16
    hidden: int = 64
    rate: float = 0.003
    batch: int = 128
    warm_up: int = 100
    clip: float = 1.0
    checkpoints: tuple[int, ...] = (0, 1000)
    images: int = 128

    def network(self, seed: int) -> "VisionTransformer":
        """At initialisation."""
        return VisionTransformer(self.d, self.hidden, seed)

    def training(self, model: nn.Module, seed: int) -> Iterator[int]:
        """Train, and yield each checkpoint when it is reached."""
        patches, labels = training_images()
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.0)
        generator = torch.Generator().manual_seed(seed)
        done = 0
        for checkpoint in self.checkpoints:
            while done < checkpoint:
                optimizer.param_groups[0]["lr"] = self.rate * min(1.0, (done + 1) / self.warm_up)
                chosen = torch.randperm(len(labels), generator=generator)[: self.batch]
                optimizer.zero_grad()
                cross_entropy(model(patches[chosen]), labels[chosen]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                optimizer.step()
                done += 1
            yield checkpoint

    def model(self, seed: int, weights: str) -> "VisionTransformer":
        """The network "initial", or "trained" up to the last checkpoint."""
        model = self.network(seed)
        if weights != "initial":
            for _ in self.training(model, seed):
                pass
        return model

    def probe(self) -> tuple[Tensor, Tensor]:
        """Patches (images, 16, 4) and labels (images,) to measure on."""
        patches, labels = images()
        return patches[: self.images], labels[: self.images]


class VisionTransformer(nn.Module):
    """One post-norm block on 16 patches, in float64; torch's initialisation, from a seed."""

    TAIL = ("block.norm2.weight", "block.norm2.bias", "head.weight", "head.bias")  # all that `ceiling` depends on

    positions: Tensor

    def __init__(self, d: int, hidden: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Linear(_PIXELS, d, dtype=torch.float64)
            self.block = nn.TransformerEncoderLayer(
                d, 1, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=False, dtype=torch.float64
            )
            self.head = nn.Linear(d, _CLASSES, dtype=torch.float64)
        rates = torch.exp(-math.log(1e4) * torch.arange(0, d, 2, dtype=torch.float64) / d)
        angles = torch.arange(_TOKENS, dtype=torch.float64)[:, None] * rates
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :d])

    def forward(self, patches: Tensor) -> Tensor:
        """(N, 16, 4) -> logits (N, 10)."""
        found: Tensor = self.head(self.block(self.embed(patches) + self.positions).mean(1))
        return found

    def ceiling(self) -> float:
        """B with ℓ(w) <= B for every image, at these weights, whatever comes before the last norm and the head:

            B = log 10 + max_{c,c'} ( |W_c - W_c'| r + |b_c - b_c'| ),   r = sqrt(d) max|gamma| + |beta|

        because a LayerNorm's row is no longer than r, nor is a mean of rows, and the loss is at most log 10 plus the
        largest difference of two logits. No Hessian and no stationarity comes in.
        """
        gamma, beta = self.block.norm2.weight.detach(), self.block.norm2.bias.detach()
        W, b = self.head.weight.detach(), self.head.bias.detach()
        radius = len(gamma) ** 0.5 * gamma.abs().max() + beta.norm()
        apart = (W[:, None] - W).norm(dim=-1) * radius + (b[:, None] - b).abs()
        return math.log(_CLASSES) + float(apart.max())


def groups_of(model: nn.Module) -> dict[str, Blocks]:
    """The blocks of each parameter group: every entry of every parameter is in exactly one."""
    blocks = blocks_of(model)
    return {name: blocks.select(*patterns) for name, patterns in GROUPS.items()}


def accuracy(model: nn.Module) -> float:
    """On the images that are not trained on."""
    patches, labels = (one[_TRAINING:] for one in images())
    with torch.no_grad():
        return float((model(patches).argmax(1) == labels).double().mean())


@functools.cache
def images() -> tuple[Tensor, Tensor]:
    """All 1797 images as patches (1797, 16, 4) of values from 0 to 1, and their labels, in a fixed random order."""
    check_installed("digits")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_ORDER))
    square = torch.tensor(pixels / 16, dtype=torch.float64)[order].view(-1, 4, 2, 4, 2)
    return square.transpose(2, 3).reshape(-1, _TOKENS, _PIXELS), torch.tensor(labels)[order]


def training_images() -> tuple[Tensor, Tensor]:
    """Patches and labels of the images to train on."""
    patches, labels = images()
    return patches[:_TRAINING], labels[:_TRAINING]
