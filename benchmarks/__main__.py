"""`python -m benchmarks [NAME ...]`: run the benchmarks and print their results as one JSON document."""

import importlib
import json
import pkgutil
import sys

import benchmarks

NOT_BENCHMARKS = {"__main__", "measure"}


def main() -> None:
    """Run all benchmarks, or those named."""
    known = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in NOT_BENCHMARKS]
    names = sys.argv[1:] or known
    for name in names:
        if name not in known:
            sys.exit(f"error: there is no benchmark {name!r} among {', '.join(known)}")
    results = {name: importlib.import_module(f"benchmarks.{name}").run() for name in names}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
