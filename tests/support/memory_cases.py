"""Computations of 100 to 500 MB, as a script: `python memory_cases.py NAME ...` prints what each predicted and took.

Each case prepares and returns the computation. What it took is the resident peak above what was resident before, as
the kernel counts it; the C library must give freed memory back at once, see `ENVIRONMENT`.
"""

import gc
import json
import sys

import torch
from benchmarks.measure import peak_gib, resident_peak_starts_anew

import curvoscope as cv
from curvoscope.errors import MemoryLimitError
from curvoscope.papers.networks import GPT2
from matrices import within

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
LIMIT = 2**28  # of what is cut into chunks


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / shape[-1] ** 0.5


def attention(d, N, L, words=None, output=False, **options):
    layer = cv.exact.SelfAttention(*(normal(d, d) for _ in range(3)), normal(d, d) if output else None, **options)
    targets = torch.arange(N * L).view(N, L)
    loss = (
        cv.losses.MSE(normal(N, L, d)) if words is None else cv.losses.CrossEntropy(targets % words, normal(d, words))
    )
    return layer.hessian(normal(N, L, d), loss)


def feedforward(d):
    return cv.exact.FeedForward(normal(d, 4 * d), normal(4 * d), normal(4 * d, d), normal(d), activation="gelu")


def dense_query():
    return attention(64, 4, 16)["Q"].dense


def dense_query_key():
    return attention(64, 4, 16)["Q", "K"].dense


def dense_attention():
    return attention(36, 4, 16).dense


def dense_heads():
    return attention(32, 4, 16, words=50, output=True, heads=4).dense


def dense_feedforward():
    H = feedforward(32).hessian(normal(4, 16, 32), cv.losses.MSE(normal(4, 16, 32)))
    return H["W1"].dense


def dense_linear_mlp():
    layer = cv.exact.LinearMLP([normal(32, 48), normal(48, 48), normal(48, 32)])
    return layer.hessian(normal(4, 16, 32), cv.losses.MSE(normal(4, 16, 32))).dense


def dense_transformer_block():
    d = 18
    layer = cv.exact.SelfAttention(normal(d, d), normal(d, d), normal(d, d), normal(d, d))
    norms = [cv.exact.LayerNorm(torch.ones(d).double(), torch.zeros(d).double(), 1e-5) for _ in range(2)]
    block = cv.exact.TransformerBlock(layer, feedforward(d), *norms)
    return block.hessian(normal(2, 8, d), cv.losses.MSE(normal(2, 8, d))).dense


def diagonal_in_chunks():
    block = attention(96, 64, 32, words=50)["K"]
    return lambda: within(2 * LIMIT, block.diagonal)


def norm_in_chunks():
    block = attention(64, 32, 64).outer["Q"]
    return lambda: within(LIMIT, block.frobenius_norm)


def norm_by_rows():
    return attention(256, 1, 1024).functional["K"].frobenius_norm


def norm_by_tokens():
    return attention(64, 64, 32, words=50)["Q"].frobenius_norm


def eigenvalues_dense():
    return attention(52, 4, 16)["Q"].eigenvalues


def density():
    block = attention(256, 2, 16)["V"]
    return lambda: block.density(matvecs=192, steps=64)


def trace_estimate():
    block = attention(256, 2, 16)["Q"]
    return lambda: block.trace(matvecs=64)


def jacobian():
    d = 40
    layer, X = cv.exact.SelfAttention(normal(d, d), normal(d, d), normal(d, d)), normal(2, 32, d)
    return lambda: layer.jacobian(X)


def attention_of_long_sequences():
    layer, X = cv.exact.SelfAttention(*(normal(16, 16) for _ in range(3)), causal=True), normal(4, 1536, 16)
    return lambda: layer(X)


def sdpa():
    q, k, v = (normal(1, 32, 1024, 64).float().requires_grad_() for _ in range(3))

    def differentiated_twice():
        F = cv.attention.sdpa(q, k, v, is_causal=True)
        (gradient,) = torch.autograd.grad(F.square().sum(), q, create_graph=True)
        return torch.autograd.grad(gradient.sum(), [q, k, v])

    return differentiated_twice


def model():
    network = GPT2(128, 4, "pre", vocabulary=256, context=64, seed=0, dtype=torch.float32)
    tokens = torch.arange(16 * 65).view(16, 65) % 256
    return cv.hessian(network, cv.curvature.CrossEntropy(), [(tokens[:, :-1], tokens[:, 1:])], method="autodiff")


def hessian_product():
    H = model()
    vector = torch.ones(H.shape[0])
    return lambda: H @ vector


def gauss_newton_product():
    H = model()
    vector = torch.ones(H.shape[0])
    return lambda: H.outer @ vector


def model_lanczos():
    H = model().total
    return lambda: H.eigenvalues(2, matvecs=24)


CHUNKED = (diagonal_in_chunks, norm_in_chunks, norm_by_rows, norm_by_tokens, trace_estimate)
HELPERS = (normal, attention, feedforward, model)
CASES = {
    case.__name__: case
    for case in list(globals().values())
    if getattr(case, "__module__", "") == __name__ and case not in HELPERS
}


def refused(call, limit):
    """The bytes that a computation would need, which is refused at a limit."""
    try:
        within(limit, call)
    except MemoryLimitError as error:
        return error.needed
    return None


def measured(name):
    """Bytes predicted and taken; of what is not cut into chunks the least that is not refused, what was said of one
    byte less, and what was taken by then."""
    call, found = CASES[name](), {}
    gc.collect()
    base = resident_peak_starts_anew()
    if CASES[name] not in CHUNKED:
        least = refused(call, 1)
        found |= {"least": least, "again": refused(call, least - 1), "by then": round((peak_gib() - base) * 2**30)}
    base = resident_peak_starts_anew()
    with cv.settings() as memory:
        held = call()
    found |= {"predicted": memory.predicted, "taken": round((peak_gib() - base) * 2**30)}
    del held
    return found


if __name__ == "__main__":
    print(json.dumps({name: measured(name) for name in sys.argv[1:]}))
