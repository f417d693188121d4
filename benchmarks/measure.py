"""Timing and memory, as ratios that survive a noisy machine: what is compared is measured in turns, in one process."""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def in_turns(
    repeats: int, clock: Callable[[], float] = time.perf_counter, **calls: Callable[[], object]
) -> dict[str, float]:
    """Median seconds of each call, the calls taken in turns after one warm-up each."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def once(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_gib() -> float:
    """The largest resident memory of this program so far; getrusage would count the process that started it too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20


def resident_peak_starts_anew() -> float:
    """From here on `peak_gib` tells of what comes after; returns what is resident now, in GiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_gib()


def exponent(values: Mapping[float, float]) -> float:
    """The slope of log value by log size, by least squares."""
    x, y = [math.log(size) for size in values], [math.log(value) for value in values.values()]
    return statistics.linear_regression(x, y).slope


def in_own_process(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """The JSON that `python -m module arguments` prints: a fresh process, so that its peak memory is its own."""
    command = [sys.executable, "-m", module, *arguments]
    variables = {**os.environ, **(environment or {})}
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
    found: dict[str, object] = json.loads(finished.stdout)
    return found
