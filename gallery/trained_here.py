"""Small models that the gallery trains itself, from seeds: the package's GPT, a vision Transformer and a Mamba.

Each function trains for some steps and measures on data that training has not seen.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.commands.subject import select
from curvoscope.curvature import blocks_of
from curvoscope.families.loading import transformers
from curvoscope.families.text import corpus, cut, encode
from curvoscope.losses import CrossEntropy
from curvoscope.papers import tasks
from curvoscope.papers.experiments import digits
from curvoscope.papers.networks import GPT2
from gallery.exhibit import SEED, Exhibit, without_norms

RATE = 3e-3
WARM_UP = 50  # steps
CLIP = 1.0  # of the gradient's length
ROWS = 32  # of a batch of training
DIGITS = 3  # of the numbers to add
VOCABULARY, LENGTH = 48, 24  # of the characters that the Mamba reads
_UNSEEN = 16  # additions, images or sequences to measure on


def gpt(steps: int, norms: bool = True) -> Exhibit:
    """The paper's network with four blocks of width 32, trained to add numbers of three digits."""
    model = GPT2(32, depth=4, norm="pre" if norms else "none", context=3 * DIGITS + 3, seed=SEED)

    def loss(step: int) -> Tensor:
        tokens = tasks.addition(ROWS, DIGITS, seed=SEED + 1 + step)
        return model.loss(tokens[:, :-1], tasks.answer_targets(tokens))

    _train(model, steps, loss)
    unseen = tasks.addition(_UNSEEN, DIGITS, seed=SEED)
    batch = unseen[:, :-1], tasks.answer_targets(unseen)
    return Exhibit(model.eval(), CrossEntropy(), batch, select(blocks_of(model), ()))


def vit(steps: int, norms: bool = True) -> Exhibit:
    """A vision Transformer with four layers and four heads on the handwritten digits of scikit-learn."""
    package = transformers()
    torch.manual_seed(SEED)
    config = package.ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
    model = package.ViTForImageClassification(config).double().eval()  # it has no dropout
    blocks = select(blocks_of(model), ())
    if not norms:
        without_norms(model)
    images, labels = (one[: len(digits.training_images()[1])] for one in _pictures())
    generator = torch.Generator().manual_seed(SEED)

    def loss(step: int) -> Tensor:
        chosen = torch.randperm(len(labels), generator=generator)[:ROWS]
        return nn.functional.cross_entropy(model(pixel_values=images[chosen]).logits, labels[chosen])

    _train(model, steps, loss)
    unseen = [one[len(labels) :][:_UNSEEN] for one in _pictures()]
    batch = dict(zip(("pixel_values", "labels"), unseen, strict=True))
    return Exhibit(model, CrossEntropy(), batch, blocks)


def mamba(steps: int, norms: bool = True) -> Exhibit:
    """A Mamba with three layers that predicts the next character of the package's text."""
    package = transformers()
    torch.manual_seed(SEED)
    config = package.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=3,
        time_step_rank=2,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = package.MambaForCausalLM(config).eval()
    blocks = select(blocks_of(model), ())
    if not norms:
        without_norms(model)
    tokens = encode(corpus(), VOCABULARY).tokens
    rows = cut(tokens, len(tokens) // LENGTH, LENGTH)
    unseen, seen = rows[:_UNSEEN], rows[_UNSEEN:]
    generator = torch.Generator().manual_seed(SEED)

    def loss(step: int) -> Tensor:
        batch = seen[torch.randint(len(seen), (ROWS,), generator=generator)]
        found: Tensor = model(input_ids=batch, labels=batch).loss
        return found

    _train(model, steps, loss)
    return Exhibit(model, CrossEntropy(shift=True), {"input_ids": unseen, "labels": unseen}, blocks)


def _train(model: nn.Module, steps: int, loss: Callable[[int], Tensor]) -> None:
    """AdamW with a warm-up and clipped gradients; `loss` is that of the batch of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    optimizer.zero_grad()


@cache
def _pictures() -> tuple[Tensor, Any]:
    """All images as pixels (1797, 1, 8, 8), in the order of `digits.images`, and their labels."""
    patches, labels = digits.images()
    return patches.view(-1, 4, 4, 2, 2).transpose(2, 3).reshape(-1, 1, 8, 8), labels
