"""A small experiment of pure arithmetic, run as a script: `python toy.py STORE JOBS`. Workers import it anew."""

import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from pydantic import BaseModel

from curvoscope.papers.experiments import Figure, MeasuredValue, Store, missing, run, runner


class Configuration(BaseModel):
    digits: int = 8
    pause: float = 0.01


def measure(configuration, point, seed, draw):
    time.sleep(configuration.pause)
    digest = hashlib.sha256(f"{point} {seed} {draw}".encode()).hexdigest()
    return [
        MeasuredValue(layer, block, "outer", int(digest[layer * 8 :][: configuration.digits], 16) / 7, 0.5)
        for layer in (1, 2)
        for block in "QV"
    ]


class Grave(Configuration):
    """`grave`: a file in which the first worker that comes by writes its number, and dies."""

    grave: str


def dying(configuration, point, seed, draw):
    with contextlib.suppress(FileExistsError), Path(configuration.grave).open("x") as file:
        file.write(str(os.getpid()))
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(configuration, point, seed, draw)


def toy(measure=measure, configuration=None, version=1, points=5, seeds=60):
    grid = [{"sigma": i / 3} for i in range(points)]
    return Figure(
        name="toy",
        title="",
        question="",
        configuration=configuration or Configuration(),
        points=grid,
        seeds=seeds,
        quick_points=grid[:2],
        quick_seeds=1,
        measure=measure,
        verdicts=lambda rows: [],
        panels=lambda rows: [],
        seconds=lambda point: 0.0,
        version=version,
    )


def carry_on(path, jobs):
    """Run what is missing."""
    with Store(Path(path)) as store:
        run(missing([toy()], store, quick=False), store, jobs)


class Forked:
    """`multiprocessing` whose contexts all fork: a worker then need not load torch anew, which takes seconds."""

    parent_process = staticmethod(multiprocessing.parent_process)

    @staticmethod
    def get_context(_):
        return multiprocessing.get_context("fork")


def carry_on_with_forks(path, jobs):
    """As `carry_on`, in a process of its own."""
    runner.multiprocessing = Forked
    carry_on(path, jobs)


if __name__ == "__main__":
    carry_on(sys.argv[1], int(sys.argv[2]))
