"""Same seed, same machine, same result, to the bit; and every output says which seed and which programs made it.

Each command runs twice into different folders. Everything that it writes and prints is compared byte for byte, apart
from what is declared here: how long things took, and where they were written. SQLite files are compared row by row,
as the order of their pages follows that of the processes. `bench` is a list of timings.
"""

import csv
import io
import json
import os
import re
import sqlite3
import subprocess
import sys

import pytest
import torch

from curvoscope.commands import verify
from curvoscope.papers.experiments import figures
from curvoscope.papers.experiments.setting import Setting
from curvoscope.papers.theorems.registry import THEOREMS
from curvoscope.versions import versions

DURATIONS = {"seconds", "share_of_time", "cost", "pace"}
TINY = ["--sequences", "2", "--length", "8", "--blocks", "h.0.attn.[QV]"]
COMMANDS = {
    "analyze": ["analyze", "--d", "2", "--sequences", "2", "--seed", "3"],
    "watch": ["watch", "--steps", "3", "--d", "4", "--sequences", "4", "--every", "2", "--budget", "1", "--seed", "3"],
    "spectrum": ["spectrum", "--sequences", "2", "--matvecs", "16", "--blocks", "h.0.attn.Q", "--seed", "3"],
}
MORE = {
    **COMMANDS,
    "analyze MODEL": ["analyze", "gpt2-tiny", *TINY, "--matvecs", "8"],
    "analyze a ViT": ["analyze", "vit-tiny", "--sequences", "2", "--blocks", "h.0.attn.[QV]", "--matvecs", "8"],
    "spectrum MODEL": ["spectrum", "gpt2-tiny", *TINY, "--matvecs", "16"],
    "watch text": [
        "watch",
        "--task",
        "text",
        "--steps",
        "3",
        "--every",
        "2",
        "--budget",
        "1",
        "--optimizer",
        "gauss-newton",
    ],
    "reproduce": ["reproduce", "moments", "--quick", "--jobs", "2"],
    "verify": ["verify"],
}


def normal(value):
    """JSON and checkpoints without the durations; tensors as bytes."""
    if isinstance(value, dict):
        return {key: normal(one) for key, one in value.items() if key not in DURATIONS}
    if isinstance(value, list | tuple):
        return [normal(one) for one in value]
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def parsed(text):
    return json.dumps(normal(json.loads(text)))  # the order of the keys counts


def rows(path):
    with sqlite3.connect(path) as connection:
        names = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY 1")
        ]
        found = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in names}
    connection.close()
    return {
        name: sorted(tuple(parsed(one) if str(one).startswith("{") else one for one in row) for row in table)
        for name, table in found.items()
    }


def contents(folder):
    """What each file holds."""
    readers = {
        ".json": lambda path: parsed(path.read_text()),
        ".pt": lambda path: normal(torch.load(path, weights_only=True)),
        ".sqlite": rows,
    }
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: readers.get(path.suffix, lambda path: path.read_bytes())(path) for path in paths}


def same(first, second):
    assert contents(first).keys() == contents(second).keys()
    differing = [name for name, held in contents(first).items() if held != contents(second)[name]]
    assert not differing, f"{', '.join(differing)} differ"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_twice_in_one_process(name, call, tmp_path):
    printed = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        torch.rand(len(printed) + 1)  # what a command draws from torch's own generator would differ
        code, stdout, stderr = call(*COMMANDS[name], "--out", folder, "--json")
        assert (code, stderr) == (0, "")
        printed.append(parsed(stdout))
    assert printed[0] == printed[1]
    same(tmp_path / "one", tmp_path / "two")
    states_seed_and_versions(tmp_path / "one", 3)
    before = contents(tmp_path / "one")
    assert call("report", tmp_path / "one")[0] == 0
    assert contents(tmp_path / "one") == before
    if name == "watch":
        exports_state_seed_and_versions(call, tmp_path, {"3"})


FORKS = """
import json, os, sys
import torch._dynamo, transformers.models.gpt2.modeling_gpt2, transformers.models.vit.modeling_vit
from matplotlib.figure import Figure
from curvoscope import cli
from curvoscope.commands import analyze, reproduce, spectrum, verify, watch

def save(figure, *arguments, real=Figure.savefig, **options):
    figure.set_layout_engine("none")
    return real(figure, *arguments, **options)

Figure.savefig = save
for line in sys.stdin:
    words, out = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
        sys.argv = ["curvoscope", *words]
        cli.main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def interpreters():
    """Two, with other hashes of strings, so that no order of a set shows; with two threads, whose sums are the harder.
    Each has loaded the package and runs every command in a fork. To arrange the panels of a figure takes longer than to
    draw them: that is left to the test above."""
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}  # on a busy machine the default waits busily
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, "-c", FORKS], env={**os.environ, **threads, "PYTHONHASHSEED": seed}, **pipes)
        for seed in "01"
    ]
    yield started
    for one in started:
        one.communicate()
        assert one.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_twice_in_two_processes(name, interpreters, tmp_path):
    printed = []
    for interpreter, folder in zip(interpreters, (tmp_path / "one", tmp_path / "two"), strict=True):
        options = [] if name == "verify" else ["--out", str(folder)]
        interpreter.stdin.write(json.dumps([[*MORE[name], *options, "--json"], str(tmp_path / "printed")]) + "\n")
        interpreter.stdin.flush()
        assert interpreter.stdout.readline() == "0\n"
        printed.append(parsed((tmp_path / "printed").read_text()))
        (tmp_path / "printed").unlink()
    assert printed[0] == printed[1]
    if name != "verify":
        same(tmp_path / "one", tmp_path / "two")


def states_seed_and_versions(folder, seed):
    """Every document, page and store in a folder."""
    made_by = ", ".join(f"{name} {version}" for name, version in versions().items())
    for path in folder.iterdir():
        if path.suffix == ".json":
            document = json.loads(path.read_text())
            assert (document["seed"], document["versions"]) == (seed, versions()), path.name
        elif path.suffix == ".html":
            assert made_by in path.read_text() and f"Seed: {seed}" in path.read_text(), path.name
        elif path.suffix == ".md":
            assert made_by.replace("_", r"\_") in path.read_text() and f"Seed: {seed}" in path.read_text(), path.name
        elif path.suffix == ".pt":
            state = torch.load(path, weights_only=True)
            assert (state["options"]["seed"], state["versions"]) == (seed, versions())
        elif path.suffix == ".sqlite":
            stored_facts = json.loads(rows(path)["runs"][0][2])
            assert (stored_facts["configuration"]["seed"], stored_facts["versions"]) == (seed, versions())


@pytest.fixture
def small(monkeypatch):
    """fig3a with a network of width 4, two points and two seeds."""
    original = figures.load("fig3a")
    options = {name: getattr(original, name) for name in original.__dataclass_fields__ if name != "hash"}
    changed = type(original)(
        **{
            **options,
            "configuration": Setting(d=4, sequences=2),
            "quick_points": original.points[:10:3],
            "quick_seeds": 2,
        }
    )
    monkeypatch.setattr(figures, "load", lambda name: changed)


@pytest.mark.slow
def test_reproduced_figures_and_their_export(small, call, tmp_path):
    printed = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        code, stdout, _ = call("reproduce", "fig3a", "--quick", "--jobs", "1", "--out", folder, "--json")
        assert code == 0
        printed.append(stdout)
    assert printed[0] == printed[1]
    same(tmp_path / "one", tmp_path / "two")
    figure = json.loads(printed[0])["fig3a"]
    assert (figure["seeds"], figure["versions"]) == ([0, 1], versions())
    made_by = ", ".join(f"{name} {version}" for name, version in versions().items())
    assert f"Seeds: 0, 1. Versions: {made_by}." in (tmp_path / "one" / "fig3a.html").read_text()
    for name in ("report.html", "report.md"):
        assert re.search("fig3a: seeds 0, 1.", (tmp_path / "one" / name).read_text()), name
    assert json.loads((tmp_path / "one" / "reproduce.json").read_text())["versions"] == versions()
    exports_state_seed_and_versions(call, tmp_path, {"0", "1"})


def exports_state_seed_and_versions(call, tmp_path, seeds):
    tables = [call("export", tmp_path / folder)[1] for folder in ("one", "two")]
    assert tables[0] == tables[1]
    table = list(csv.DictReader(io.StringIO(tables[0])))
    assert table
    for row in table:
        assert row["seed"] in seeds and {name: row[name] for name in versions()} == versions()
    for folder in ("one", "two"):
        assert call("export", tmp_path / folder, "--format", "parquet", "--out", tmp_path / f"{folder}.parquet")[0] == 0
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


def test_the_explorer_shows_the_same_numbers_for_the_same_state():
    pytest.importorskip("dash")
    from curvoscope.explorer.compute import problem
    from curvoscope.explorer.state import State

    found = []
    for _ in range(2):
        torch.rand(3)
        found.append(problem(State()).hessian().dense())  # `problem` keeps nothing; what is kept is made by it
    assert torch.equal(*found)


def test_verify_states_seed_and_versions(call, monkeypatch):
    monkeypatch.setattr(verify, "names", lambda: ["Lemma B.1"])
    monkeypatch.setattr(verify, "examine", lambda seed: iter([THEOREMS["Lemma B.1"].examine(seed)]))
    _, stdout, _ = call("verify", "--seed", "1", "--json")
    document = json.loads(stdout)
    assert (document["seed"], document["versions"]) == (1, versions())
