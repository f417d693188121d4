"""What the tests of pages share: where Chromium is, what axe-core finds wrong, whether a page is wider than its window.

The fixture ``browser`` (a Playwright ``Browser``) is in conftest.py.
"""

import shutil
import sys
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_FLAGS = ("--no-sandbox", "--disable-gpu")
AXE = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
PATIENCE = 300_000  # milliseconds: no machine is that busy
WIDTHS = {"wide": 1440, "narrow": 390}


def serious_violations(page):
    """What axe-core calls serious or critical on ``page``: a line an element. Skips the test without axe-core."""
    if not AXE.is_file():
        pytest.skip(f"axe-core is not installed in {AXE.parent.parent.name}: npm install axe-core")
    page.evaluate(AXE.read_text())  # not add_script_tag: a page may forbid inline scripts
    # without preloading: axe would ask for the style sheets, which a page from disk is not allowed to
    found = page.evaluate(
        "async () => (await axe.run(document, {resultTypes: ['violations'], preload: false})).violations"
    )
    return [
        f"{violation['id']} ({violation['impact']}): {node['html'][:160]} | {node.get('failureSummary', '')[:300]}"
        for violation in found
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def overflow(page):
    """By how many pixels the page is wider than its window: 0 where nothing needs scrolling sideways."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def cut_off(page):
    """The tables and figures that need scrolling sideways."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".wide, .scroll")]
            .filter((one) => one.getClientRects().length && one.scrollWidth > one.clientWidth + 1)
            .map((one) => `${one.getAttribute("aria-label")}: ${one.scrollWidth} > ${one.clientWidth}`)"""
    )


class Traffic:
    """Records what a page says and asks for: ``problems`` of the console, ``requests`` that left the disk, all aborted.

    ``allowed``: beginnings of addresses that may pass, as the address of a server on loopback.
    """

    def __init__(self, page, allowed=("file:", "data:", "blob:")):
        self.problems, self.requests = [], []
        page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", self._dismiss)

        def pass_or_stop(route):
            if route.request.url.startswith(tuple(allowed)):
                route.continue_()
            else:
                self.requests.append(route.request.url)
                route.abort()

        page.route("**/*", pass_or_stop)

    def _dismiss(self, dialog):
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()
