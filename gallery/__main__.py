"""`python -m gallery [NAME ...]`: measure the models, store numbers and figures, and write the pages."""

import gc
import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from curvoscope.versions import versions
from gallery import page
from gallery.claims import value_over_query
from gallery.figures import figures_of
from gallery.measure import facts_of, parameters, swept
from gallery.models import MODELS, SEED

_DIGITS = 6
_DPI = 110


def main() -> None:
    """Measure all models, or those named."""
    names = sys.argv[1:] or list(MODELS)
    for name in names:
        if name not in MODELS:
            sys.exit(f"error: there is no model {name!r} among {', '.join(MODELS)}")
    page.PAGES.mkdir(exist_ok=True)
    for name in names:
        start = time.perf_counter()
        measure(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    page.write()


def measure(name: str) -> None:
    """Measure one model with trained and with random weights; write its numbers and its figures."""
    exhibit = MODELS[name].load(True)
    random = facts_of(exhibit, swept(exhibit))
    del exhibit  # its weights make room for the trained ones
    gc.collect()
    exhibit = MODELS[name].load(False)
    sweep = swept(exhibit)
    trained = facts_of(exhibit, sweep)
    size = parameters(exhibit.model)
    used = versions() | {"transformers": version("transformers")}
    results = {"versions": used, "seed": SEED, "parameters": size, "trained": trained, "random": random}
    (page.PAGES / f"{name}.json").write_text(_text(_rounded(results)))
    for key, figure in figures_of(sweep, value_over_query(trained), value_over_query(random)).items():
        _save(figure, page.PAGES / f"{name}-{key}.png")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})


def _text(results: dict[str, Any]) -> str:
    """JSON with one line per estimate."""
    whole = json.dumps(results, indent=1) + "\n"
    return re.sub(r"[{[][^{}[\]]*[}\]]", lambda found: " ".join(found[0].split()), whole)


def _rounded(value: Any) -> Any:
    """Floats with six digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
