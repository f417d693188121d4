"""The picture at the top of the README: every block of one model by role and layer, trained and with random weights.

`python -m gallery.overview` draws it from the stored numbers of the gallery.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from curvoscope.blocks import layer_and_role
from curvoscope.report import style

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "hessian.png"
NUMBERS = DOCS / "gallery" / "smollm2.json"
ROLES = {
    "norm1": "first norm",
    "attn.Q": "query",
    "attn.K": "key",
    "attn.V": "value",
    "attn.O": "output",
    "norm2": "second norm",
    "mlp.gate": "gate",
    "mlp.up": "up",
    "mlp.down": "down",
}
_DPI = 150
Facts = dict[str, Any]


def stored() -> dict[str, Facts]:
    """The numbers of the trained and of the random weights."""
    results = json.loads(NUMBERS.read_text())
    stages = results.get("stages", results)
    return {
        key: next(facts for label, facts in stages.items() if label.startswith(key)) for key in ("trained", "random")
    }


def norms(facts: Facts) -> np.ndarray:
    """Norms of the Gauss-Newton part (roles, layers)."""
    rows: dict[str, list[float]] = {role: [] for role in ROLES}
    for name, numbers in facts["blocks"].items():
        where = layer_and_role(name)
        if where is not None and where[1] in rows:
            rows[where[1]].append(numbers["norm"]["value"])
    return np.array(list(rows.values()))


def picture(found: dict[str, Facts]) -> Figure:
    """One panel per set of weights, in the same colours: a row per role, a column per layer."""
    tables = {key: norms(facts) for key, facts in found.items()}
    scale = style.log_scale(np.concatenate([table.ravel() for table in tables.values()]))
    figure = style.blank(10, 6.2)
    panels = figure.subplots(len(tables), 1, sharex=True)
    for axes, (key, table) in zip(panels, tables.items(), strict=True):
        image = axes.imshow(table, norm=scale, aspect="auto", interpolation="nearest")
        axes.set_title(f"{key} weights, loss {found[key]['loss']:.2f}", size=13, loc="left")
        axes.set_yticks(range(len(ROLES)), ROLES.values(), size=11)
        axes.tick_params(length=0)
    axes.set_xlabel("layer", size=12)
    style.colour_bar(image, panels, "norm of the block", 12, 11, aspect=30)
    return figure


if __name__ == "__main__":
    picture(stored()).savefig(PICTURE, dpi=_DPI, metadata={"Software": None})
