import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

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
