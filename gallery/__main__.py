"""`python -m gallery [NAME ...]`: measure the models, store numbers and figures, and write the pages.

What a stored JSON file has is not measured again: remove the file to start anew.
"""

import json
import re
import sys
import time
from importlib.metadata import version
from typing import Any

from matplotlib.figure import Figure

from curvoscope.versions import versions
from gallery import page, pages
from gallery.exhibit import SEED
from gallery.figures import figures_of_facts
from gallery.models import MODELS
from gallery.parts import parts_of_page

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
        complete(name)
    pages.write()


def complete(name: str) -> None:
    """Measure what the results of a model do not have, and store each part when it is known."""
    path = page.PAGES / f"{name}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    results |= {"versions": versions() | {"transformers": version("transformers")}, "seed": SEED}
    for keys, make in parts_of_page(name):
        *above, last = keys
        place = results
        for key in above:
            place = place.setdefault(key, {})
        if last in place:
            continue
        start = time.process_time()
        place[last], figures = make()
        path.write_text(_text(_rounded(results)))
        for key, figure in figures.items():
            save(figure, name, key)
        print(f"{name}, {', '.join(keys)}: {time.process_time() - start:.0f} s", file=sys.stderr, flush=True)
    for key, figure in figures_of_facts(results["stages"]).items():
        save(figure, name, key)


def save(figure: Figure, name: str, key: str) -> None:
    """Into the folder of the pages."""
    figure.savefig(page.PAGES / f"{name}-{key}.png", dpi=_DPI, metadata={"Software": None})


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
