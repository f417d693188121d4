import json
import os
import subprocess
import sys
import types
from importlib.metadata import version

import pytest
import torch
from PIL import Image

import curvoscope as cv
from curvoscope import commands
from curvoscope.papers.experiments import NAMES
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import addition, answer_targets

SMALL = ["--d", "4", "--sequences", "3", "--seed", "5"]
FIGURES = ["norms", "pairs", "histograms", "hessian", "densities", "depth"]
SHOWN = [*(f"{name}.png" for name in FIGURES), "report.html", "report.md", "table.json"]
WRITTEN = sorted([*SHOWN, *(f"{name}.svg" for name in FIGURES)])


def files(directory):
    return sorted(path.name for path in directory.iterdir())


def installed(*arguments, cwd):
    """In a process of its own."""
    command = [sys.executable, "-m", "curvoscope", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_analyze_prints_the_table_the_sentence_and_the_files(tmp_path):
    done = installed("analyze", *SMALL, cwd=tmp_path)
    stdout, out = done.stdout, tmp_path / "curvoscope-analyze"
    assert done.returncode == 0 and done.stderr == ""
    assert files(out) == WRITTEN
    assert stdout.splitlines()[-9:] == [f"wrote {out.name}/{name}" for name in SHOWN]
    table = json.loads((out / "table.json").read_text())
    assert table["verdict"] in " ".join(stdout.split())
    matrices = {f"h.0.{name}" for name in ("attn.Q", "attn.K", "attn.V", "attn.O", "mlp.up", "mlp.down")}
    for row in table["rows"]:
        assert f"{row['frobenius_norm']['value']:.2e}" in stdout or row["frobenius_norm"]["value"] == 0
    for row in table["dense"]:
        if {row["row"], row["column"]} <= matrices:
            assert f"{row['frobenius_norm']:.2e}" in stdout or row["frobenius_norm"] == 0
    for name in ("hessian.png", "histograms.png"):
        with Image.open(out / name) as image:
            image.load()
            assert min(image.size) >= 1000


@pytest.mark.parametrize(
    ("norm", "attention", "dtype"),
    [("none", "softmax", "float64"), ("pre", "linear", "float32")],
)
@pytest.mark.slow
def test_json_is_the_file_and_the_only_thing_on_stdout(call, undrawn, tmp_path, norm, attention, dtype):
    options = [*SMALL, "--norm", norm, "--attention", attention, "--dtype", dtype]
    code, stdout, stderr = call("analyze", *options, "--out", tmp_path, "--json")
    assert code == 0 and stderr == ""
    assert stdout == (tmp_path / "table.json").read_text()
    document = json.loads(stdout)
    expected = {"seed": 5, "d": 4, "sequences": 3, "norm": norm, "attention": attention, "dtype": dtype}
    assert document["configuration"] == expected | {"method": "auto", "split": "model"} and document["seed"] == 5
    assert document["versions"]["torch"] == torch.__version__
    assert document["versions"]["curvoscope"] == version("curvoscope")
    assert document["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")

    tokens = addition(3, seed=5)
    inputs, targets = tokens[:, :-1], answer_targets(tokens)
    model = GPT2(4, norm=norm, activation=attention, seed=5, dtype=getattr(torch, dtype))
    H = cv.hessian(model, cv.curvature.CrossEntropy(), [(inputs, targets)], method="autodiff")
    compared = set()
    for row in document["dense"]:
        if {row["row"], row["column"]} <= set(H.names):
            expected = getattr(H, row["part"])[row["row"], row["column"]].dense()
            size = 1e-9 if dtype == "float64" else 1e-3
            whole = float(H.total[row["row"]].dense().norm() * H.total[row["column"]].dense().norm()) ** 0.5
            assert abs(row["frobenius_norm"] - float(expected.norm())) <= size * whole
            compared |= {row["row"], row["column"]}
    assert len(compared) == 8  # norms are two blocks there, gamma and beta, and one here
    assert document["verdict"].startswith("The query block is")

    repeated = document["command"].split()
    assert repeated[0] == "curvoscope"
    assert call(*repeated[1:], "--out", tmp_path / "again", "--json")[1] == stdout


@pytest.mark.slow
def test_seeds_differ(call, undrawn, tmp_path):
    documents = [json.loads(call("analyze", *SMALL, "--seed", seed, "--out", tmp_path, "--json")[1]) for seed in (1, 2)]
    assert documents[0]["dense"][0]["trace"] != documents[1]["dense"][0]["trace"]
    assert files(tmp_path) == WRITTEN


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("d", "0"),
        ("d", "four"),
        ("sequences", "-1"),
        ("seed", "-1"),
        ("seed", str(2**32)),
        ("norm", "post"),
        ("attention", "relu"),
        ("dtype", "int64"),
    ],
)
def test_bad_options_are_named(call, tmp_path, option, value):
    code, stdout, stderr = call("analyze", f"--{option}", value, "--out", tmp_path, "--json")
    assert code == 2 and stdout == ""
    assert f"'--{option}'" in stderr or stderr.startswith(f"error: {option}: got {value}")
    assert "Traceback" not in stderr
    assert files(tmp_path) == []


@pytest.mark.parametrize("command", [["analyze"], ["spectrum"], ["audit"], ["sensitivity", "--recipe", "int8"]])
def test_all_commands_on_a_model_take_the_options_of_its_data(call, tmp_path, command):
    code, out, err = call(*command, "addition", *SMALL, "--targets", "random", "--out", tmp_path / "run")
    assert code == 2 and out == "" and err.startswith("error: targets: ")


def test_an_error_of_the_package_is_one_line(call, tmp_path):
    code, _, stderr = call("analyze", "--d", "0", "--out", tmp_path)
    assert code == 2 and stderr == "error: d: got 0, expected at least 1\n"


def test_a_hessian_too_large_to_draw_is_refused_before_the_work(call, tmp_path):
    code, _, stderr = call("analyze", "--d", 10_000, "--out", tmp_path)
    assert code == 2 and "1200000000 x 1200000000 Hessian needs" in stderr and "smaller --d" in stderr


def test_a_place_that_cannot_be_written_to(call, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for out in (blocked, blocked / "below"):
        code, stdout, stderr = call("analyze", *SMALL, "--out", out)
        assert code == 2 and stdout == ""
        assert stderr.startswith("error: out: cannot make the directory") and str(out) in stderr
    assert blocked.read_text() == "in the way"


def test_a_directory_without_permission(call, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    code, _, stderr = call("analyze", *SMALL, "--out", tmp_path)
    assert code == 2 and f"error: out: cannot write into {tmp_path}: permission denied" in stderr
    assert files(tmp_path) == []


def test_files_are_whole_or_as_before(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    commands.write(path, b"old")
    (tmp_path / "hessian.png").mkdir()
    with pytest.raises(commands.OutputError, match=r"^out: cannot write"):
        commands.write(tmp_path / "hessian.png", b"cannot replace a directory")
    seen = []
    replace = type(path).replace

    def watched(self, target):
        seen.append((target.read_bytes(), self.read_bytes(), self.parent == target.parent))
        return replace(self, target)

    monkeypatch.setattr(type(path), "replace", watched)
    commands.write(path, b"new")
    assert seen == [(b"old", b"new", True)] and path.read_bytes() == b"new"
    assert files(tmp_path) == ["hessian.png", "table.json"]


@pytest.mark.parametrize("code", [0, 1])
def test_verify_passes_its_options_and_its_exit_code_on(call, monkeypatch, code):
    asked = []

    def run(seed, as_json):
        asked.append((seed, as_json))
        return code

    fake = types.ModuleType("curvoscope.commands.verify")
    fake.run = run
    monkeypatch.setitem(sys.modules, "curvoscope.commands.verify", fake)
    monkeypatch.setattr(commands, "verify", fake, raising=False)
    assert call("verify", "--seed", "3", "--json")[0] == code
    assert call("verify")[0] == code
    assert asked == [(3, True), (0, False)]


def test_interrupted_quietly(call, monkeypatch, tmp_path):
    from curvoscope.commands import analyze

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(analyze, "hessian", interrupted)
    assert call("analyze", "--out", tmp_path) == (130, "", "")


def test_version_and_help(call):
    assert call("--version") == (0, f"curvoscope {version('curvoscope')}\n", "")
    code, stdout, _ = call("analyze", "--help")
    assert code == 0
    shared = ("seed", "sequences", "dtype", "out", "json", "blocks", "text", "length", "matvecs")
    for name in (*shared, "d", "norm", "attention", "method", "split", "tolerance"):
        assert f"--{name}" in stdout
    code, stdout, _ = call("spectrum", "--help")
    assert code == 0 and all(f"--{name}" in stdout for name in shared)


def test_the_help_of_reproduce_names_every_figure(call):
    code, stdout, _ = call("reproduce", "--help")
    words = stdout.replace(",", " ").split()
    assert code == 0 and {"all", *NAMES} <= set(words) and "fig2" not in words


def test_help_needs_no_heavy_import():
    script = (
        "import sys; from typer.testing import CliRunner; from curvoscope.cli import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "assert not {'matplotlib', 'transformers', 'curvoscope.report', 'curvoscope.papers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_exit_code_of_a_process(tmp_path):
    done = installed("analyze", "--d", "0", "--json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: d:")
