"""The papers' figures as data, from `catalogue.toml`: their names, what is said of them and what they cost."""

import tomllib
from importlib.resources import files
from typing import Any

CATALOGUE: dict[str, dict[str, Any]] = tomllib.loads(
    files(__package__).joinpath("experiments", "figures", "catalogue.toml").read_text("utf-8")
)

NAMES = tuple(CATALOGUE)
"""In the order in which `all` runs them."""
