"""What the reference documents and what the package exports: the public names."""

import importlib
import inspect
import pkgutil
import pydoc
import re
from types import ModuleType

import curvoscope as cv
from fences import DOCS

REFERENCE = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
DOCUMENTED = set(re.findall(r"auto(?:class|function|exception):: ([\w.]+)", REFERENCE))
MODULES = set(re.findall(r"automodule:: ([\w.]+)", REFERENCE))
PACKAGES = [cv, *(importlib.import_module(f"curvoscope.{one.name}") for one in pkgutil.iter_modules(cv.__path__))]


def exported(module: ModuleType) -> list[str]:
    """The names of `__all__`; without it, the functions and classes defined in the module."""
    own = (name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__)
    return list(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def public_names() -> dict[str, object]:
    """All public functions and classes, each under one name."""
    modules = [one for one in PACKAGES if hasattr(one, "__all__")]
    modules += [importlib.import_module(name) for name in sorted(MODULES)]
    found = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in exported(module)}
    found |= {name: pydoc.locate(name) for name in sorted(DOCUMENTED)}
    once = {id(thing): name for name, thing in reversed(found.items())}
    return {
        name: thing
        for name, thing in found.items()
        if once[id(thing)] == name and (inspect.isclass(thing) or inspect.isfunction(thing))
    }
