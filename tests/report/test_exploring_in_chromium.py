"""The interactive part of a page in a browser: one choice in table, heat map, profile and panel, whatever is done."""

import json
import random
import threading

import pytest

from browser_cases import PATIENCE, Traffic, overflow, serious_violations
from curvoscope.blocks import layer_and_role
from curvoscope.report.comparison import side_by_side
from curvoscope.report.contents import report_of
from report_cases import model_document, run_of

NUMBERS = ("frobenius_norm", "trace", "largest_eigenvalue")
READ = """() => {
    const table = document.querySelector(".bench table.sortable");
    const tools = table.closest(".tables").querySelector(".tools");
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    const key = (row) => ["block", "part"].map((name) => row.cells[names.indexOf(name)].textContent);
    const rows = [...table.tBodies[0].rows].filter((row) => row.getClientRects().length);
    const panel = document.querySelector(".facts"), numbers = [...panel.querySelectorAll("table[data-run] tbody tr")];
    return {
        rows: rows.map(key),
        chosen: [...table.querySelectorAll("tr[aria-current]")].map(key),
        filters: Object.fromEntries([...tools.querySelectorAll("label")].map((label) => [
            label.firstChild.textContent.trim(), label.querySelector("select, input").value])),
        count: tools.querySelector(".count").textContent,
        maps: [...document.querySelectorAll(".map")].map((map) => ({...map.dataset, hidden: map.hidden})),
        profile: document.querySelector(".profile").dataset.block,
        panel: {...panel.dataset, text: panel.textContent, numbers: numbers.map((row) => [
            row.closest("table").dataset.run, row.querySelector("th").textContent, row.ariaCurrent === "true",
            [...row.querySelectorAll("data")].map((one) => [Number(one.value), Number(one.dataset.stderr)])])},
        part: document.querySelector("#maps select").value,
    };
}"""


@pytest.fixture
def opened(browser, tmp_path):
    """`opened(report, width, scheme)`: the page of a report in a context of its own, and what it said."""
    contexts = []

    def show(report, width=1440, scheme="light", **options):
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(report.html())
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        traffic = Traffic(page)
        page.goto(path.as_uri())
        return page, traffic

    yield show
    for context in contexts:
        context.close()


def made(document):
    return report_of(json.dumps(document), {})


def passes(row, filters):
    layer, role = layer_and_role(row["block"]) or ("outside of the layers", row["block"])
    facts = {"layer": layer, "role": role, "part": row["part"], "by": row["method"]}
    words = (row["block"], row["part"], row["method"])
    needle = filters["contains"].strip().lower()
    return all(filters.get(name, "") in ("", value) for name, value in facts.items()) and any(
        needle in word.lower() for word in words
    )


def consistent(page, document):
    """Table, heat map, profile and panel show the same choice, the rows those of the filters, the numbers the run's."""
    seen = page.evaluate(READ)
    expected = [(row["block"], row["part"]) for row in document["rows"] if passes(row, seen["filters"])]
    assert sorted(map(tuple, seen["rows"])) == sorted(expected)
    assert seen["count"] in (f"{len(expected)} of {len(document['rows'])} rows", f"{len(expected)} rows")
    if not expected:
        assert seen["chosen"] == [] and seen["panel"]["block"] == "" and "No block passes" in seen["panel"]["text"]
        assert all(one["hidden"] for one in seen["maps"])
        return seen
    ((block, part),) = seen["chosen"]
    assert (block, part) in expected and part == seen["part"]
    assert block == seen["panel"]["block"] == seen["profile"] and all(
        (one["block"], one["part"], one["hidden"]) == (block, part, False) for one in seen["maps"]
    )
    other = seen["panel"]["other"]
    assert all(one["column"] == other for one in seen["maps"]) and other in {name for name, _ in expected}
    assert [one[1] for one in seen["panel"]["numbers"] if one[2]] == [part]
    if other == block:
        rows = [row for row in document["rows"] if row["block"] == block]
        numbers = {row["part"]: [[row[key]["value"], row[key]["stderr"]] for key in NUMBERS] for row in rows}
    else:
        pairs = [one for one in document["pairs"] if {one["row"], one["column"]} == {block, other}]
        numbers = {one["part"]: [[one["frobenius_norm"]["value"], one["frobenius_norm"]["stderr"]]] for one in pairs}
    assert {one[1]: one[3] for one in seen["panel"]["numbers"]} == numbers
    return seen


def act(page, draw):
    """One of the things that a user can do, chosen by chance; its name."""
    table = page.locator(".bench table.sortable").first
    tools = page.locator(".bench .tables .tools").first

    def pick(locator):
        found = [one for one in locator.all() if one.is_visible()]
        return draw.choice(found) if found else None

    def click_in(selector):
        box = page.locator(selector).first
        if box.is_visible():
            size = box.bounding_box()
            box.click(position={"x": draw.uniform(1, size["width"] - 1), "y": draw.uniform(1, size["height"] - 1)})

    def press(selector):
        if page.locator(selector).is_visible():
            page.locator(selector).focus()
            page.keyboard.press(draw.choice(["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Home", "End"]))

    def option(select):
        if select is not None:
            options = [one.get_attribute("value") for one in select.locator("option").all()]
            select.select_option(draw.choice(options))

    def row():
        found = table.locator("tbody tr:not(.out)")
        if found.count():
            found.nth(draw.randrange(found.count())).locator(".pick").click()

    def row_by_key():
        page.locator(".bench .pick[tabindex='0']").first.focus()
        page.keyboard.press(draw.choice(["ArrowUp", "ArrowDown"]))

    def pair():
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        found = page.locator("details .pick")
        found.nth(draw.randrange(found.count())).click()

    def chip():
        found = pick(page.locator("button.chip"))
        if found is not None:
            found.click()

    actions = {
        "a cell": lambda: click_in(".map"),
        "an arrow in the map": lambda: press(".map"),
        "a point": lambda: click_in(".profile"),
        "an arrow in the profile": lambda: press(".profile"),
        "a row": row,
        "the next row": row_by_key if page.locator(".bench .pick[tabindex='0']").count() else row,
        "a pair": pair,
        "a filter": lambda: option(pick(tools.locator("select"))),
        "a word": lambda: tools.locator("input").fill(draw.choice(["", "attn", "1", "Q", "nothing of that name"])),
        "clear": lambda: tools.locator("button").click(),
        "a heading": lambda: table.locator("thead button").nth(draw.randrange(6)).click(),
        "the part": lambda: option(page.locator("#maps select").first),
        "the number": lambda: option(page.locator("#profile select").first),
        "a role": chip,
        "the colours": lambda: page.locator(".scheme").click(),
        "the window": lambda: page.set_viewport_size({"width": draw.choice([390, 1100, 1920]), "height": 900}),
    }
    name = draw.choice(list(actions))
    actions[name]()
    return name


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_interactions_end_in_one_state(opened, seed):
    document, draw = model_document(3, seed), random.Random(seed)
    page, traffic = opened(made(document))
    done = []
    for _ in range(50 if seed else 12):
        done.append(act(page, draw))
        try:
            consistent(page, document)
        except (AssertionError, ValueError) as error:
            error.add_note(f"after {done}")
            raise
    assert traffic.problems == [] and traffic.requests == []


@pytest.mark.slow
def test_a_choice_by_each_view(opened):
    document = model_document(2)
    page, traffic = opened(made(document))
    page.locator(".bench tbody tr", has_text="h.1.attn.V").nth(1).click()
    seen = consistent(page, document)
    assert seen["chosen"] == [["h.1.attn.V", "functional"]]
    page.locator(".map").focus()
    page.keyboard.press("Home")
    seen = consistent(page, document)
    assert (seen["panel"]["block"], seen["panel"]["other"]) == ("h.1.attn.V", "h.0.norm1")
    said = page.locator("#sorted").inner_text()
    value = next(
        one["frobenius_norm"]["value"]
        for one in document["pairs"]
        if (one["row"], one["column"], one["part"]) == ("h.0.norm1", "h.1.attn.V", "functional")
    )
    assert said == f"h.1.attn.V, h.0.norm1, functional: {value:.2e} ±3.0%"
    page.locator("button.chip", has_text="attn.Q").click()
    assert consistent(page, document)["chosen"] == [["h.1.attn.Q", "functional"]]
    page.locator(".profile").focus()
    page.keyboard.press("ArrowLeft")
    assert consistent(page, document)["chosen"] == [["h.0.attn.Q", "functional"]]
    heads = page.locator(".facts h4", has_text="Attention moments by head")
    assert heads.count() == 1 and heads.locator("xpath=following-sibling::div").locator("tbody tr").count() == 2
    tools = page.locator(".bench .tables .tools").first
    field = {name: tools.locator("select").nth(i) for i, name in enumerate(("layer", "role", "part", "by", "order"))}
    field["role"].select_option("mlp.up")
    field["part"].select_option("outer")
    assert consistent(page, document)["rows"] == [["h.0.mlp.up", "outer"], ["h.1.mlp.up", "outer"]]
    field["order"].select_option("role")
    tools.get_by_role("button", name="Clear").click()
    order = [name for name, _ in consistent(page, document)["rows"]]
    roles = [(layer_and_role(name) or ("", name))[1] for name in order]
    assert roles == sorted(roles, key=roles.index) and roles[:6] == ["norm1"] * 6
    assert traffic.problems == []


@pytest.mark.slow
def test_the_text_of_the_panel_is_that_of_the_table(opened):
    """Python writes the table, the script the panel."""
    document = model_document(2)
    document["rows"][0]["trace"] |= {"value": 1e-9, "stderr": 1e-9}
    document["rows"][1]["trace"] |= {"value": -2.0, "stderr": 1.0}
    document["rows"][2]["trace"] |= {"value": 0.0, "stderr": 0.0}
    document["rows"][6]["trace"] |= {"value": 1e-3, "stderr": 1.0}
    document["rows"][7]["trace"] |= {"value": 0.0, "stderr": 1.0}
    page, _ = opened(made(document))
    table = page.locator(".bench table.sortable").first
    for place in (0, 3, 6):
        table.locator("tbody tr").nth(place).click()
        written = [table.locator("tbody tr").nth(place + i).locator("td.number").all_inner_texts() for i in range(3)]
        shown = [
            row.locator("td.number").all_inner_texts() for row in page.locator(".facts table[data-run] tbody tr").all()
        ]
        assert shown == written


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_whole_and_accessible(opened, scheme, tmp_path):
    watched = json.loads((run_of("watch", tmp_path)[0] / "watch.json").read_text())
    both = side_by_side({"before": made(model_document(2, 0)), "after": made(model_document(3, 1))})
    for report in (made(model_document(3)), both, made(watched)):
        for width in (390, 1440, 1920):
            page, traffic = opened(report, width, scheme)
            assert overflow(page) == 0
            assert serious_violations(page) == []
            assert traffic.problems == [] and traffic.requests == []


def test_a_part_that_is_zero_is_not_drawn_on_a_logarithmic_axis(opened, tmp_path):
    document = json.loads((run_of("watch", tmp_path)[0] / "watch.json").read_text())
    for record in document["records"]:
        if record["details"] is not None:
            record["details"]["blocks"]["V"]["functional"] |= {"value": 0.0, "stderr": 0.0}
            record["details"]["blocks"]["a.Q"]["outer"]["stderr"] = record["details"]["blocks"]["a.Q"]["outer"]["value"]
    page, traffic = opened(made(document))
    for block, parts in (("V", ["outer"]), ("a.Q", ["outer", "functional"])):
        page.locator(".bench table.sortable tbody tr", has_text=block).click()
        assert page.locator(".facts .series .chip").all_inner_texts() == parts
    assert traffic.problems == []


@pytest.mark.slow
def test_the_colours_of_the_switch(opened):
    page, _ = opened(made(model_document(1)), scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.get_by_role("button", name="Light colours").click()
    assert page.evaluate(background) == "rgb(255, 255, 255)" != dark
    page.get_by_role("button", name="Dark colours").click()
    assert page.evaluate(background) == dark
    page.emulate_media(media="print")
    assert page.evaluate(background) == "rgb(255, 255, 255)"


@pytest.mark.slow
def test_on_paper_all_rows_and_no_controls(opened):
    document = model_document(2)
    page, _ = opened(made(document))
    page.locator(".bench .tables select").first.select_option("h.1")
    page.emulate_media(media="print")
    visible = [row.is_visible() for row in page.locator(".bench table.sortable").first.locator("tbody tr").all()]
    assert visible == [True] * len(document["rows"])
    assert not any(one.is_visible() for one in page.locator("#maps, #panel, #profile, .tools, .scheme").all())


@pytest.mark.slow
def test_without_a_script(opened, tmp_path):
    out, document = run_of("watch", tmp_path / "run")
    figures = {one.name: one.read_bytes() for one in out.glob("*.svg")}
    page, _ = opened(report_of(json.dumps(document), figures), java_script_enabled=False)
    assert page.locator("figure svg").count() == len(figures) and page.locator("figure svg").first.is_visible()
    blocks = document["records"][-1]["details"]["blocks"]
    assert page.locator(".bench tbody th").all_inner_texts() == list(blocks)
    assert page.locator("#maps").is_hidden() and page.locator("#panel").is_hidden()


@pytest.mark.slow
def test_two_runs_have_one_choice_and_one_scale(opened):
    documents = {"before": model_document(2, 0), "after": model_document(3, 1)}
    page, traffic = opened(side_by_side({label: made(one) for label, one in documents.items()}), 1920)
    assert page.locator(".map").count() == 2
    page.locator(".bench tbody tr", has_text="h.0.attn.K").nth(2).click()
    seen = page.evaluate(READ)
    assert {(one["block"], one["column"], one["part"]) for one in seen["maps"]} == {
        ("h.0.attn.K", "h.0.attn.K", "total")
    }
    for label, document in documents.items():
        row = next(one for one in document["rows"] if (one["block"], one["part"]) == ("h.0.attn.K", "total"))
        shown = next(one for one in seen["panel"]["numbers"] if one[:2] == [label, "total"])
        assert shown[3] == [[row[key]["value"], row[key]["stderr"]] for key in NUMBERS]
    page.locator(".bench tbody tr", has_text="h.2.attn.K").first.click()
    assert "before: not in this run" in page.locator(".facts").inner_text()
    assert "not in this run" in page.locator(".note").first.inner_text()
    norms = [
        one["frobenius_norm"]["value"]
        for document in documents.values()
        for one in (*document["rows"], *document["pairs"])
    ]
    ends = page.locator(".ramp").inner_text()
    assert f"{min(norms):.2e}" in ends and f"{max(norms):.2e}" in ends
    assert traffic.problems == []


@pytest.mark.slow
def test_served_page_runs_its_script_and_nothing_else(browser):
    pytest.importorskip("dash", reason="the explorer needs dash")
    from curvoscope.explorer.server import listen

    found = listen(None, 0, made(model_document(2)).html())
    thread = threading.Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    page = browser.new_page()
    try:
        traffic = Traffic(page, allowed=(found.address,))
        answer = page.goto(found.address)
        assert "'unsafe-inline'" not in answer.headers["content-security-policy"].split("script-src")[1].split(";")[0]
        consistent(page, model_document(2))
        assert traffic.problems == [] and traffic.requests == []
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'hacked = 1'}))"
        )
        assert page.evaluate("typeof hacked") == "undefined"
    finally:
        page.close()
        found.server.shutdown()
        thread.join()
        found.server.server_close()
