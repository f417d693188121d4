"""The fixture `fuzz`: a check on drawn examples, a few in `make test`, as many as there is time for in `make fuzz`.

FUZZ_MINUTES is the time for all tests together. Each takes an equal share of it, in rounds of fresh examples. The seed
of the first round is drawn anew, unless FUZZ_SEED gives it, and counts up. A failure names the seed of its round:
`FUZZ_MINUTES=1 FUZZ_SEED=<seed> pytest tests/fuzz -k <test>` starts with the same examples.
"""

import os
import random
import time

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
ROUND = 25  # examples


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "fuzz":
            item.add_marker(pytest.mark.fuzz)


@pytest.fixture
def fuzz(request, record_property):
    """fuzz(check, *strategies, examples=...): `check` is called with what the strategies draw."""

    def run(check, *strategies, examples):
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        tests = sum(item.get_closest_marker("fuzz") is not None for item in request.session.items)
        end = time.monotonic() + 60 * MINUTES * workers / max(1, tests)
        number = int(os.environ.get("FUZZ_SEED", str(random.SystemRandom().randrange(10**6) if MINUTES else 0)))
        record_property("first seed", number)
        count = 0

        def counted(drawn):
            nonlocal count
            if MINUTES and count and time.monotonic() >= end:
                return  # the rest of the round is not asked
            count += 1
            check(*drawn)

        while True:
            limits = settings(max_examples=ROUND if MINUTES else examples, derandomize=False, database=None)
            try:
                seed(number)(limits(given(st.tuples(*strategies))(counted)))()
            except BaseException as error:
                error.add_note(f"FUZZ_SEED={number}, example {count} of the test")
                raise
            finally:
                record_property("examples", count)
            number += 1
            if time.monotonic() >= end:
                return

    return run


def pytest_terminal_summary(terminalreporter):
    """The counts, from all workers."""
    if not MINUTES:
        return
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    rows = {r.nodeid.rpartition("/")[2]: dict(r.user_properties) for r in reports if "/fuzz/" in r.nodeid}
    terminalreporter.section("examples")
    for name, row in sorted(rows.items()):
        terminalreporter.write_line(f"{row.get('examples', 0):>8,}  seed {row.get('first seed', ''):<8} {name}")
    terminalreporter.write_line(f"{sum(row.get('examples', 0) for row in rows.values()):>8,}  in all")
