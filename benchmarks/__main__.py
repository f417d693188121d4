"""`python -m benchmarks [NAME ...]`: run the benchmarks and print their results as one JSON document.

One that fails says so in the document and on stderr, and the others are run.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version

import benchmarks

PEERS = ("torch", "curvlinops-for-pytorch", "hessian-eigenthings", "pyhessian", "transformers")
NOT_BENCHMARKS = {"__main__", "families", "measure", "page", "ranks", "sensitivity", "sensitivity_page", "tables"}
NOT_BENCHMARKS |= {"audit_page", "audit_study", "bergson_scores", "trained_models", "weight_studies"}
NOT_BENCHMARKS |= {"profile"}  # on request: its clock is the wall's, and needs an idle core


def main() -> None:
    """Run all benchmarks, or those named."""
    known = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in NOT_BENCHMARKS]
    names = sys.argv[1:] or known
    for name in names:
        if name not in known:
            sys.exit(f"error: there is no benchmark {name!r} among {', '.join(known)}")
    results: dict[str, object] = {"versions": versions(), "cores": len(os.sched_getaffinity(0))}
    failed = []
    for name in names:
        start = time.perf_counter()
        try:
            results[name] = importlib.import_module(f"benchmarks.{name}").run()
        except Exception as error:
            traceback.print_exc()
            results[name] = {"fails": f"{type(error).__name__}: {error}"}
            failed.append(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(json.dumps(results, indent=1))
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


def versions() -> dict[str, str]:
    """Of torch and of the peers that are installed."""
    found = {}
    for name in PEERS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name).split("+")[0]
    return found


if __name__ == "__main__":
    main()
