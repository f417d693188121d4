"""Damped solves with Gauss-Newton blocks: products saved by preconditioners, and time against curvlinops.

On GPT-2 small (124 million parameters, random weights, 128 tokens, float32), and on a GPT-2 of 4 layers with d = 256
and 5,000 words. The damping is a hundredth of the largest eigenvalue of the block. Seconds are processor time of one
thread, of everything: the loss, the graph, the preconditioner, and for ours the certificate. curvlinops' CG runs in
turns with ours in one process, plain and with its KFAC inverse as preconditioner, on the small model until its true
residual is as small; on GPT-2 small eight of its iterations are timed, and as many counted as textbook CG takes with
the same matrix and inverse. KFAC inverses are made of one random gradient in both packages. The linear maps of the
models are `nn.Linear`, which curvlinops' KFAC needs. First of all, both packages' matrices are compared in float64.

At random weights preconditioners save little. So products are counted once more on a small GPT before and after it has
learned addition, in float64, to 1e-6, with preconditioners of all gradients.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvoscope as cv
from benchmarks.measure import in_own_process, peak_gib
from curvoscope.solve import Solution

SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 5000, "n_positions": 128}
MODELS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "GPT-2 small": ({}, ("h.0.attn.c_proj", "h.6.mlp.c_fc", "h.11.attn.c_proj")),
    "4 layers, d = 256": (SMALL, ("h.0.attn.c_proj", "h.3.mlp.c_fc")),
}
PRECONDITIONERS = ("diagonal", "kfac", "auto")
MORE = ("ekfac", "kronecker:2")  # on the small model
COUNTED = (None, "diagonal", "kfac", "ekfac", "kronecker:1", "auto")
WIDTH, DEPTH, ROWS, STEPS = 32, 2, 16, 600  # of the GPT that learns addition
CLOSE, SHARES = 1e-6, (1e-2, 1e-4)
LENGTH, TOLERANCE, SHARE, TIMED = 128, 1e-3, 1e-2, 8
LIMITS = {"times_faster": 3.0, "difference_of_the_matrices": 1e-6}


class Logits(nn.Module):
    """The model as a function from tokens to the logits of all but the last, one row per token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """(tokens - 1, words)."""
        logits: Tensor = self.model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        return logits


def gpt2(**config: Any) -> Any:
    """GPT-2 whose linear maps are `nn.Linear`."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **config)).eval()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                linear = nn.Linear(*child.weight.shape)
                linear.weight.data, linear.bias.data = child.weight.data.T.contiguous(), child.bias.data
                setattr(parent, name, linear)
    return model


class Case:
    """The Gauss-Newton block of one parameter by both packages, in the order in which it is stored."""

    def __init__(self, model: Any, tokens: Tensor, parameter: str) -> None:
        self._model, self._tokens, self._parameter = model, tokens, parameter

    def hessian(self) -> Any:
        """Our Hessian, made anew: nothing is kept of an earlier solve."""
        blocks = cv.blocks_of(self._model).select(self._parameter)
        batch = {"input_ids": self._tokens}, self._tokens
        return cv.hessian(self._model, cv.losses.CrossEntropy(shift=True), [batch], blocks, method="autodiff")

    def ours(self) -> Any:
        """Our operator, made anew."""
        return self.hessian().outer[self._parameter]

    def kfac(self, hessian: Any) -> Any:
        """Our KFAC of one random gradient, as curvlinops' is."""
        return cv.approximations.kfac(hessian.gradient_source(self._parameter, samples=1))

    def gradient(self) -> Any:
        """The gradient of the loss in all parameters."""
        logits, loss, _, ((tokens, targets),) = self._arguments
        return torch.autograd.grad(loss(logits(tokens), targets), list(self._model.parameters()))

    @cached_property
    def _arguments(self) -> tuple[Any, ...]:
        chosen = dict(self._model.named_parameters())[self._parameter]
        data = [(self._tokens, self._tokens[:, 1:].flatten())]
        return Logits(self._model), nn.CrossEntropyLoss(), [chosen], data

    def theirs(self, kind: str = "GGNLinearOperator") -> Any:
        """curvlinops' operator. Its data are sequences: another number would scale the matrix."""
        import curvlinops

        options = {"check_deterministic": False, "num_data": len(self._tokens)}
        return getattr(curvlinops, kind)(*self._arguments, **options)

    def damped(self, damping: float) -> Any:
        """curvlinops' operator + damping."""
        from curvlinops.examples import IdentityLinearOperator

        operator = self.theirs()
        shape = [tuple(parameter.shape) for parameter in self._arguments[2]]
        return operator + damping * IdentityLinearOperator(shape, operator.device, operator.dtype)


def checked() -> float:
    """The largest relative difference of the two damped matrices on blocks of a small model in float64."""
    model = gpt2(n_layer=2, n_embd=32, n_head=2, vocab_size=40, n_positions=16).double()
    tokens, damping, found = torch.randint(0, 40, (2, 16)), 0.01, []
    for layer, kind in ((0, "attn.c_proj"), (0, "mlp.c_fc"), (1, "mlp.c_proj")):
        case = Case(model, tokens, f"transformer.h.{layer}.{kind}.weight")
        ours = case.ours()
        v = torch.randn(ours.shape[0], dtype=torch.float64)
        product = ours @ v + damping * v
        found.append(float((product - case.damped(damping) @ v).norm() / product.norm()))
    return max(found)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the call returns."""
    start = time.process_time()
    found = call()
    return time.process_time() - start, found


def textbook_steps(block: Any, damping: float, b: Tensor, near: Callable[[Tensor], Tensor] | None = None) -> int:
    """Iterations of conjugate gradients (Hestenes and Stiefel 1952) until |r| is at most TOLERANCE |b|, with `near` as
    preconditioner."""

    def preconditioned(r: Tensor) -> Tensor:
        return r if near is None else near(r.to(b)).double()

    r, steps = b.double(), 0
    p = z = preconditioned(r)
    size, square = r @ r, r @ z
    while r @ r > TOLERANCE**2 * size:
        image = (block @ p.to(b)).double() + damping * p
        r = r - square / (p @ image) * image
        z = preconditioned(r)
        before, square = square, r @ z
        p, steps = z + square / before * p, steps + 1
    return steps


def solved(case: Case, whole: bool) -> dict[str, object]:
    """One block: products by preconditioner, and seconds in turns with curvlinops, which runs to the end if `whole`."""
    from curvlinops import CGInverseLinearOperator, KFACInverseLinearOperator

    block = case.ours()
    damping = SHARE * float(block.eigenvalues(1, "LA", tolerance=5e-2)[0])
    b = torch.randn(block.shape[0])
    size = float(b.norm())

    def solve(preconditioner: str | None, tolerance: float = TOLERANCE) -> Solution:
        found: Solution = case.ours().solve(b, damping, tolerance, preconditioner=preconditioner)
        assert found.converged, str(found)
        return found

    def by_cg(near: Callable[[Tensor], Tensor] | None = None) -> Any:
        iterations, tolerance = (1000, TOLERANCE) if whole else (TIMED, 0.0)
        options = {"eps": 0.0, "tolerance": tolerance, "max_iter": iterations, "max_tridiag_iter": 0}
        return CGInverseLinearOperator(case.damped(damping), preconditioner=near, **options) @ b

    def by_kfac() -> Any:
        kfac = case.theirs("KFACLinearOperator")
        inverse = KFACInverseLinearOperator(kfac, damping=damping, use_exact_damping=True)
        return inverse, inverse @ b

    def residual(x: Tensor) -> float:
        return float((b - block @ x - damping * x).norm()) / size

    found: dict[str, Any] = {"rows": block.shape[0], "damping": damping, "solves": {}}
    for kind in (None, *PRECONDITIONERS, *(MORE if whole else ())):
        try:
            seconds, x = timed(lambda kind=kind: solve(kind))
            one = {"products": x.matvecs, "steps": x.iterations, "seconds": seconds, "used": x.preconditioner}
            found["solves"][kind or "none"] = one | {"reason": x.reason, "error_bound": x.error_bound}
        except cv.CurvoscopeError as error:
            found["solves"][kind or "none"] = {"fails": str(error)}
        print(kind, found["solves"][kind or "none"], file=sys.stderr, flush=True)
    seconds, (inverse, x) = timed(by_kfac)
    for kind, near, made in (("CG", None, 0.0), ("CG with KFAC", lambda r: inverse @ r, seconds)):
        steps = textbook_steps(block, damping, b, near)
        took, y = timed(lambda near=near: by_cg(near))
        peer = {"seconds": made + (took if whole else took * steps / TIMED), "textbook_steps": steps}
        found[f"curvlinops {kind}"] = peer | {"residual": residual(y) if whole else None}
        print(kind, found[f"curvlinops {kind}"], file=sys.stderr, flush=True)
    peer = found["curvlinops CG"]
    found["times_faster_than_cg"] = {
        kind: peer["seconds"] / one["seconds"] for kind, one in found["solves"].items() if "seconds" in one
    }
    found["gradient_seconds"] = min(timed(case.gradient)[0] for _ in range(2))  # the first finds no memory
    found["curvlinops KFAC"] = {"seconds": seconds, "residual": residual(x)}
    first, hessian = timed(case.hessian)
    ours, mine = timed(lambda: case.kfac(hessian).solve(b, damping).value)
    found["our KFAC"] = {"seconds": first + ours, "seconds_of_the_loss": first, "residual": residual(mine)}
    if residual(x) < 1:
        ours, x = timed(lambda: solve(None, residual(x)))
        found["to the residual of KFAC"] = {"seconds": ours, "products": x.matvecs, "times_faster": seconds / ours}
    return found


def trained() -> dict[str, object]:
    """Products by preconditioner on the blocks of a GPT before and after it has learned addition."""
    from curvoscope.papers import tasks
    from curvoscope.papers.networks import GPT2

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2(WIDTH, depth=DEPTH, norm="pre")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    tokens = tasks.addition(ROWS)
    batch = tokens[:, :-1], tasks.answer_targets(tokens)
    found: dict[str, Any] = {}
    for step in range(STEPS + 1):
        if step in (0, STEPS):
            found[str(step)] = _counted(model, batch)
        drawn = tasks.addition(64, seed=step + 1)
        optimizer.zero_grad()
        model.loss(drawn[:, :-1], tasks.answer_targets(drawn)).backward()
        optimizer.step()
    return {"width": WIDTH, "tolerance": CLOSE, "after": found}


def _counted(model: nn.Module, batch: Any) -> dict[str, object]:
    """The loss, and for each block the products of each preconditioner at each damping."""
    blocks = cv.blocks_of(model).select("*.attn.O", "*.mlp.up", "*.mlp.down")
    H = cv.hessian(model, cv.losses.CrossEntropy(), [batch], blocks, method="autodiff")
    counts: dict[str, Any] = {}
    for name in blocks.names:
        block = H.outer[name]
        largest = float(block.eigenvalues(1, "LA", tolerance=1e-2)[0])
        b = torch.randn(block.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for share in SHARES:
            one = counts.setdefault(f"{share:g}", {}).setdefault(name, {})
            for kind in COUNTED:
                x = block.solve(b, share * largest, CLOSE, preconditioner=kind)
                assert x.converged, str(x)
                one[kind or "none"] = x.matvecs
    return {"loss": H.loss, "products": counts}


def measured(name: str, *chosen: str) -> dict[str, object]:
    """One model, in a process of its own."""
    torch.set_num_threads(1)
    if name == "trained":
        return trained()
    config, kinds = MODELS[name]
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # curvlinops says that a tolerance of 0 was not reached
        difference = checked()
        assert difference < LIMITS["difference_of_the_matrices"], f"not the same matrix: {difference:.1e}"
        model = gpt2(**config)
        tokens = torch.randint(0, model.config.vocab_size, (1, LENGTH))
        cases = {kind: Case(model, tokens, f"transformer.{kind}.weight") for kind in chosen or kinds}
        blocks = {kind: solved(case, whole=bool(config)) for kind, case in cases.items()}
    return {"difference_of_the_matrices": difference, "blocks": blocks, "peak_gib": peak_gib()}


def run() -> dict[str, object]:
    """All measurements."""
    models = {name: in_own_process("benchmarks.solve", name) for name in MODELS}
    small = in_own_process("benchmarks.solve", "trained")
    return {"limits": LIMITS, "tolerance": TOLERANCE, "models": models, "trained": small}


if __name__ == "__main__":
    print(json.dumps(measured(*sys.argv[1:]), indent=1))
