"""The main ratios with all instructions of the CPU and with those of AVX2 only: none should depend on AVX-512.

Each setting runs in a process of its own, whose environment tells torch, MKL and oneDNN which instructions to use.
"""

import json

import torch

from benchmarks.exact_attention import dense_against_autodiff, dense_against_memory, key_norm, norms_against_hutchinson
from benchmarks.matrix_free import PlainGPT2, timed
from benchmarks.measure import in_own_process
from benchmarks.sweep import gpt2, swept

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def measured() -> dict[str, object]:
    """The ratios with the instructions of this process."""
    seconds = timed(PlainGPT2, ("gradient", "hessian", "ggn", "curvlinops hessian", "curvlinops ggn"))
    dense = dense_against_autodiff()
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "hessian, gradients": seconds["hessian"] / seconds["gradient"],
        "hessian, times faster than curvlinops": seconds["curvlinops hessian"] / seconds["hessian"],
        "ggn, gradients": seconds["ggn"] / seconds["gradient"],
        "ggn, times faster than curvlinops": seconds["curvlinops ggn"] / seconds["ggn"],
        "dense, times faster than torch.func.hessian": dense["times_faster_than_torch_func_hessian"],
        "dense, times faster than curvlinops": dense.get("times_faster_than_curvlinops"),
        "dense, memory writes": dense_against_memory()["times_a_memory_write"],
        "norms, times faster than Hutchinson": norms_against_hutchinson(gaussian=True)["times_faster_than_hutchinson"],
        "norm of the keys, times faster than 32 products": key_norm(128, 768, False)["times_faster_than_32_products"],
        "sweep, gradients": swept(*gpt2())[0]["gradients"],
    }


def run() -> dict[str, object]:
    """Both settings."""
    return {
        "all": in_own_process("benchmarks.other_cpu"),
        "avx2": in_own_process("benchmarks.other_cpu", environment=AVX2),
    }


if __name__ == "__main__":
    print(json.dumps(measured(), indent=1))
