"""The notebooks as pages in `docs/notebooks/`: their text, their code, and the outputs that they were saved with."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
_INDEX = """# Notebooks

Each takes less than twenty seconds of computing and downloads nothing. They are in the folder `notebooks/`; the pages
show the outputs that they were saved with, and the tests run them again. To open them, run
`pip install -c constraints.txt -e ".[hf]" jupyterlab`, then `jupyter lab notebooks`.
"""


def write_pages(source: Path, target: Path) -> None:
    """Write one page per notebook of `source`, its pictures, and an index, into `target`."""
    target.mkdir(exist_ok=True)
    notebooks = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(source.glob("*.ipynb"))}
    for stem, notebook in notebooks.items():
        pictures: dict[str, bytes] = {}
        text = "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell, stem, pictures))
        (target / f"{stem}.md").write_text(text + "\n", encoding="utf-8")
        for name, data in pictures.items():
            (target / name).write_bytes(data)
    rows = [f"| [{_title(notebook)}]({stem}.md) | {_question(notebook)} |" for stem, notebook in notebooks.items()]
    tree = ["```{toctree}", ":hidden:", "", *notebooks, "```", ""]
    index = [_INDEX, "| notebook | |", "| --- | --- |", *rows, "", *tree]
    (target / "index.md").write_text("\n".join(index), encoding="utf-8")


def _parts(cell: Cell, stem: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """The Markdown of a cell; `pictures` gets those that it shows."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source.replace("](../docs/", "](../").replace(".ipynb)", ".md)")
        return
    yield _fenced("python", source)
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            name = f"{stem}-{len(pictures) + 1}.png"
            pictures[name] = base64.b64decode("".join(data["image/png"]))
            yield f"![{cell['metadata']['alt']}]({name})"
        elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            yield _fenced("text", text)


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _title(notebook: dict[str, Any]) -> str:
    return "".join(notebook["cells"][0]["source"]).splitlines()[0].removeprefix("# ")


def _question(notebook: dict[str, Any]) -> str:
    """The first sentence."""
    first = " ".join("".join(notebook["cells"][0]["source"]).split("\n\n")[1].split())
    ends = [first.index(mark) for mark in (". ", "? ", ": ") if mark in first]
    return first[: min(ends) + 1].rstrip(":") if ends else first


def _make(app: Any) -> None:
    write_pages(Path(app.srcdir).parent / "notebooks", Path(app.srcdir) / "notebooks")


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", _make)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
