import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from curvoscope.commands import explore
from curvoscope.report.contents import ReportError
from curvoscope.training import RunStore
from report_cases import Page, run_of, training_records

pytest.importorskip("dash", reason="the explorer needs dash")


def start(*arguments):
    """`curvoscope explore` in a process of its own, and the first line that it prints."""
    script = Path(sys.executable).with_name("curvoscope")
    process = subprocess.Popen(
        [str(script), "explore", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's & ignores it
    )
    return process, process.stdout.readline().strip()


def stop(process):
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    return process.returncode, errors


def test_serves_on_loopback_until_interrupted():
    process, address = start("--port", "0")
    try:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address) as answer:
            assert answer.status == 200
        foreign = urllib.request.Request(address, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(foreign)
        assert refused.value.code == 403
    finally:
        code, errors = stop(process)
    assert code == 0
    assert errors == ""


def test_a_host_warns_and_needs_the_token_of_its_link():
    process, address = start("--port", "0", "--host", "127.0.0.1")
    try:
        plain, token = address.split("?token=")
        assert len(token) >= 32
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(plain)
        assert refused.value.code == 403
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(address) as answer:
            assert answer.status == 200
            assert token not in answer.url
    finally:
        _, errors = stop(process)
    assert errors.startswith("warning: 127.0.0.1 is reachable from other machines")


def test_bad_ports_and_hosts_are_one_line(call):
    code, out, err = call("explore", "--port", 70000)
    assert (code, out) == (2, "")
    assert err.strip() == "error: port: got 70000, expected 0 to 65535"
    code, _, err = call("explore", "--host", "203.0.113.9")
    assert code == 2
    assert err.startswith("error: host: cannot listen on 203.0.113.9")


def test_without_dash_the_error_names_the_extra(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "dash", None)
    for name in [name for name in sys.modules if name.startswith("curvoscope.explorer")]:
        monkeypatch.delitem(sys.modules, name)
    code, _, err = call("explore")
    assert code == 2
    assert "needs dash: pip install 'curvoscope[explore]'" in err


class TestRuns:
    """`curvoscope explore RUN...`: the page of finished runs."""

    def test_the_page_of_one_run_is_its_report(self, call, tmp_path):
        out, _ = run_of("watch", tmp_path / "run")
        code, said, _ = call("explore", out, "--output", tmp_path / "page.html")
        assert (code, said) == (0, f"wrote {tmp_path / 'page.html'}\n")
        assert (tmp_path / "page.html").read_bytes() == (out / "report.html").read_bytes()

    def test_two_runs_are_labelled_by_their_directories(self, call, tmp_path):
        for name in ("before", "after"):
            run_of("watch", tmp_path / name)
        code, _, _ = call("explore", tmp_path / "before", tmp_path / "after", "--output", tmp_path / "page.html")
        page = Page((tmp_path / "page.html").read_text())
        assert code == 0 and "before and after, side by side" in page.text
        assert [cell[0] for cell in page.tables[0]["rows"][0]] == ["block", "part", "before", "after", "after / before"]

    @pytest.mark.slow
    def test_documents_in_one_directory_stand_side_by_side(self, tmp_path):
        run_of("some blocks", tmp_path)
        run_of("spectrum", tmp_path)
        report = explore.report_of_runs([tmp_path])
        assert [view.label for view in report.views] == [
            f"{tmp_path.name}/{name}" for name in ("table.json", "spectrum.json")
        ]

    def test_equal_names_are_told_apart_by_their_paths(self, tmp_path):
        paths = [run_of("watch", tmp_path / name / "run")[0] for name in "ab"]
        labels = [view.label for view in explore.report_of_runs(paths).views]
        assert labels == [str(path / "watch.json") for path in paths]

    def test_a_run_given_twice(self, tmp_path):
        out, _ = run_of("watch", tmp_path / "run")
        with pytest.raises(ReportError, match=r"^RUN: .*watch.json was given twice; give each run once"):
            explore.report_of_runs([out, out])

    def test_a_training_run_that_was_killed(self, undrawn, tmp_path):
        with RunStore(tmp_path / "store.sqlite") as store:
            run = store.run("run 1", {"configuration": {"steps": 9, "optimizer": "adam"}, "versions": {"torch": "2"}})
            for record in training_records():
                run.add(record)
        before = sorted(tmp_path.iterdir())
        assert "did not finish" in explore.report_of_runs([tmp_path]).about[0]
        assert sorted(tmp_path.iterdir()) == before

    def test_a_page_is_written_without_dash(self, call, monkeypatch, tmp_path):
        out, _ = run_of("watch", tmp_path / "run")
        monkeypatch.setitem(sys.modules, "dash", None)
        for name in [name for name in sys.modules if name.startswith("curvoscope.explorer")]:
            monkeypatch.delitem(sys.modules, name)
        assert call("explore", out, "--output", tmp_path / "page.html")[0] == 0
        code, _, err = call("explore", out)
        assert code == 2 and "pip install 'curvoscope[explore]', or write the page with --output FILE" in err
