"""docs/sensitivity.md is what the stored results say."""

import json

from benchmarks.sensitivity import RESULTS
from benchmarks.sensitivity_page import changes, page

from fences import DOCS

FOUND = json.loads(RESULTS.read_text())


def test_it_is_the_page_of_the_results():
    assert (DOCS / "sensitivity.md").read_text() == page(FOUND)


def test_second_order_ranks_better_than_every_other_score():
    for model, part, found in changes(FOUND):
        assert found["rank correlation"][0] > max(found["ranks"].values()), (model, part)


def test_a_ledger_costs_less_than_its_products():
    cost = FOUND["cost"]["cost"]
    assert cost["with_pairs"] < cost["blocks"] + 2 and cost["without_pairs"] < 3
