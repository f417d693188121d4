"""The sentences on top of a report."""

import pytest
from markupsafe import Markup

from curvoscope.report import answers
from curvoscope.report.html import _unbroken
from report_cases import training_records


def test_one_measurement_is_no_course():
    records = training_records()
    one, all_of_them = (answers.of_training(found, momentum=None)["answer"] for found in (records[:1], records))
    assert one.startswith("One measurement only, at step 1:") and " of the edge of plain gradient descent" in one
    assert "From step" not in one and "of 1 measurements" not in one
    assert all_of_them.startswith("From step 1 to step 31")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("from 2.36e-01 to 1", ["2.36e-01"]),
        ("run from -2.55e-03 on", ["-2.55e-03"]),
        ("2/λ max = 3", ["λ max"]),
        ("curvoscope watch --steps 30 --no-resume", ["--steps", "--no-resume"]),
        ("Jensen-Shannon, my-very-long-model--name", []),
        ("&lt;script&gt;", []),
    ],
)
def test_what_stays_on_one_line(text, kept):
    marked = _unbroken(Markup(text))
    assert [part.split("</span>")[0] for part in marked.split('<span class="unbroken">')[1:]] == kept
    assert marked.replace('<span class="unbroken">', "").replace("</span>", "") == text
