"""Every notebook runs from its first cell to its last, prints what it was saved with, and becomes a page."""

import json
import sys

import pytest

from fences import DOCS, ROOT, difference

sys.path.insert(0, str(DOCS / "_ext"))

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def printed(cell):
    """What a code cell wrote or returned as text; a figure only by its kind."""
    texts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        texts.append("<figure>\n" if "image/png" in data else "".join(output.get("text", data.get("text/plain", ""))))
    return "".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_was_saved_with(path, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    saved = nbformat.read(path, as_version=4)
    found = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(found, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, after in zip(saved.cells, found.cells, strict=True):
        if after.cell_type == "code":
            assert not [output for output in after.outputs if output.get("name") == "stderr"]
            assert (differs := difference(printed(before), printed(after))) is None, differs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_its_outputs(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    figures = [cell for cell in code if "<figure>" in printed(cell)]
    assert figures and all(cell["metadata"]["alt"] for cell in figures)
    assert not [cell for cell in notebook["cells"] if "execution" in cell["metadata"]]  # times differ from run to run


def test_the_pages_of_the_notebooks(tmp_path):
    from notebook_pages import write_pages

    write_pages(ROOT / "notebooks", tmp_path / "pages")
    assert len(NOTEBOOKS) == 5
    index = (tmp_path / "pages/index.md").read_text()
    for path in NOTEBOOKS:
        page = (tmp_path / "pages" / f"{path.stem}.md").read_text()
        assert f"]({path.stem}.md)" in index and ".ipynb" not in page and "../docs/" not in page
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                assert "".join(cell["source"]) in page
                assert all(line in page for line in printed(cell).splitlines() if line != "<figure>")
        assert (tmp_path / "pages" / f"{path.stem}-1.png").stat().st_size > 1000
