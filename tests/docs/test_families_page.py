"""docs/families.md: its rows are what is found now, and it has at least 60 classes with attention."""

import re
from pathlib import Path

import pytest
from benchmarks.families import row

import zoo

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text().splitlines()
QUICK = {"GPT2LMHeadModel", "GPTNeoXForCausalLM", "T5ForConditionalGeneration", "SiglipModel"}


def test_it_has_sixty_classes():
    shares = [float(found[1]) for line in PAGE if (found := re.match(r"\| \w+ \| ([\d.]+)% ", line))]
    assert sum(share > 95 for share in shares) >= 60


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in zoo.cases()]
)
def test_its_rows_are_what_is_found(name):
    """But for the number of closed forms, which depends on the time that they take."""
    known, found = ([_cells(line) for line in lines] for lines in (PAGE, [str(row(name))]))
    assert found[0] in known


def _cells(line):
    """Without the number of closed forms, the last but two."""
    cells = line.split(" | ")
    return [*cells[:-3], *cells[-2:]]
