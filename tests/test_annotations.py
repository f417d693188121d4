"""Shapes in annotations are checked at every call, in all modules that state any."""

import re
from pathlib import Path

import pytest
import torch

import curvoscope
from curvoscope.papers.theorems.calculus import vec_columns


def test_every_module_that_annotates_shapes_is_checked(pytestconfig):
    root = Path(curvoscope.__file__).parent
    checked = pytestconfig.getoption("--jaxtyping-packages").split(",")[:-1]
    for file in root.rglob("*.py"):
        if re.search(r"^(from|import) jaxtyping", file.read_text(), re.MULTILINE):
            name = ".".join(["curvoscope", *file.relative_to(root).with_suffix("").parts])
            assert any(f"{name}.".startswith(f"{package}.") for package in checked), f"{name} is not checked"


def test_a_wrong_shape_is_an_error():
    with pytest.raises(Exception, match="Type-check error"):
        vec_columns(torch.ones(3))
