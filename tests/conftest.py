import gc
import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking nested autodiff takes longer than it saves
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("default")


def pytest_collection_finish():
    """Keep the garbage collector from what was imported, which stays, and let it look for cycles less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture
def call(monkeypatch, capfd):
    """Run the entry point in this process: exit code, stdout and stderr."""
    from curvoscope import cli  # here: the plugin that checks annotations must come before the package

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["curvoscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capfd.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return run


DOTS = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"/>'}


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not rendered, which takes longer than all else that a command does: every file is a dot."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, format, **_: file.write(DOTS[format]))


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium that Playwright drives; skipped where one of the two is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the tests of pages need playwright")
    from browser_cases import CHROMIUM, CHROMIUM_FLAGS, PATIENCE

    if CHROMIUM is None:
        pytest.skip("the tests of pages need the program chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS), timeout=PATIENCE)
        yield started
        started.close()
