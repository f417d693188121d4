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
    assert sum("| `" in line for line in PAGE if re.match(r"\| \w+For\w+ \|", line)) >= 60


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in zoo.cases()]
)
def test_its_rows_are_what_is_found(name):
    """But for closed forms and the error, which depend on the CPU."""
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", str(row(name, measured=False)))[1:-1]]
    known = next(line for line in PAGE if line.startswith(f"| {name} |"))
    written = [cell.strip() for cell in re.split(r"(?<!\\)\|", known)[1:-1]]
    assert (written[:5], written[9]) == (cells[:5], cells[9])
    assert not written[8] or float(written[8]) <= 1e-8
