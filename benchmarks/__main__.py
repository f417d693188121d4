"""`python -m benchmarks [--resume] [--out FILE] [NAME ...]`: run the benchmarks, write their results to a JSON file.

Each benchmark runs in a process of its own, and FILE is written after each, so that a run that is cut short can be
resumed: `--resume` keeps the results in FILE and runs the benchmarks that are missing or failed. Named benchmarks
replace their results in FILE, marked as a run of their own; those that take an hour run only if they are named, and a
run of all keeps their results. A benchmark that fails says so in FILE and on stderr, and
the others are run.
"""

import argparse
import contextlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any

import benchmarks

PEERS = ("torch", "curvlinops-for-pytorch", "hessian-eigenthings", "pyhessian", "transformers")
NOT_BENCHMARKS = {"__main__", "families", "measure", "page", "ranks", "sensitivity", "sensitivity_page", "tables"}
NOT_BENCHMARKS |= {"reasons", "audit_page", "audit_study", "bergson_scores", "trained_models", "weight_studies"}
LONG = {"audit_large"}  # an hour each
# By processor time of one thread, or without times: two of them can run at once.
PAIRED = (
    "solve",
    "compiled",
    "growth",
    "full_block",
    "monitor",
    "overhead",
    "start_up",
    "influence",
    "several_vectors",
)
_RUN = "import json; from benchmarks.{0} import run; print(); print(json.dumps(run()))"


def main() -> None:
    """Run all benchmarks, or those named."""
    known = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in NOT_BENCHMARKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results.json"), help="file of the results")
    parser.add_argument("--resume", action="store_true", help="keep the results in FILE, run what is missing or failed")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(known):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))} among {', '.join(known)}")
    results: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    if not (chosen.names or chosen.resume):
        results = {name: found for name, found in results.items() if name in LONG}
    results |= {"versions": versions(), "cores": len(os.sched_getaffinity(0))}
    names = chosen.names or [name for name in known if name not in LONG and "fails" in results.get(name, {"fails": ""})]
    alone = {"in_a_run_of_its_own": True} if chosen.names else {}
    writing = Lock()

    def run(name: str) -> None:
        start = time.perf_counter()
        found = measured(name) | alone
        with writing:
            results[name] = found
            results.setdefault("run_seconds", {})[name] = round(time.perf_counter() - start)
            print(f"{name}: {results['run_seconds'][name]} s", file=sys.stderr, flush=True)
            chosen.out.write_text(json.dumps(results, indent=1) + "\n")

    with ThreadPoolExecutor(min(2, results["cores"])) as pool:
        list(pool.map(run, [name for name in PAIRED if name in names]))
    for name in names:
        if name not in PAIRED:
            run(name)
    if failed := [name for name in names if "fails" in results[name]]:
        sys.exit(f"error: failed: {', '.join(failed)}")


def measured(name: str) -> dict[str, Any]:
    """The results of one benchmark, in a process of its own."""
    command = [sys.executable, "-c", _RUN.format(name)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if finished.returncode:
        return {"fails": f"exit status {finished.returncode}"}
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def versions() -> dict[str, str]:
    """Of torch and of the peers that are installed."""
    found = {}
    for name in PEERS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name).split("+")[0]
    return found


if __name__ == "__main__":
    main()
