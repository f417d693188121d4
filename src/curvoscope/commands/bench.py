"""`curvoscope bench`: the benchmarks of a checkout, which are not part of the package."""

import subprocess
import sys
from pathlib import Path

from curvoscope.errors import EmptyError


def run(names: list[str]) -> int:
    """`python -m benchmarks NAME...` in the working directory; its exit code."""
    if not Path("benchmarks", "__main__.py").is_file():
        raise EmptyError("bench", f"there is no benchmarks/ in {Path.cwd()}; run it in a checkout of the repository")
    return subprocess.run([sys.executable, "-m", "benchmarks", *names], check=False).returncode
