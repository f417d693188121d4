"""Products with the Hessian of a GPT-2 in units of its gradient, against curvlinops, hessian-eigenthings and PyHessian.

4 layers, d = 256, L = 128, batch 4, vocabulary 5000, float32, two threads. A run of 50 products, each needing the one
before as in Lanczos: what it costs to set up is shared among them. Fifteen are timed, in turns of five of whatever is
compared, so that a busy machine moves the ratios little. Peak memory is that of a process of its own. Trace and largest
eigenvalue are timed against PyHessian's, which has methods for both, set-up included and to the same true error.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.measure import in_own_process, in_turns, peak_gib
from curvoscope.curvature import CrossEntropy, ModelHessian, hessian

LAYERS, WIDTH, HEADS, LENGTH, ROWS, VOCABULARY = 4, 256, 4, 128, 4, 5000
VECTORS, TURN, TURNS = 50, 5, 3  # vectors of a run; of those, timed in turns
PROBES = 16
RUNS, REPEATS = 10, 2  # of estimates: for their errors, and for their times
BLOCK = "h.2.attn.Q"

Product = Callable[[Tensor], Tensor]


class CausalSelfAttention(nn.Module):
    """Attention as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(N, L, d) -> (N, L, d)."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Pre-norm, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential()
        self.mlp.c_fc, self.mlp.act = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh")
        self.mlp.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(N, L, d) -> (N, L, d)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainGPT2(nn.Module):
    """GPT-2 of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, L) -> (N L, vocabulary)."""
        x = self.wte(tokens) + self.wpe.weight
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x)).flatten(0, 1)


class HuggingFaceGPT2(nn.Module):
    """GPT-2 of Hugging Face, logits only."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": VOCABULARY}
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, L) -> (N L, vocabulary)."""
        return self.gpt2(input_ids=tokens, use_cache=False).logits.flatten(0, 1)


def problem(kind: type[nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = kind().eval()
    return model, torch.randint(0, VOCABULARY, (ROWS, LENGTH)), torch.randint(0, VOCABULARY, (ROWS * LENGTH,))


def kinds() -> list[type[nn.Module]]:
    """The models at hand."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return [PlainGPT2]
    return [HuggingFaceGPT2, PlainGPT2]


def ours(kind: type[nn.Module], memory_limit: int | None = None) -> ModelHessian:
    model, tokens, targets = problem(kind)
    return hessian(model, CrossEntropy(), [(tokens, targets)], memory_limit=memory_limit)


def gradient(kind: type[nn.Module]) -> Product:
    """One gradient, whatever the vector."""
    model, tokens, targets = problem(kind)
    parameters = list(model.parameters())
    return lambda _: torch.autograd.grad(cross_entropy(model(tokens), targets), parameters)[0].flatten()


def curvlinops(kind: type[nn.Module], name: str, one_block: bool = False) -> Product:
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    model, tokens, targets = problem(kind)
    chosen = [p for n, p in model.named_parameters() if not one_block or n.endswith("h.2.attn.c_attn.weight")]
    operator = {"hessian": HessianLinearOperator, "ggn": GGNLinearOperator}[name](
        model, nn.CrossEntropyLoss(), chosen, [(tokens, targets)], check_deterministic=False
    )

    def product(vector: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            found: Tensor = operator @ vector
        return found

    return product


def eigenthings(kind: type[nn.Module]) -> Product:
    from hessian_eigenthings.operators.hessian import HessianOperator

    model, tokens, targets = problem(kind)
    operator = HessianOperator(model, [(tokens, targets)], lambda m, batch: cross_entropy(m(batch[0]), batch[1]))

    def product(vector: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return operator.matvec(vector)

    return product


def pyhessian(kind: type[nn.Module]) -> Any:
    """One batch: it differentiates once, keeps the graph, and makes its products from that."""
    from pyhessian import hessian as peer

    model, tokens, targets = problem(kind)
    with sdpa_kernel(SDPBackend.MATH):
        return peer(model, nn.CrossEntropyLoss(), data=(tokens, targets), cuda=False)


def pyhessian_product(kind: type[nn.Module]) -> Product:
    from pyhessian import hessian_vector_product

    found = pyhessian(kind)
    sizes = [p.numel() for p in found.params]

    def product(vector: Tensor) -> Tensor:
        parts = [v.view_as(p) for v, p in zip(vector.split(sizes), found.params, strict=True)]
        return torch.cat([part.flatten() for part in hessian_vector_product(found.gradsH, found.params, parts)])

    return product


def runners(kind: type[nn.Module]) -> dict[str, Callable[[], Product]]:
    """What is measured, by name: a function that sets up and returns the product."""
    return {
        "gradient": lambda: gradient(kind),
        "hessian": lambda: ours(kind).total.__matmul__,
        "ggn": lambda: ours(kind).outer.__matmul__,
        "functional": lambda: ours(kind).functional.__matmul__,
        "hessian of one block": lambda: ours(kind).total[BLOCK].__matmul__,
        "ggn of one block": lambda: ours(kind).outer[BLOCK].__matmul__,
        "hessian, recomputed": lambda: ours(kind, memory_limit=1).total.__matmul__,
        "ggn, recomputed": lambda: ours(kind, memory_limit=1).outer.__matmul__,
        "curvlinops hessian": lambda: curvlinops(kind, "hessian"),
        "curvlinops ggn": lambda: curvlinops(kind, "ggn"),
        "curvlinops hessian of one block": lambda: curvlinops(kind, "hessian", one_block=True),
        "curvlinops ggn of one block": lambda: curvlinops(kind, "ggn", one_block=True),
        "eigenthings hessian": lambda: eigenthings(kind),
        "pyhessian hessian": lambda: pyhessian_product(kind),
    }


def _size(kind: type[nn.Module], name: str) -> int:
    if "one block" in name:
        return WIDTH * WIDTH * (3 if name.startswith("curvlinops") else 1)
    return sum(p.numel() for p in problem(kind)[0].parameters())


def timed(kind: type[nn.Module], chosen: Collection[str] | None = None, turns: int = TURNS) -> dict[str, float]:
    """Seconds per vector in a run of 50: the median product, and a fiftieth of the set-up with the first product."""
    products: dict[str, Product] = {}
    vectors: dict[str, Tensor] = {}
    shares: dict[str, float] = {}
    for name, set_up in runners(kind).items():
        if chosen is not None and name not in chosen:
            continue
        vector = torch.randn(_size(kind, name), generator=torch.Generator().manual_seed(1))
        try:
            set_up()(vector)  # what torch and transformers import at their first use is no part of a run
        except ImportError:
            continue
        start = time.perf_counter()
        products[name] = set_up()
        products[name](vector)
        first = time.perf_counter() - start
        start = time.perf_counter()
        products[name](vector)
        shares[name] = 0.0 if name == "gradient" else max(0.0, first - (time.perf_counter() - start)) / VECTORS
        vectors[name] = vector
    seconds: dict[str, list[float]] = {name: [] for name in products}
    for _ in range(turns):
        for name, product in products.items():
            for _ in range(TURN):
                start = time.perf_counter()
                found = product(vectors[name])
                seconds[name].append(time.perf_counter() - start)
                if name != "gradient":
                    vectors[name] = found / found.norm()
    return {name: statistics.median(values) + shares[name] for name, values in seconds.items()}


def questions(kind: type[nn.Module]) -> dict[str, dict[str, float]]:
    """Trace and largest eigenvalue, set-up included, by both packages to the same true error.

    Errors are relative to reference values: the mean of all runs of the trace, and an eigenvalue to 1e-4. Traces come
    from 16 products; their errors are the root mean square of `RUNS` runs with different probes. PyHessian's power
    iteration stops when two steps agree to 1e-3, which is not its error; ours stops at the error that PyHessian has.
    PyHessian's trace would stop at the second product if that is negative, so its tolerance is out of reach.

    What is timed runs once before: the first use of memory may take longer than all products.
    """
    try:
        peer = pyhessian(kind)
    except ImportError:
        return {}
    H = ours(kind).total
    true = float(H.eigenvalues(1, "LM", tolerance=1e-4)[0])
    power = peer.eigenvalues(maxIter=100, tol=1e-3)[0][0]
    allowed = max(abs(power / true - 1), 1e-3)
    traces = {
        "trace": [float(H.trace(matvecs=PROBES, seed=seed)) for seed in range(RUNS)],
        "pyhessian trace": [
            statistics.mean(peer.trace(maxIter=PROBES, tol=-math.inf)) for _ in range(RUNS)
        ],  # of torch's generator, which goes on
    }
    reference = statistics.mean(value for values in traces.values() for value in values)
    found = {
        name: {
            "value": values[0],
            "error": statistics.mean((value / reference - 1) ** 2 for value in values) ** 0.5,
            "products": PROBES,
        }
        for name, values in traces.items()
    }
    largest = H.eigenvalues(1, "LM", tolerance=allowed)[0]
    found["eigenvalue"] = {
        "value": float(largest),
        "error": abs(float(largest) / true - 1),
        "products": largest.matvecs,
    }
    found["pyhessian eigenvalue"] = {"value": power, "error": abs(power / true - 1)}
    del peer, H
    calls: dict[str, Callable[[], object]] = {
        "trace": lambda: ours(kind).total.trace(matvecs=PROBES),
        "pyhessian trace": lambda: pyhessian(kind).trace(maxIter=PROBES, tol=-math.inf),
        "eigenvalue": lambda: ours(kind).total.eigenvalues(1, "LM", tolerance=allowed),
        "pyhessian eigenvalue": lambda: pyhessian(kind).eigenvalues(maxIter=100, tol=1e-3),
    }
    seconds = in_turns(REPEATS, time.perf_counter, **calls)
    return {name: {"seconds": seconds[name], **one} for name, one in found.items()}


def memory(kind: type[nn.Module], name: str) -> dict[str, float]:
    """Peak memory of a process that makes three products, and how much of it came after the model was made."""
    size = _size(kind, name)
    before = peak_gib()
    try:
        product = runners(kind)[name]()
    except ImportError:
        return {}
    for _ in range(3):
        product(torch.randn(size))
    return {"peak_gib": peak_gib(), "above_the_model_gib": peak_gib() - before}


def summary(kind: type[nn.Module]) -> dict[str, object]:
    seconds = timed(kind)
    unit = seconds["gradient"]
    result: dict[str, object] = {
        "gradient_seconds": unit,
        "gradients_a_vector": {name: value / unit for name, value in seconds.items() if name != "gradient"},
        "memory": {name: in_own_process("benchmarks.matrix_free", kind.__name__, name) for name in runners(kind)},
    }
    pairs = {
        "hessian": ("curvlinops hessian", "eigenthings hessian", "pyhessian hessian"),
        "ggn": ("curvlinops ggn",),
        "hessian of one block": ("curvlinops hessian of one block",),
        "ggn of one block": ("curvlinops ggn of one block",),
        "trace": ("pyhessian trace",),
        "eigenvalue": ("pyhessian eigenvalue",),
    }
    asked = questions(kind)
    seconds |= {name: one["seconds"] for name, one in asked.items()}
    result["questions"] = asked
    result["times_faster"] = {
        f"{name} than {peer}": seconds[peer] / seconds[name]
        for name, peers in pairs.items()
        for peer in peers
        if peer in seconds
    }
    return result


def run() -> dict[str, object]:
    """All measurements, by model."""
    limits = {"hessian": 2.05, "ggn": 1.4}
    results: dict[str, object] = {kind.__name__: summary(kind) for kind in kinds()}
    return {"limits_gradients_a_vector": limits, **results}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        chosen = {kind.__name__: kind for kind in (HuggingFaceGPT2, PlainGPT2)}[sys.argv[1]]
        print(json.dumps(memory(chosen, sys.argv[2])))
    else:
        print(json.dumps(run(), indent=1))
