"""docs/sensitivity.md is what the stored results say."""

import json

from benchmarks.sensitivity import RESULTS
from benchmarks.sensitivity_page import ahead, changes, page

from fences import DOCS

FOUND = json.loads(RESULTS.read_text())


def test_it_is_the_page_of_the_results():
    assert (DOCS / "sensitivity.md").read_text() == page(FOUND)


def test_second_order_ranks_the_changes_of_its_own_text_best():
    """Unless whole layers are removed, which is beyond its reach."""
    for model, part, found in changes(FOUND):
        assert not ahead(found) or part == "one layer removed", (model, part)


def test_a_ledger_costs_less_than_its_products():
    cost = FOUND["cost"]["cost"]
    assert cost["with_pairs"] < cost["blocks"] + 2 and cost["without_pairs"] < 2
