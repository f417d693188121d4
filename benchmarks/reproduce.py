"""Figure 3a: exact norms against the paper's procedure, 20 Hutchinson samples through curvlinops' operators.

Both measure the query and value blocks, all three parts, at the same points of the grid with one thread.
"""

import json
import sys

import torch
from curvlinops import GGNLinearOperator, HessianLinearOperator, hutchinson_squared_fro
from torch import Tensor, nn

from benchmarks.measure import once
from curvoscope.papers.experiments.figures import load
from curvoscope.papers.experiments.setting import ANSWERS, Setting

SIGMAS = (0.1, 1.0)
SAMPLES = 20


class _Answers(nn.CrossEntropyLoss):
    """The mean over the answer digits; its reduction is curvlinops' to read."""

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        targets = tokens[:, ANSWERS.start + 1 : ANSWERS.stop + 1]
        return super().forward(logits[:, ANSWERS].flatten(0, 1), targets.flatten())


def _procedure(setting: Setting, sigma: float) -> dict[tuple[str, str], float]:
    """The paper's: norms of H, of the Gauss-Newton matrix and of their difference, each by its own samples."""
    model, tokens = setting.swept(0, 1, sigma), setting.additions()
    found = {}
    for name in ("Q", "V"):
        weight = getattr(model.blocks[0], f"W_{name}").requires_grad_()
        options = {"check_deterministic": False}
        arguments = (model, _Answers(), [weight], [(tokens, tokens)])
        H = HessianLinearOperator(*arguments, **options)
        G = GGNLinearOperator(*arguments, **options)
        for part, operator in (("total", H), ("outer", G), ("functional", G - H)):
            found[name, part] = float(hutchinson_squared_fro(operator, SAMPLES)) ** 0.5
        weight.requires_grad_(False)
    return found


def run() -> dict[str, object]:
    """The ratio of times at a part of the grid, and the largest difference between the two in value."""
    torch.set_num_threads(1)
    figure = load("fig3a")
    setting = figure.configuration
    assert isinstance(setting, Setting)
    results: dict[str, object] = {}
    for sigma in SIGMAS:
        kept: dict[str, object] = {}

        def exact(sigma: float = sigma, kept: dict[str, object] = kept) -> None:
            kept["exact"] = figure.measure(setting, {"sigma": sigma}, 0, 0)

        def sampled(sigma: float = sigma, kept: dict[str, object] = kept) -> None:
            kept["sampled"] = _procedure(setting, sigma)

        exact()  # warm
        seconds = {"curvoscope": once(exact), "curvlinops": once(sampled)}  # 120 products need no warming
        norms = {(v.block, v.part): v.value for v in kept["exact"]}  # type: ignore[attr-defined]
        sampled_norms: dict[tuple[str, str], float] = kept["sampled"]  # type: ignore[assignment]
        differences = [abs(sampled_norms[key] / norm - 1) for key, norm in norms.items() if norm]
        results[f"sigma {sigma}"] = {
            "seconds": seconds,
            "ratio": seconds["curvlinops"] / seconds["curvoscope"],
            "largest relative difference of the norms": max(differences),
        }
    return results


if __name__ == "__main__":
    json.dump(run(), sys.stdout, indent=1)
