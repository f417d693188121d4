"""What `import curvoscope` and the command line load, and that public names win over modules of the same name."""

import subprocess
import sys

import pytest

import curvoscope as cv

HEAVY = ("torch", "transformers", "scipy", "matplotlib", "plotly", "jaxtyping")


def fresh(code: str) -> str:
    """What code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> set[str]:
    """The packages loaded after the code has run, also if it ends by SystemExit."""
    end = "import sys\nprint('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    return set(fresh(f"try:\n    {code}\nexcept SystemExit:\n    pass\n{end}").splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["reproduce", "--help"], ["analyze", "--seed", "x"]])
def test_the_command_line_answers_without_what_computes(arguments):
    code = f"import sys; sys.argv = ['curvoscope', *{arguments}]; from curvoscope.cli import main; main()"
    assert loaded(code).isdisjoint(HEAVY)


def test_import_loads_no_package_that_computes():
    assert loaded("import curvoscope").isdisjoint({*HEAVY, "rich"})


def test_the_first_use_loads_no_package_that_it_does_not_need():
    code = "import sys, curvoscope as cv; cv.hessian, cv.sweep; print('scipy.sparse' in sys.modules)"
    assert fresh(code).strip() == "False"
    assert loaded("import curvoscope; curvoscope.hessian").isdisjoint({"transformers", "matplotlib", "plotly", "rich"})


def test_every_public_name_is_found_and_listed():
    assert set(cv.__all__) <= set(dir(cv))
    found = fresh("from curvoscope import *; import curvoscope as cv; print([n for n in cv.__all__ if n in globals()])")
    assert found.strip() == str(cv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'hesian'"):
        _ = cv.hesian


@pytest.mark.parametrize(
    "before",
    [
        "",
        pytest.param("import curvoscope.sweep, curvoscope.settings", marks=pytest.mark.slow),
        pytest.param("from curvoscope.sweep.statistics import Bracket", marks=pytest.mark.slow),
        pytest.param(
            "from curvoscope.sweep import Sweep; from curvoscope.settings import current", marks=pytest.mark.slow
        ),
        pytest.param("cv.sweep; import curvoscope.sweep.run, curvoscope.settings", marks=pytest.mark.slow),
        pytest.param("cv.Sweep; cv.curvature", marks=pytest.mark.slow),
    ],
)
def test_a_function_wins_over_the_module_of_its_name_in_any_order_of_imports(before):
    after = "print(*(type(thing).__name__ for thing in (cv.sweep, sweep, cv.settings, settings, cv.losses)))"
    found = fresh(f"import curvoscope as cv\n{before}\nfrom curvoscope import sweep, settings\n{after}")
    assert found.split() == ["function"] * 4 + ["module"]
