"""The site is built without a warning, and its formulas are there without a network."""

import os
import shutil
import subprocess
import sys

import pytest

from browser_cases import PATIENCE, WIDTHS, Traffic, overflow, serious_violations
from fences import ROOT

MATHJAX = ROOT / ".venv/share/mathjax/node_modules/mathjax/es5/tex-svg-full.js"
PAGES = (
    "index",
    "tutorial",
    "bounds",
    "theory/attention",
    "theory/errata",
    "reference/exact",
    "gallery/index",
    "examples/index",
    "changes",
    "migrating",
    "notebooks/index",
    "notebooks/1_attention_hessian",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built from a copy: the pages of the examples are written beside the pages' sources."""
    pytest.importorskip("sphinx_gallery")
    if not MATHJAX.is_file():
        pytest.skip("MathJax is not there: `make docs` fetches it")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("_build", "examples", "notebooks"))
    for name in ("examples", "notebooks"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "CHANGELOG.md", folder)
    flags = ["-W", "--keep-going", "-q", "-b", "html", "-D", "plot_gallery=0"]  # the examples have tests of their own
    command = [sys.executable, "-m", "sphinx", *flags, "docs", "html"]
    environment = os.environ | {"MATHJAX": str(MATHJAX), "MPLBACKEND": "agg"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_formulas_are_drawn_without_a_network(site, browser):
    context = browser.new_context(offline=True, viewport={"width": WIDTHS["narrow"], "height": 844})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    traffic = Traffic(page)
    formulas = 0
    for name in PAGES:
        page.goto((site / f"{name}.html").as_uri())
        page.evaluate("window.MathJax && MathJax.startup.promise.then(() => true)")
        written, drawn, failed = page.evaluate(
            "['.math', 'mjx-container svg', '[data-mjx-error]'].map(s => document.querySelectorAll(s).length)"
        )
        assert written == drawn and failed == 0, name
        assert overflow(page) == 0, f"{name} is wider than a telephone"
        formulas += drawn
    context.close()
    assert formulas > 200
    assert not traffic.problems and not traffic.requests


@pytest.mark.parametrize(("width", "scheme"), [("narrow", "light"), ("wide", "dark")])
def test_every_page_is_accessible_and_quiet(site, browser, width, scheme):
    """Nothing serious for axe-core, no message in the console, nothing from the network, no sideways scrolling."""
    context = browser.new_context(viewport={"width": WIDTHS[width], "height": 844}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    traffic = Traffic(page)
    names = sorted(path.relative_to(site) for path in site.rglob("*.html") if "_modules" not in path.parts)
    assert set(PAGES) <= {name.with_suffix("").as_posix() for name in names}
    for name in names:
        page.goto((site / name).as_uri())
        assert serious_violations(page) == [], name
        assert overflow(page) == 0, name
        assert not traffic.problems and not traffic.requests, name
    context.close()


def test_the_search_finds_a_page_without_a_network(site, browser):
    context = browser.new_context(offline=True)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    traffic = Traffic(page)
    page.goto((site / "search.html").as_uri() + "?q=sensitivity")
    page.wait_for_selector('#search-results a[href*="howto/sensitivity.html"]')  # results come one by one
    assert not traffic.requests
    context.close()
