"""Processor time of starting: `curvoscope --help`, `import curvoscope` and its first use, beside `import torch`.

Each in a process of its own, in turns; seconds are those of user and system together, the median of several runs.
"""

import json
import resource
import statistics
import subprocess
import sys

REPEATS = 7
CODE = {
    "python": "pass",
    "torch": "import torch",
    "help": "import sys; sys.argv = ['curvoscope', '--help']; from curvoscope.cli import main; main()",
    "import": "import torch, curvoscope",
    "cv.hessian": "import torch, curvoscope; curvoscope.hessian",
    "everything": "import torch; from curvoscope import *",
}


def processor_seconds(code: str) -> float:
    """Of a process that runs the code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run() -> dict[str, object]:
    """Seconds, and what they are beside `import torch`."""
    seconds: dict[str, list[float]] = {name: [] for name in CODE}
    for _ in range(REPEATS):
        for name, code in CODE.items():
            seconds[name].append(processor_seconds(code))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    beside = ("import", "cv.hessian", "everything")
    return {
        "limits_seconds": {"help": 0.3, "import": 0.2},
        "seconds": median,
        "seconds_above_torch": {name: median[name] - median["torch"] for name in beside},
        "share_of_torch": {name: median[name] / median["torch"] for name in ("help", *beside)},
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
