"""The report in a browser: drawn, sorted, read by machines, printed; on wide and narrow windows, light and dark."""

import functools
import json

import pytest

from browser_cases import PATIENCE, WIDTHS, Traffic, cut_off, overflow, serious_violations
from curvoscope.commands import watch
from curvoscope.commands.watch_run import WatchOptions
from curvoscope.report.contents import report_of
from report_cases import KINDS, run_of


@pytest.fixture(params=[kind if kind == "analyze" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def run(request, tmp_path):
    return run_of(request.param, tmp_path / "run")


@pytest.fixture
def opened(browser, run):
    """`opened(width, scheme)`: the run's page in a context of its own, and what it said."""
    contexts = []

    def show(width=1440, scheme="light", path=None):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        traffic = Traffic(page)
        page.goto((path or run[0] / "report.html").as_uri())
        return page, traffic

    yield show
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_whole_and_accessible(opened, scheme):
    for width in WIDTHS.values():
        page, traffic = opened(width, scheme)
        assert overflow(page) == 0
        for figure in page.locator("figure svg").all():
            figure.scroll_into_view_if_needed()
            box = figure.bounding_box()
            assert box["width"] > 200 and box["height"] > 100
            assert figure.locator("path, image, use").count() > 20
            # its text has the colour of the page's: it can be read on any background
            colors = figure.evaluate("one => [getComputedStyle(one).fill, getComputedStyle(document.body).color]")
            assert colors[0] == colors[1]
        assert page.locator("figure svg").count() == page.locator("figure").count() > 0
        assert serious_violations(page) == []
        assert traffic.problems == [] and traffic.requests == []


@pytest.mark.slow
def test_nothing_is_cut_off_on_a_wide_screen(opened):
    for width in (1440, 1920):
        page, _ = opened(width)
        assert cut_off(page) == []


@pytest.mark.slow
def test_nothing_of_a_real_training_is_cut_off_on_a_wide_screen(browser, tmp_path):
    """The optimizer's step has a row of nine columns, which the panel shows below each other."""
    options = WatchOptions(steps=3, d=4, sequences=2, every=1, budget=1.0)
    assert watch.run(options, tmp_path, False, True) == 0
    for width in (1440, 1920):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(PATIENCE)
        traffic = Traffic(page)
        page.goto((tmp_path / "report.html").as_uri())
        shown = page.locator(".facts .wide").last
        assert shown.locator("tbody th").all_inner_texts()[-2:] == ["alone, second order", "measured"]
        assert cut_off(page) == [] and traffic.problems == []
        page.close()


def column(table, place):
    """The numbers of a column as shown by the page, None for a cell without one, from top to bottom."""
    return table.evaluate(
        """(table, place) => [...table.tBodies[0].rows].map((row) => {
            const data = row.cells[place].querySelector("data");
            return data && Number(data.value);
        })""",
        place,
    )


def test_sorted_by_click_and_by_keyboard(opened):
    page, traffic = opened()
    table = page.locator("table.sortable").first
    headings = table.locator("thead th")
    before = column(table, 2)
    known = sorted(value for value in before if value is not None)
    empty = [None] * (len(before) - len(known))
    button = headings.nth(2).locator("button")
    button.click()
    assert headings.nth(2).get_attribute("aria-sort") == "ascending"
    assert column(table, 2) == [*known, *empty]
    assert page.locator("#sorted").inner_text().endswith("ascending.")
    button.focus()
    page.keyboard.press("Enter")
    assert headings.nth(2).get_attribute("aria-sort") == "descending"
    assert column(table, 2) == [*reversed(known), *empty]
    page.keyboard.press("Shift+Tab")  # to the heading before, which sorts words
    page.keyboard.press("Space")
    assert [one.get_attribute("aria-sort") for one in headings.all()].count("none") == headings.count() - 1
    assert headings.nth(1).get_attribute("aria-sort") == "ascending"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid" and traffic.problems == []


def test_numbers_are_those_of_the_document(opened, run):
    _, document = run
    page, _ = opened()
    report = report_of(json.dumps(document), {})
    tables = page.locator("table.sortable").all()
    assert len(tables) == len(report.tables)
    for shown, table in zip(tables, report.tables, strict=True):
        for place in range(table.words, len(table.columns)):
            assert column(shown, place) == [row[place].value for row in table.rows]


def test_a_name_with_a_script_stays_text(opened, run, tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    _, document = run
    document = {**document, "title": evil, "question": evil, "answer": evil, "about": [evil], "command": evil}
    path = tmp_path / "evil.html"
    path.write_text(report_of(json.dumps(document), {}).html())
    page, traffic = opened(path=path)
    assert page.title() == evil and page.locator("h1").inner_text() == evil
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    assert traffic.problems == [] and traffic.requests == []


def test_printed_on_white_in_black(opened):
    page, _ = opened(1440, "dark")
    page.emulate_media(media="print")
    style = functools.partial(page.evaluate, "([one, key]) => getComputedStyle(document.querySelector(one))[key]")
    assert style(["body", "color"]) == "rgb(0, 0, 0)" and style(["body", "backgroundColor"]) == "rgb(255, 255, 255)"
    assert style(["figure svg", "fill"]) == "rgb(0, 0, 0)"
    page.set_viewport_size({"width": 794 - 2 * 38, "height": 1123})  # A4 at 96 dpi, less its margins
    for figure in page.locator("figure svg").all():
        assert figure.bounding_box()["width"] <= 718
    assert page.pdf(format="A4").startswith(b"%PDF")
