"""The explorer in a browser: from a move of a slider to all figures drawn anew, and a storm of moves."""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MOVES = 60
STORM = 200
AIM = 150  # milliseconds, 95th percentile

_READY = "#main[data-answered][aria-busy='false']"
_WATCH = """() => {
  window.bench = {start: 0, first: 0, drawn: 0, requests: 0};
  const drawn = () => {
    const bench = window.bench;
    bench.drawn = performance.now();
    if (bench.first < bench.start) bench.first = bench.drawn;
  };
  const every = {attributes: true, characterData: true, childList: true, subtree: true};
  for (const graph of document.querySelectorAll(".graph")) new MutationObserver(drawn).observe(graph, every);
  const send = window.fetch;
  window.fetch = (...given) => { window.bench.requests += 1; return send(...given); };
}"""
_MOVE = """async ([name, value]) => {
  const bench = window.bench, main = document.getElementById("main"), slider = document.getElementById(name);
  const setter = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  const wanted = new RegExp("(^|&)" + name + "=" + value + "(&|$)"), frame = () => new Promise(requestAnimationFrame);
  bench.start = performance.now();
  setter.call(slider, value);
  slider.dispatchEvent(new Event("input", {bubbles: true}));
  while (!wanted.test(main.dataset.answered) || main.getAttribute("aria-busy") !== "false") await frame();
  while (bench.drawn < bench.start || performance.now() - bench.drawn < 100) await frame();
  return [bench.first - bench.start, bench.drawn - bench.start];
}"""
_STORM = """async ([name, values, pause]) => {
  const slider = document.getElementById(name), before = window.bench.requests;
  const setter = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  for (const value of values) {
    setter.call(slider, value);
    slider.dispatchEvent(new Event("input", {bubbles: true}));
    await new Promise((done) => setTimeout(done, pause));
  }
  const main = document.getElementById("main"), start = performance.now();
  const wanted = new RegExp("(^|&)" + name + "=" + values[values.length - 1] + "(&|$)");
  while (!wanted.test(main.dataset.answered) || main.getAttribute("aria-busy") !== "false")
    await new Promise(requestAnimationFrame);
  return {requests: window.bench.requests - before, settled_ms: performance.now() - start};
}"""


def run() -> dict[str, object]:
    """Latencies in milliseconds at d = 16, L = 17, of sliders that change everything on the page."""
    from playwright.sync_api import sync_playwright

    script = Path(sys.executable).with_name("curvoscope")
    command = [str(script), "explore", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("chromium-browser"),
                args=["--no-sandbox", "--disable-gpu"],
            )
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{address}?d=16&L=17")
            page.wait_for_selector(_READY)
            time.sleep(1.0)
            page.evaluate(_WATCH)
            found = {name: _moves(page, name) for name in ("sink", "residual")}
            values = [round(8 * ((i * 37) % 33) / 32, 2) for i in range(STORM - 1)] + [3.75]
            storm = page.evaluate(_STORM, ["sink", values, 5])
            browser.close()
    finally:
        server.terminate()
        server.wait()
    first, last = zip(*(one for latencies in found.values() for one in latencies), strict=True)
    return {
        "aim_ms": AIM,
        "moves": len(last),
        "first_figure_median_ms": statistics.median(first),
        "first_figure_p95_ms": statistics.quantiles(first, n=20)[-1],
        "median_ms": statistics.median(last),
        "p95_ms": statistics.quantiles(last, n=20)[-1],
        "by_slider_median_ms": {name: statistics.median(one[1] for one in ones) for name, ones in found.items()},
        "storm_moves": STORM,
        "storm_requests": storm["requests"],
        "storm_settled_ms": storm["settled_ms"],
        "load_average": os.getloadavg()[0],
        "processors": os.cpu_count(),
    }


def _moves(page: Any, name: str) -> list[tuple[float, float]]:
    """Moves to values never seen before: milliseconds to the first figure drawn anew, and to the last."""
    low, high = float(page.get_attribute(f"#{name}", "min")), float(page.get_attribute(f"#{name}", "max"))
    step = float(page.get_attribute(f"#{name}", "step"))
    places = [low + step * i for i in range(1, round((high - low) / step))]
    return [page.evaluate(_MOVE, [name, f"{places[(7 * i) % len(places)]:g}"]) for i in range(MOVES // 2)]
