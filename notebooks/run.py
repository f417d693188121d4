"""Run all notebooks and save them with their outputs: `make notebooks`."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

for path in sorted(Path(__file__).parent.glob("*.ipynb")):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, record_timing=False).execute()  # times would differ from run to run
    nbformat.write(notebook, path)
    print(path.name)
