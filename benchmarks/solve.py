"""Damped solves with Gauss-Newton blocks of a small GPT-2, against curvlinops' CG, to the same true residual.

2 layers, d = 64, 32 words, 4 sequences of 32 tokens, random weights, float32, one thread. The damping is 1e-3 times the
largest eigenvalue of the block. A preconditioner is made of all gradients of the block, which is timed on its own.
"""

import time
import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvoscope as cv
from benchmarks.measure import in_turns

BLOCKS = ("h.0.attn.O", "h.1.attn.O")
PRECONDITIONERS = ("diagonal", "kfac", "ekfac")
TOLERANCE, SHARE, REPEATS = 1e-5, 1e-3, 3


class Logits(torch.nn.Module):
    """The model as a function from tokens to the logits of all but the last, one row per token."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens - 1, words)."""
        logits: torch.Tensor = self.model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        return logits


def run() -> dict[str, object]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=32, n_positions=32, use_cache=False)
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 32, (4, 32))
    H = cv.hessian(model, None, [{"input_ids": tokens, "labels": tokens}], method="autodiff")
    with sdpa_kernel(SDPBackend.MATH):
        return {"tolerance": TOLERANCE, "blocks": {name: _block(H, model, tokens, name) for name in BLOCKS}}


def _block(H: Any, model: torch.nn.Module, tokens: torch.Tensor, name: str) -> dict[str, object]:
    block = H.outer[name]
    damping = SHARE * float(block.eigenvalues(1, "LA", tolerance=1e-2)[0])
    b = torch.randn(block.shape[0])
    found: dict[str, object] = {"rows": block.shape[0], "damping": damping}
    plain = block.solve(b, damping, TOLERANCE, preconditioner=None)
    assert plain.converged
    found["plain"] = {"products": plain.matvecs, "error_bound": plain.error_bound}
    for kind in PRECONDITIONERS:
        start = time.perf_counter()
        stand_in = cv.approximations.approximation(H, kind, name)
        made = time.perf_counter() - start
        x = block.solve(b, damping, TOLERANCE, preconditioner=stand_in)
        seconds = in_turns(
            REPEATS, ours=lambda stand_in=stand_in: block.solve(b, damping, TOLERANCE, preconditioner=stand_in)
        )
        found[kind] = {"products": x.matvecs, "seconds": seconds["ours"], "made": made, "converged": x.converged}
    found["seconds"], found["curvlinops"] = _against_curvlinops(
        block, model, tokens, name, damping, b, plain.iterations * 3 // 4
    )
    return found


def _against_curvlinops(
    block: Any,
    model: torch.nn.Module,
    tokens: torch.Tensor,
    name: str,
    damping: float,
    b: torch.Tensor,
    iterations: int,
) -> tuple[float, dict[str, object]]:
    """Seconds of our plain solve, and what curvlinops' takes to the same true residual."""
    from curvlinops import CGInverseLinearOperator, GGNLinearOperator
    from curvlinops.examples import IdentityLinearOperator

    shape = next(iter(cv.blocks_of(model).select(name).values())).pieces[0].stored
    parameter = next(iter(cv.blocks_of(model).select(name).parameters))
    chosen = dict(model.named_parameters())[parameter]
    data = [(tokens, tokens[:, 1:].flatten())]
    operator = GGNLinearOperator(
        Logits(model), torch.nn.CrossEntropyLoss(), [chosen], data, check_deterministic=False, num_data=len(tokens)
    )
    assert (block @ b - operator @ b).norm() < 1e-3 * (block @ b).norm(), "not the same matrix"
    identity = IdentityLinearOperator([tuple(shape)], b.device, b.dtype)
    damped = operator + damping * identity
    aim = TOLERANCE * float(b.norm())
    steps = iterations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says after every run that its tolerance of 0 was not reached
        while True:  # as many iterations as the true residual needs
            inverse = CGInverseLinearOperator(damped, eps=0.0, tolerance=0.0, max_iter=steps, max_tridiag_iter=0)
            residual = float((b - damped @ (inverse @ b)).norm())
            if residual <= aim or steps > 1000:
                break
            steps += max(1, iterations // 10)
        seconds = in_turns(
            REPEATS,
            ours=lambda: block.solve(b, damping, TOLERANCE, preconditioner=None),
            theirs=lambda: inverse @ b,
        )
    reached = residual / float(b.norm())
    return seconds["ours"], {"iterations": steps, "seconds": seconds["theirs"], "residual": reached}


if __name__ == "__main__":
    import json

    print(json.dumps(run(), indent=1))
