import io

import torch
from rich.console import Console

from curvoscope.analysis.measurements import Measurement
from curvoscope.analysis.spectra import BlockSpectrum
from curvoscope.estimate import Density, Estimate
from curvoscope.report.model_tables import block_table, spectrum_table, with_error


def printed(table):
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    return [line.split() for line in stream.getvalue().splitlines()]


def test_numbers_with_their_errors():
    assert with_error(Estimate(1.234e-4, 2e-6, 16, "xtrace")) == "1.23e-04 ±1.6%"
    assert with_error(Estimate(-1.234, 0.3, 16, "hutchinson")) == "-1.23e+00 ±24%"
    assert with_error(Estimate(1.234, 1e-5, 16, "xtrace")) == "1.23e+00 ±<0.1%"
    assert with_error(Estimate(1.234, 0.0, 0, "exact")) == "1.23e+00"
    assert with_error(Estimate(1.234, 1e-9, 64, "exact")) == "1.23e+00"
    assert with_error(Estimate(0.0, 0.0, 2, "lanczos")) == "0"
    assert with_error(Estimate(0.0, 1e-6, 2, "hutchinson")) == "0 ±1e-06"
    assert with_error(Estimate(1e-9, 1e-6, 2, "hutchinson")) == "1e-09 ±1e-06"


def test_blocks_and_parts():
    known, guessed = Estimate(2.0, 0.0, 0, "exact"), Estimate(3.0, 0.03, 16, "xtrace")
    rows = [
        Measurement("h.0.attn.Q", "outer", (2, 2), "exact", known, known, known),
        Measurement("h.0.attn.Q", "total", (2, 2), "autodiff", guessed, guessed, known),
    ]
    lines = printed(block_table(rows))
    assert ["h.0.attn.Q", "outer", "exact", "2.00e+00", "2.00e+00", "2.00e+00"] in lines
    assert ["total", "autodiff", "3.00e+00", "±1.0%", "3.00e+00", "±1.0%", "2.00e+00"] in lines


def test_spectra():
    found = Density.exact(torch.tensor([-2.0, 0.0, 0.0, 4.0], dtype=torch.float64))
    lines = printed(spectrum_table([BlockSpectrum("h.0.attn.Q", 4, "exact", found, found.log_spectrum())]))
    expected = ["h.0.attn.Q", "4", "-2.00e+00", "-2.0e+00", "0", "4.0e+00", "4.00e+00", "25.0%", "50.0%", "0"]
    assert expected in lines
