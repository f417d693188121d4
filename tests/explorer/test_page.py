"""The page in a browser."""

import csv
import io
import json
import random
import urllib.request
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest

pytest.importorskip("dash", reason="the explorer needs dash")

from browser_cases import PATIENCE, WIDTHS, Traffic, overflow, serious_violations
from curvoscope.explorer import matrix_figures, tour
from curvoscope.explorer.compute import curves, matrices, spectra
from curvoscope.explorer.layout import CONTROLS
from curvoscope.explorer.state import State, from_link

SMALL = State(L=5, d=4, d_k=3)
FIGURES = ("attention", "hessian", "eigenvalues", "outer", "functional", "growth", "scalar")


class Explorer:
    """A page of the explorer, and what a user does there."""

    def __init__(self, browser, address, query="", **options):
        self.page = browser.new_page(viewport={"width": WIDTHS["wide"], "height": 900}, **options)
        self.page.set_default_timeout(PATIENCE)
        self.traffic = Traffic(self.page, allowed=(address, "data:", "blob:"))
        self.page.goto(f"{address}?{query}")
        self.settle()

    def settle(self, **fields):
        """Wait until the address has these fields, and what is shown is what it says."""
        self.page.wait_for_function(
            """(fields) => {
                const main = document.getElementById("main"), link = new URLSearchParams(window.location.search);
                return main && main.getAttribute("aria-busy") === "false"
                    && "?" + main.dataset.answered === window.location.search
                    && Object.entries(fields).every(([name, value]) => link.get(name) === String(value));
            }""",
            arg=fields,
        )

    @staticmethod
    def fields(state):
        """As JavaScript writes them."""
        return {name: str(value).removesuffix(".0") for name, value in state.model_dump().items()}

    def move(self, name, place):
        """Put a slider or a number to a place, as dragging it does."""
        self.page.evaluate(
            """([name, place]) => {
                const field = document.getElementById(name);
                Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, place);
                field.dispatchEvent(new Event("input", {bubbles: true}));
            }""",
            [name, str(place)],
        )

    @property
    def state(self):
        state, problems = from_link(urlsplit(self.page.url).query)
        assert not problems
        return state

    def numbers(self):
        """All numbers on the page that carry their digits."""
        found = self.page.eval_on_selector_all(
            "[data-number]", "all => all.map((one) => [one.dataset.number, one.title, one.textContent])"
        )
        assert all(text == f"{float(digits):.4g}" for _, digits, text in found)
        return {name: float(digits) for name, digits, _ in found}

    def drawn(self, name):
        """The data of a figure."""
        return self.page.evaluate(
            "name => JSON.parse(JSON.stringify(document.querySelector(`#graph-${name} .js-plotly-plot`).data))", name
        )

    def saved(self, name):
        """The layout of a figure, of which its saved picture is made."""
        return self.page.evaluate(
            "name => JSON.parse(JSON.stringify(document.querySelector(`#graph-${name} .js-plotly-plot`).layout))", name
        )


@pytest.fixture(scope="module")
def explorer(browser, address):
    found = Explorer(browser, address, SMALL.query())
    yield found
    assert found.traffic.problems == []
    assert found.traffic.requests == []
    found.page.close()


@pytest.fixture(autouse=True)
def back_to_small(request):
    """Every test on the shared page begins with the small state."""
    if "explorer" in request.fixturenames:
        explorer = request.getfixturevalue("explorer")
        if explorer.state != SMALL:
            explorer.page.click("#reset")
            explorer.settle(**Explorer.fields(State()))
            for name in ("L", "d", "d_k"):
                explorer.move(name, getattr(SMALL, name))
            explorer.settle(**Explorer.fields(SMALL))


def assert_shows(explorer, state):
    """The numbers of the page, and those inside its figures, are the API's."""
    assert explorer.state == state
    found = matrices(state)
    more = spectra(found)
    shown = explorer.numbers()
    for key, norm in found.norms.items():
        assert shown["norm-" + "-".join(key)] == norm
    assert shown["smallest"] == more.eigenvalues[0] and shown["largest"] == more.eigenvalues[-1]
    assert shown["scalar-bulk"] == more.scalar.bulk
    assert explorer.drawn("eigenvalues")[0]["customdata"] == more.eigenvalues[::-1].tolist()
    assert [y or 0 for y in explorer.drawn("growth")[0]["y"]] == curves(found).growth[0].tolist()
    if state.heads == 1:
        np.testing.assert_array_equal(explorer.drawn("attention")[0]["z"], found.attention[0])
    for name, writes in matrix_figures.fill(found).items():
        if name != "attention":
            shown_picture = explorer.page.locator(f"#graph-{name} .imagelayer image").get_attribute("href")
            assert shown_picture == explorer.saved(name)["images"][0]["source"] == writes["layout.images.0.source"]


MOVES = {
    "L": (7, 7),
    "d": (5, 5),
    "d_k": (9, 9),
    "heads": (2, 2),
    "sigma": (0.5, 3.162),
    "temperature": (-0.5, 0.3162),
    "sink": (2.25, 2.25),
    "skip": (0.35, 0.35),
    "residual": (0.5, 0.5),
    "seed": (12, 12),
}
CHOICES = {"attention": "linear", "mask": "none", "norm": "pre", "loss": "ce"}


def test_every_control_moves_every_figure_is_drawn_and_the_numbers_are_right(explorer):
    assert {*MOVES, *CHOICES} == {control.name for control in CONTROLS}
    state = SMALL
    for name, (place, value) in MOVES.items():
        explorer.move(name, place)
        explorer.settle(**{name: value})
        state = State(**{**state.model_dump(), name: value})
        assert_shows(explorer, state)
    for name, word in CHOICES.items():
        explorer.page.select_option(f"#{name}", word)
        explorer.settle(**{name: word})
        state = State(**{**state.model_dump(), name: word})
        assert_shows(explorer, state)
    for name in FIGURES:
        box = explorer.page.locator(f"#graph-{name} .main-svg").first.bounding_box()
        assert box["width"] > 150 and box["height"] > 150
        kind = "image" if name in ("attention", "hessian", "outer", "functional") else "path.js-line"
        assert explorer.page.locator(f"#graph-{name} {kind}").count() >= 1
    explorer.page.click("#reset")
    explorer.settle(**Explorer.fields(State()))


@pytest.mark.slow
def test_a_link_restores_the_state_also_between_the_steps_of_a_slider(browser, address):
    state = State(L=6, d=3, d_k=8, sigma=0.12345, temperature=1.7, mask="none", residual=0.333, seed=5)
    explorer = Explorer(browser, address, state.query())
    assert_shows(explorer, state)
    assert explorer.page.text_content("#sigma-value") == "0.12345"
    assert explorer.page.input_value("#mask") == "none"
    assert explorer.drawn("eigenvalues")[2]["visible"] is True  # d_k >= 2 d: the bulk
    explorer.move("L", 7)
    explorer.settle(L=7)
    assert explorer.state == State(**{**state.model_dump(), "L": 7})
    assert explorer.traffic.problems == []
    explorer.page.close()


def test_bad_links_get_a_message_and_scripts_stay_text(browser, address):
    script = "%3Cscript%3Ealert(1)%3C/script%3E"
    explorer = Explorer(browser, address, f"L=999&d=abc&sigma=nan&{script}=1&loss={script}&d_k=3&L=5")
    message = explorer.page.text_content("#link-message")
    assert "d: got abc, expected a whole number from 2 to 32; 16 is used instead" in message
    assert "sigma: got nan, expected a number from 0.01 to 10; 1.0 is used instead" in message
    assert "loss: got <script>alert(1)</script>, expected mse or ce" in message
    assert "<script>alert(1)</script>: there is no such setting" in message
    assert explorer.page.locator("#link-message script").count() == 0
    assert explorer.state == State(d_k=3, L=5)
    assert explorer.traffic.problems == []
    explorer.page.close()


@pytest.mark.slow
def test_a_state_that_is_too_large_keeps_the_figures_and_says_so(explorer):
    before = explorer.numbers()
    explorer.move("d", 32)
    explorer.move("d_k", 64)
    explorer.settle(d=32, d_k=64)
    assert "= 5120 weights are more than 1536" in explorer.page.text_content("#message")
    assert "lower d, d_k or the number of heads" in explorer.page.text_content("#message")
    assert explorer.numbers().keys() == before.keys()
    explorer.move("seed", 123456)
    explorer.settle(seed=123456)
    assert "seed: got 123456, expected a whole number from 0 to 9999" in explorer.page.text_content("#message")
    explorer.page.click("#reset")
    explorer.settle(**Explorer.fields(State()))
    assert explorer.page.text_content("#message") == ""


@pytest.mark.slow
def test_a_storm_of_moves_ends_in_the_right_state_without_a_queue(explorer):
    requests, under_way, most = [], set(), 0

    def started(request):
        nonlocal most
        if "/answer/" in request.url:
            requests.append(request)
            under_way.add(request)
            most = max(most, len(under_way))

    explorer.page.on("request", started)
    explorer.page.on("requestfinished", lambda request: under_way.discard(request))
    explorer.page.evaluate(
        """async () => {
            const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
            for (let i = 0; i < 200; i++) {
                const field = document.getElementById(["sink", "L", "residual"][i % 3]);
                const place = [String((i % 29) / 4), String(2 + (i % 9)), String((i % 20) / 20)][i % 3];
                set.call(field, place);
                field.dispatchEvent(new Event("input", {bubbles: true}));
                await new Promise((done) => setTimeout(done, 2));
            }
        }"""
    )
    last = State(d=4, d_k=3, L=2 + 199 % 9, sink=(198 % 29) / 4, residual=(197 % 20) / 20)
    explorer.settle(**Explorer.fields(last))
    assert_shows(explorer, last)
    assert most <= 3  # the parts of one answer
    assert 3 <= len(requests) < 200
    assert not under_way


@pytest.mark.slow
def test_random_interactions_end_in_the_state_of_the_address(explorer):
    draw = random.Random(0)
    words = {name: [word, getattr(SMALL, name)] for name, word in CHOICES.items()}
    for _ in range(50):
        name = draw.choice([*MOVES, *CHOICES, "tour", "reset", "window"])
        if name in MOVES:
            explorer.move(name, MOVES[name][0])
        elif name in CHOICES:
            explorer.page.select_option(f"#{name}", draw.choice(words[name]))
        elif name == "window":
            explorer.page.set_viewport_size({"width": draw.choice([*WIDTHS.values(), 1920]), "height": 900})
        else:
            explorer.page.click("#reset" if name == "reset" else "#tour-next")
        if draw.random() < 0.3:  # the others come before the answer
            explorer.settle()
    explorer.page.set_viewport_size({"width": WIDTHS["wide"], "height": 900})
    explorer.settle()
    state = explorer.state
    for control in CHOICES:
        assert explorer.page.input_value(f"#{control}") == getattr(state, control)
    assert explorer.page.text_content("#message") == ""
    assert_shows(explorer, state)


@pytest.mark.slow
def test_the_tour_sets_its_states_and_says_what_to_see(browser, address):
    explorer = Explorer(browser, address, SMALL.query())  # a page of its own: on another the tour may have begun
    for number, step in enumerate(tour.STEPS, 1):
        explorer.page.click("#tour-next")
        explorer.settle(**Explorer.fields(step.state))
        assert explorer.page.text_content("#tour-title") == f"Step {number} of 6: {step.title}"
        assert explorer.page.text_content("#tour-text") == step.text
        assert explorer.page.locator(".looked-at").get_attribute("id") == f"figure-{step.figure}"
    explorer.page.click("#tour-back")
    explorer.settle(**Explorer.fields(tour.STEPS[4].state))
    assert explorer.traffic.problems == []
    explorer.page.close()


def test_the_csv_is_the_table_and_the_png_a_picture(explorer):
    for link in explorer.page.locator("a[data-csv]").all():
        assert dict(parse_qsl(urlsplit(link.get_attribute("href")).query)) == Explorer.fields(SMALL)
    with explorer.page.expect_download() as download:
        explorer.page.click("a[data-csv=norms]")
    assert download.value.suggested_filename == "curvoscope-norms.csv"
    _, *rows = csv.reader(io.StringIO(download.value.path().read_text()))
    shown = explorer.numbers()
    assert len(rows) == 18
    assert all(float(row[3]) == shown["norm-" + "-".join(row[:3])] for row in rows)
    for name in FIGURES:
        with explorer.page.expect_download() as download:
            explorer.page.click(f"button[data-png={name}]")
        assert download.value.suggested_filename == f"curvoscope-{name}.png"
        content = download.value.path().read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 5000


def test_a_slider_answers_the_keyboard_and_says_its_value(explorer):
    explorer.page.focus("#sigma")
    explorer.page.keyboard.press("ArrowRight")
    explorer.settle(sigma=1.122)  # 10^0.05
    assert explorer.page.get_attribute("#sigma", "aria-valuetext") == explorer.page.text_content("#sigma-value")
    assert explorer.page.evaluate("document.activeElement.id") == "sigma"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_nothing_serious_for_axe_and_no_sideways_scrolling(browser, address, scheme):
    explorer = Explorer(browser, address, "L=999&d=4&d_k=3", color_scheme=scheme)
    assert serious_violations(explorer.page) == []
    explorer.page.set_viewport_size({"width": WIDTHS["narrow"], "height": 844})
    assert overflow(explorer.page) == 0
    explorer.page.close()


@pytest.mark.slow
def test_a_server_that_is_gone_is_named(browser, address):
    explorer = Explorer(browser, address, SMALL.query())
    explorer.page.route("**/*", lambda route: route.abort())
    explorer.move("L", 6)
    explorer.page.wait_for_function("() => document.getElementById('message').textContent.includes('did not answer')")
    _goes_on(explorer, "**/*")


@pytest.mark.slow
def test_what_breaks_inside_is_told_and_the_next_move_tries_again(browser, address):
    explorer = Explorer(browser, address, SMALL.query())
    broken = {"status": 500, "json": {"error": "the server could not answer; nothing was changed"}}
    explorer.page.route("**/answer/spectra*", lambda route: route.fulfill(**broken))
    explorer.move("L", 6)
    explorer.page.wait_for_function("() => document.getElementById('message').textContent.includes('could not answer')")
    _goes_on(explorer, "**/answer/spectra*")


def _goes_on(explorer, route):
    """Once the route is open again, the next move is answered and the message is gone."""
    explorer.page.unroute(route)
    explorer.move("L", 7)
    explorer.settle(L=7)
    assert_shows(explorer, State(**{**SMALL.model_dump(), "L": 7}))
    assert explorer.page.text_content("#message") == ""
    explorer.page.close()


def test_the_seed_is_typed_and_stepped(explorer):
    explorer.page.fill("#seed", "41")
    explorer.settle(seed=41)
    explorer.page.focus("#seed")
    explorer.page.keyboard.press("ArrowUp")
    explorer.settle(seed=42)
    assert_shows(explorer, State(**{**SMALL.model_dump(), "seed": 42}))
    explorer.page.fill("#seed", "")  # on the way to another number
    explorer.settle(seed=42)


def test_the_page_is_served_with_its_layout(address):
    with urllib.request.urlopen(f"{address}_dash-layout") as answer:
        assert json.load(answer)["type"] == "Div"
