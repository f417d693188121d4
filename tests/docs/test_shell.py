"""What surrounds the code: workflows, forms and citation fit their schemas, and commands and paths in prose exist."""

import itertools
import re
import shutil
import subprocess
import tomllib

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

import curvoscope
from fences import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(set((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"})
PROSE = ("README.md", "CONTRIBUTING.md", "AGENTS.md", ".github/PULL_REQUEST_TEMPLATE.md", ".pre-commit-config.yaml")
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.dependabot": [ROOT / ".github/dependabot.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def validate(schema, *files):
    """Run check-jsonschema with a schema that it brings along: no network."""
    options = ["--builtin-schema", schema, "--force-filetype", "yaml"]
    return CliRunner().invoke(check_jsonschema.main, [*options, *map(str, files)])


def jobs():
    return [job for file in WORKFLOWS for job in yaml.safe_load(file.read_text())["jobs"].values()]


def cells(job):
    """The values of the matrix of a job, one dict per run."""
    return job.get("strategy", {}).get("matrix", {}).get("include", [{}])


def commands(job):
    """Every shell command of a job, with the values of its matrix filled in."""
    for cell, step in itertools.product(cells(job), job["steps"]):
        yield re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found, cell=cell: cell[found[1]], step.get("run", ""))


def makefile_targets():
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_fits_its_schema(schema):
    assert SCHEMAS[schema]
    done = validate(schema, *SCHEMAS[schema])
    assert done.exit_code == 0, done.output


def test_a_file_that_does_not_fit_is_seen(tmp_path):
    file = tmp_path / "broken.yml"
    file.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "runs-at:"))
    done = validate("vendor.github-workflows", file)
    assert done.exit_code == 1 and "runs-at" in done.output


def test_make_targets_in_prose_and_scripts_exist():
    named = {(page, name) for page in PROSE for name in re.findall(r"(?:`|^ {4})make ([a-z][\w-]*)", read(page), re.M)}
    named |= {(".ci/run", name) for name in re.findall(r"^make ([\w-]+)", read(".ci/run"), re.MULTILINE)}
    run = "\n".join(command for job in jobs() for command in commands(job))
    named |= {("workflows", name) for name in re.findall(r"\bmake ([\w-]+)", run)}
    assert {page for page, _ in named} >= {"README.md", "CONTRIBUTING.md", "AGENTS.md", ".ci/run", "workflows"}
    targets = makefile_targets()
    assert {(page, name) for page, name in named if name not in targets} == set()


def test_every_target_without_a_file_is_phony():
    phony = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)[1].split()
    assert set(phony) == makefile_targets()


def test_paths_in_agents_exist():
    made = {".venv", "dist", "docs/_build/html"}
    quoted = re.findall(r"`([^`\s]+)`", read("AGENTS.md"))
    paths = {word for word in quoted if "/" in word or re.search(r"\.(md|txt|toml|py)$", word)}
    assert len(paths) > 20
    assert sorted(path for path in paths - made if not (ROOT / path).exists()) == []


def test_agents_is_one_page():
    assert len(read("AGENTS.md").splitlines()) <= 70


def test_workflows_ask_for_little():
    for file in WORKFLOWS:
        assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}, file
    tokens = [job for job in jobs() if "permissions" in job]
    assert [job["permissions"] for job in tokens] == [{"id-token": "write"}]
    assert tokens[0]["environment"] == "pypi" and not any(commands(tokens[0]))


def test_workflows_install_through_the_makefile_only():
    assert not [command for job in jobs() for command in commands(job) if re.search(r"\b(pip|uv|conda)\b", command)]


def test_the_tests_run_on_every_python_that_is_promised():
    promised = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    quick = {cell["python"] for job in jobs() for cell in cells(job) if cell.get("target") in ("test", "coverage")}
    assert promised == quick and f">={min(promised)}" == PROJECT["requires-python"]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == curvoscope.__version__ and citation["license"] == PROJECT["license"]
    assert f"## {citation['version']} - {citation['date-released']}" in read("CHANGELOG.md")
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_what_the_tests_need_is_pinned():
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in read("constraints.txt").splitlines()}
    extras = itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    needed = {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in extras}
    assert needed | {"setuptools"} <= pins


@pytest.mark.parametrize(("user", "chromium", "installs"), [(1000, False, False), (0, False, True), (0, True, False)])
def test_make_calls_apt_only_if_it_must_and_says_what_is_skipped(user, chromium, installs, tmp_path):
    programs, venv, called = tmp_path / "bin", tmp_path / "venv", tmp_path / "called"
    programs.mkdir()
    (venv / "bin").mkdir(parents=True)
    for name in ("sh", "test", "touch", "make"):
        (programs / name).symlink_to(shutil.which(name))
    scripts = {"id": f"echo {user}", "apt-get": f"touch {called}", "npm": "exit 1", "python": ""}
    for name, body in (scripts | ({"chromium": ""} if chromium else {})).items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    (venv / "bin/python").symlink_to(programs / "python")
    installed = []
    for stamp in (venv / "ready", venv / "dev"):
        stamp.touch()
        installed += ["-o", str(stamp)]
    command = [str(programs / "make"), "-C", str(ROOT), f"VENV={venv}", "SHELL=/bin/sh", *installed, "test"]
    done = subprocess.run(command, env={"PATH": str(programs)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert called.exists() == installs
    skipped = re.findall(r"^Skipped without ([\w-]+)", done.stdout, re.MULTILINE)
    assert skipped == ["Chromium"] * (not chromium) + ["axe-core", "MathJax"]


def read(path):
    return (ROOT / path).read_text()
