"""The code of a page of Markdown, run as a reader would: fence after fence, in one directory.

A `python` fence runs in the page's namespace; one whose first line is a comment `# name.py` is saved under that name
instead. A `shell` fence is run line by line. A `text` fence behind one of them is what it prints, with "..." for what
differs from machine to machine.
"""

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SET_UP = ("git clone", "cd ", "make ", "source ", ".venv/bin/pip ", "pip ")
"""Commands that install. `test_pages` looks at what they name instead of running them."""

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclass
class Fence:
    """Code of a page, and where what it prints is shown: (start, end) in the page's text."""

    language: str
    body: str
    shown: tuple[int, int] | None = None


def pages() -> list[Path]:
    """All pages that people write, and the README."""
    made = {"_build", "examples", "notebooks"}
    return [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if not made & set(p.relative_to(DOCS).parts))]


def fences(text: str) -> list[Fence]:
    """The fences to run. Text that no code comes before is an error: nobody could check it."""
    found: list[Fence] = []
    end = -1
    for match in _FENCE.finditer(text):
        language, body = match.groups()
        if language == "text":
            if not found or found[-1].shown or text[end : match.start()].strip():
                raise ValueError(f"no code right before the text {body[:60]!r}")
            found[-1].shown = match.span(2)
        elif language in ("python", "shell"):
            found.append(Fence(language, body))
        else:
            raise ValueError(f"a fence in {language}: write python, shell or text")
        end = match.end()
    return found


class Runner:
    """Runs fences in the working directory. `call(*arguments)` runs the entry point: code, stdout, stderr."""

    def __init__(self, call: Callable[..., tuple[int, str, str]]) -> None:
        self.call = call
        self.names: dict[str, object] = {"__name__": "__main__"}

    def run(self, fence: Fence) -> str:
        """What the fence prints."""
        return self._python(fence.body) if fence.language == "python" else self._shell(fence.body)

    def _python(self, body: str) -> str:
        file = _FILE.match(body)
        if file:
            Path(file[1]).write_text(body)
            return ""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, "<fence>", "exec"), self.names)
        return printed.getvalue()

    def _shell(self, body: str) -> str:
        printed = ""
        for line in body.splitlines():
            words = shlex.split(line, comments=True)
            if not words or line.startswith(SET_UP):
                continue
            if words[0] == "curvoscope":
                code, out, err = self.call(*words[1:])
                assert code == 0, f"{line}: exit code {code}\n{err}"
                printed += out
            elif words[0] in ("torchrun", "python"):
                module = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
                command = [sys.executable, *module, *words[1:]]
                done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
                assert done.returncode == 0, f"{line}: exit code {done.returncode}\n{done.stderr}"
                printed += done.stdout
            else:
                raise ValueError(f"do not know how to run {line!r}")
        return printed


def difference(shown: str, printed: str) -> str | None:
    """None where a page shows what is printed, else both."""
    want, got = ("".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines()) for text in (shown, printed))
    if doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        return None
    return f"the page shows\n{want}\nbut this is printed\n{got}"
