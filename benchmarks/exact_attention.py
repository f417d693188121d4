"""The exact Hessian of attention against nested autodiff, curvlinops, Hutchinson estimates and a memory write."""

import json
import math
import sys
import time

import torch
from torch import Tensor

import curvoscope as cv
from benchmarks.measure import in_own_process, in_turns, once, peak_gib
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import addition, answer_targets

torch.set_num_threads(2)


def problem(N: int, L: int, d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """X, Y and W_Q, W_K, W_V of one head with d_k = d_v = d."""
    generator = torch.Generator().manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=generator, dtype=dtype)  # noqa: E731
    return r(N, L, d), r(N, L, d), {name: r(d, d) / math.sqrt(d) for name in "QKV"}


class Attention(torch.nn.Module):
    """The same layer as a module, for autodiff."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.Q, self.K, self.V = (torch.nn.Parameter(weights[name].clone()) for name in "QKV")

    def forward(self, X: Tensor) -> Tensor:
        """F = softmax(Q K^T / sqrt(d_k)) V."""
        scores = (X @ self.Q) @ (X @ self.K).mT / math.sqrt(self.Q.shape[1])
        return scores.softmax(-1) @ (X @ self.V)


def dense_against_autodiff() -> dict[str, object]:
    """All nine blocks, N=64, L=17, d=d_k=16, against torch.func.hessian and curvlinops."""
    X, Y, weights = problem(64, 17, 16)
    layer = cv.exact.SelfAttention(weights["Q"], weights["K"], weights["V"])
    ours = lambda: layer.hessian(X, cv.losses.MSE(Y)).dense()  # noqa: E731
    module = Attention(weights)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(module, parameters, (X,)) - Y).square().mean()

    parameters = {name: p.detach() for name, p in module.named_parameters()}
    nested = torch.func.hessian(loss)(parameters)
    truth = torch.cat([torch.cat([nested[a][b].reshape(256, 256) for b in "QKV"], 1) for a in "QKV"])
    error = float((ours() - truth).abs().max() / truth.abs().max())
    seconds = in_turns(
        3, autodiff=lambda: torch.func.hessian(loss)(parameters), ours=lambda: [ours() for _ in range(10)]
    )
    result: dict[str, object] = {
        "size": 768,
        "aim": 250,
        "relative_error": error,
        "times_faster_than_torch_func_hessian": 10 * seconds["autodiff"] / seconds["ours"],
    }
    try:
        from curvlinops import HessianLinearOperator
    except ImportError:
        return result
    operator = HessianLinearOperator(
        module, torch.nn.MSELoss(), list(module.parameters()), [(X, Y)], check_deterministic=False
    )
    identity = torch.eye(768, dtype=torch.float64)
    peer_error = float((operator @ identity - truth).abs().max() / truth.abs().max())
    seconds = in_turns(2, curvlinops=lambda: operator @ identity, ours=lambda: [ours() for _ in range(10)])
    result["curvlinops_relative_error"] = peer_error
    result["times_faster_than_curvlinops"] = 10 * seconds["curvlinops"] / seconds["ours"]
    return result


def dense_against_memory() -> dict[str, object]:
    """All nine blocks, N=4, L=32, d=d_k=32, against writing a matrix of that size."""
    X, Y, weights = problem(4, 32, 32)
    layer = cv.exact.SelfAttention(weights["Q"], weights["K"], weights["V"])
    P = 3 * 32 * 32
    seconds = in_turns(
        25,
        ours=lambda: layer.hessian(X, cv.losses.MSE(Y)).dense(),
        write=lambda: torch.ones(P, P, dtype=torch.float64).mul_(2),
    )
    return {"size": P, "aim": 1.5, "times_a_memory_write": seconds["ours"] / seconds["write"]}


def norms_against_hutchinson(gaussian: bool = False) -> dict[str, object]:
    """Frobenius norms of the diagonal blocks, both parts, on five-digit addition, N=64, L=17, d=d_k=128.

    The paper's model at initialisation, cross-entropy after the attention layer, against Hutchinson's estimates by
    double backward with a kept graph, taken until their standard error is 1 %. With Gaussian inputs and targets instead
    (MSE), the blocks are near multiples of the identity, and few samples do.
    """
    model = GPT2(d=128)
    tokens = addition(64)
    X = model.attention_input(tokens[:, :17]).detach()
    layer = model.attention()
    loss: cv.losses.LossFunction = cv.losses.CrossEntropy(answer_targets(tokens), model.W_U.detach())
    if gaussian:
        X, Y, _ = problem(64, 17, 128)
        loss = cv.losses.MSE(Y)

    def exact() -> dict[str, float]:
        H = layer.hessian(X, loss)
        parts = {"outer": H.outer, "functional": H.functional}
        return {f"{part} {name}": float(parts[part][name].frobenius_norm()) for part in parts for name in "QKV"}

    weights = {name: getattr(layer, f"W_{name}").detach().clone().requires_grad_() for name in "QKV"}
    scores = (X @ weights["Q"]) @ (X @ weights["K"]).mT / math.sqrt(128)
    visible = torch.ones(17, 17, dtype=torch.bool).tril()
    F = scores.masked_fill(~visible, -math.inf).softmax(-1) @ (X @ weights["V"]) @ layer.W_O.detach()
    found = cv.losses.at(loss, F.detach(), squeeze=False)
    u = torch.zeros_like(F, requires_grad=True)
    estimates, spent, products = {}, 0.0, 0
    for name, weight in weights.items():
        pulled = torch.autograd.grad(F, weight, u, create_graph=True, retain_graph=True)[0]  # J^T u, linear in u
        gradient = torch.autograd.grad(F, weight, found.gradient, create_graph=True, retain_graph=True)[0]

        def outer(v: Tensor, weight: Tensor = weight, pulled: Tensor = pulled) -> Tensor:
            moved = torch.autograd.grad(pulled, u, v.view_as(weight), retain_graph=True)[0]
            return torch.autograd.grad(F, weight, found.curvature.apply(moved), retain_graph=True)[0].flatten()

        def functional(v: Tensor, weight: Tensor = weight, gradient: Tensor = gradient) -> Tensor:
            return torch.autograd.grad(gradient, weight, v.view_as(weight), retain_graph=True)[0].flatten()

        for part, product in (("outer", outer), ("functional", functional)):
            if (part, name) == ("functional", "V"):
                continue  # zero: nothing to estimate
            start = time.perf_counter()
            estimate = _until_one_percent(product, weight.numel())
            spent += time.perf_counter() - start
            products += estimate["matvecs"]
            estimates[f"{part} {name}"] = estimate
    seconds = in_turns(5, ours=exact)["ours"]
    values = exact()
    deviations = [abs(estimate["value"] - values[key]) / estimate["stderr"] for key, estimate in estimates.items()]
    return {
        "times_faster_than_hutchinson": spent / seconds,
        "hutchinson_products": products,
        "exact_in_units_of_a_product": seconds / (spent / products),
        "largest_deviation_in_standard_errors": max(deviations),
    }


def _until_one_percent(product, size: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Hutchinson's estimate of a Frobenius norm by single products, until its standard error is 1 %."""
    generator = torch.Generator().manual_seed(0)
    samples: list[float] = []
    while True:
        z = torch.randint(0, 2, (size,), generator=generator).mul_(2).sub_(1).double()
        samples.append(float(product(z).square().sum()))
        if len(samples) >= 8:
            values = torch.tensor(samples, dtype=torch.float64)
            root = float(values.mean().sqrt())
            stderr = float(values.std() / math.sqrt(len(samples))) / (2 * root)
            if stderr <= 0.01 * root:
                return {"value": root, "stderr": stderr, "matvecs": len(samples)}


def gpt2_layer(L: int, d: int) -> dict[str, object]:
    """One causal layer with heads of width 64 in float32: exact traces and norms, K by estimate, and the peak."""
    generator = torch.Generator().manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
    X, Y = r(1, L, d), r(1, L, d)
    weights = [r(d, d) / math.sqrt(d) for _ in range(4)]
    before = peak_gib()
    layer = cv.exact.SelfAttention(*weights, heads=d // 64, causal=True)
    limit = 2**30
    seconds: dict[str, float] = {}
    values: dict[str, object] = {}
    for form, per_head in (("whole", False), ("per head", True)):
        H = layer.hessian(X, cv.losses.MSE(Y), per_head=per_head)
        diagonal = [name for name in H.names if name[0] in "QVO"]
        start = time.perf_counter()
        with cv.settings(memory_limit=limit):
            traces = {name: float(H[name].trace()) for name in H.names}
        seconds[f"traces of Q, K, V, O, {form}"] = time.perf_counter() - start
        start = time.perf_counter()
        with cv.settings(memory_limit=limit):
            norms = {name: float(H[name].frobenius_norm()) for name in diagonal}
        seconds[f"norms of Q, V, O, {form}"] = time.perf_counter() - start
        if not per_head:
            values = {"traces": traces, "norms": norms}
    H = layer.hessian(X, cv.losses.MSE(Y))
    start = time.perf_counter()
    K = H["K"].frobenius_norm(matvecs=32)
    seconds["norm of K, 32 products"] = time.perf_counter() - start
    v = r(H.shape[0])
    seconds["one product, Q, K, V, O"] = once(lambda: H @ v)
    return {
        "seconds": seconds,
        "peak_gib": peak_gib(),
        "peak_gib_before": before,
        **values,
        "norm_of_K": {"value": K.value, "stderr": K.stderr},
    }


def key_norm(L: int, d: int, rotary: bool) -> dict[str, object]:
    """The norm of the functional part of a causal layer's key weights, heads of 64, float32: exact, and estimated."""
    generator = torch.Generator().manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
    X, Y, weights = r(1, L, d), r(1, L, d), [r(d, d) / math.sqrt(d) for _ in range(4)]
    layer = cv.exact.SelfAttention(*weights, heads=d // 64, causal=True, rotary=1e4 if rotary else None)
    keys = lambda: layer.hessian(X, cv.losses.MSE(Y)).functional["K"]  # noqa: E731
    seconds = in_turns(
        3,
        time.process_time,
        exact=lambda: keys().frobenius_norm(),
        estimated=lambda: keys().frobenius_norm(matvecs=32),
    )
    exact, estimated = keys().frobenius_norm(), keys().frobenius_norm(matvecs=32)
    return {
        "L": L,
        "d": d,
        "rotary": rotary,
        "times_faster_than_32_products": seconds["estimated"] / seconds["exact"],
        "stderr_of_the_estimate": estimated.stderr / exact.value,
        "deviation_in_standard_errors": abs(estimated.value - exact.value) / estimated.stderr,
    }


def run() -> dict[str, object]:
    """All measurements."""
    sizes = [(256, 768), (512, 768), (1024, 768), (512, 384), (512, 1536)]
    layers = {f"L={L}, d={d}": in_own_process("benchmarks.exact_attention", str(L), str(d)) for L, d in sizes}
    return {
        "dense, N=64 L=17 d=16": dense_against_autodiff(),
        "dense, N=4 L=32 d=32": dense_against_memory(),
        "norms, N=64 L=17 d=128": norms_against_hutchinson(),
        "norms, Gaussian inputs": norms_against_hutchinson(gaussian=True),
        "functional norm of the keys, float32": [
            key_norm(L, 768, rotary) for rotary in (False, True) for L in (128, 256, 512)
        ],
        "one GPT-2 layer, float32": layers,
    }


if __name__ == "__main__":
    found = gpt2_layer(int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) == 3 else run()
    print(json.dumps(found, indent=1))
