"""The dense Hessian of a whole Transformer block against `torch.func.hessian`: time, equality and memory."""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import curvoscope as cv
from benchmarks.measure import in_own_process, once, peak_gib

torch.set_num_threads(1)  # small products wait for each other where cores are shared; the ratio is that of the work

WORDS = 12
LIMIT_GIB = 16.0  # the memory that the largest sizes are asked for
LENGTH, SEQUENCES = 17, 16


class Problem:
    """A pre-norm block with one causal head, MLP of width 4 d with biases, and a loss: exact, and for autodiff."""

    def __init__(self, d: int, N: int, loss: str) -> None:
        generator = torch.Generator().manual_seed(0)
        r = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)  # noqa: E731
        shapes = {f"attn.{name}": (d, d) for name in "QKVO"}
        shapes |= {"mlp.up": (d, 4 * d), "mlp.down": (4 * d, d), "mlp.b_up": (1, 4 * d), "mlp.b_down": (1, d)}
        p = {name: r(*shape) / math.sqrt(max(2, shape[0])) for name, shape in shapes.items()}
        p |= {f"norm{i}.gamma": 1 + 0.1 * r(1, d) for i in (1, 2)} | {f"norm{i}.beta": 0.1 * r(1, d) for i in (1, 2)}
        attention = cv.exact.SelfAttention(*(p[f"attn.{name}"] for name in "QKVO"), causal=True)
        mlp = cv.exact.FeedForward(p["mlp.up"], p["mlp.b_up"][0], p["mlp.down"], p["mlp.b_down"][0], "gelu")
        norms = [cv.exact.LayerNorm(p[f"norm{i}.gamma"][0], p[f"norm{i}.beta"][0]) for i in (1, 2)]
        self.block, self.parameters = cv.exact.TransformerBlock(attention, mlp, *norms), p
        self.X = r(N, LENGTH, d)
        self.loss: cv.losses.LossFunction = cv.losses.MSE(r(N, LENGTH, d))
        if loss == "cross-entropy":
            targets = torch.randint(0, WORDS, (N, LENGTH), generator=generator)
            self.loss = cv.losses.CrossEntropy(targets, r(d, WORDS))

    def value(self, p: dict[str, Tensor]) -> Tensor:
        """The loss from primitives: nested torch.func transforms are silently wrong through the native layer norm."""

        def normalised(x: Tensor, i: int) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            return p[f"norm{i}.gamma"] * scaled + p[f"norm{i}.beta"]

        x = normalised(self.X, 1)
        scores = (x @ p["attn.Q"]) @ (x @ p["attn.K"]).mT / math.sqrt(x.shape[-1])
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        A = scores.masked_fill(~visible, -math.inf).softmax(-1)
        Y = self.X + A @ (x @ p["attn.V"]) @ p["attn.O"]
        h = normalised(Y, 2) @ p["mlp.up"] + p["mlp.b_up"]
        return self.loss(Y + torch.nn.functional.gelu(h) @ p["mlp.down"] + p["mlp.b_down"])

    def ours(self) -> Tensor:
        """All entries, in closed form."""
        return self.block.hessian(self.X, self.loss).dense()

    def autodiff(self) -> dict[str, dict[str, Tensor]]:
        """All entries, by torch.func.hessian."""
        found: dict[str, dict[str, Tensor]] = torch.func.hessian(self.value)(self.parameters)
        return found

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(values.numel() for values in self.parameters.values())


def dense_against_autodiff(loss: str, repeats: int = 3) -> dict[str, object]:
    """d=16, MLP 64, L=17, N=16: the same matrix, and how much faster, by the clock and in time on the processor."""
    problem = Problem(16, SEQUENCES, loss)
    names = problem.block.hessian(problem.X, problem.loss).names
    nested = problem.autodiff()
    sizes = {name: problem.parameters[name].numel() for name in names}
    truth = torch.cat([torch.cat([nested[a][b].reshape(sizes[a], sizes[b]) for b in names], 1) for a in names])
    del nested
    error = float((problem.ours() - truth).abs().max() / truth.abs().max())
    del truth
    wall, cpu = _in_turns(repeats, problem.autodiff, problem.ours)
    return {
        "size": problem.size,
        "relative_error": error,
        "seconds": dict(zip(("torch.func.hessian", "ours"), wall, strict=True)),
        "cpu_seconds": dict(zip(("torch.func.hessian", "ours"), cpu, strict=True)),
        "times_faster_than_torch_func_hessian": wall[0] / wall[1],
        "times_less_cpu_time": cpu[0] / cpu[1],
    }


def _in_turns(repeats: int, *calls: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Median seconds of each call, and seconds of CPU time: on a machine that others use, the latter says more."""
    wall: list[list[float]] = [[] for _ in calls]
    cpu: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for number, call in enumerate(calls):
            for _ in range(1 if number == 0 else 5):  # ours is short
                start, used = time.perf_counter(), time.process_time()
                call()
                wall[number].append(time.perf_counter() - start)
                cpu[number].append(time.process_time() - used)
    return [statistics.median(values) for values in wall], [statistics.median(values) for values in cpu]


def trial(which: str, d: int, N: int) -> dict[str, object]:
    """One dense Hessian in a process of its own: its time, and the memory that it adds to the process."""
    problem = Problem(d, N, "mse")
    before = peak_gib()
    seconds = once(problem.ours if which == "ours" else problem.autodiff)
    return {"d": d, "N": N, "size": problem.size, "seconds": seconds, "gib": peak_gib() - before}


def largest() -> dict[str, object]:
    """The largest width d at N=16, L=17 in 16 GiB, extrapolated for both from trials that stay below 6 GiB.

    A power of the number of parameters P = 12 d² + 9 d is fitted to the memory that the trials add to their process; it
    is at least 2, that of the matrix itself.
    """
    found: dict[str, object] = {}
    for which, widths in (("ours", (16, 24, 32)), ("torch.func.hessian", (10, 12, 14))):
        trials = [in_own_process("benchmarks.full_block", which, str(d), str(SEQUENCES)) for d in widths]
        logs = torch.tensor([[math.log(float(t[key])) for key in ("size", "gib")] for t in trials])  # type: ignore[arg-type]
        centred = logs - logs.mean(0)
        slope = max(2.0, float(centred.prod(1).sum() / centred[:, 0].square().sum()))
        size, gib = float(trials[-1]["size"]), float(trials[-1]["gib"])  # type: ignore[arg-type]
        reach = size * (LIMIT_GIB / gib) ** (1 / slope)
        width = int((-9 + math.sqrt(81 + 48 * reach)) / 24)
        found[which] = {
            "trials": trials,
            "memory_exponent_in_parameters": slope,
            "largest_d_in_16_gib_extrapolated": width,
            "parameters_extrapolated": 12 * width**2 + 9 * width,
        }
    return found


def run() -> dict[str, object]:
    """All measurements."""
    return {
        "block, N=16 L=17 d=16 MLP=64, MSE": dense_against_autodiff("mse"),
        "block, N=16 L=17 d=16 MLP=64, cross-entropy over 12 words": dense_against_autodiff("cross-entropy"),
        "largest in 16 GiB": largest(),
    }


if __name__ == "__main__":
    arguments = sys.argv[1:]
    print(json.dumps(trial(arguments[0], int(arguments[1]), int(arguments[2])) if arguments else run(), indent=1))
