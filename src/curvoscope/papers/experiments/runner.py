"""Run the points of figures that are not in the store yet, in single-threaded processes, and store them.

Workers measure and this process writes, one point at a time, so that there is one writer and a killed run loses only
the points in progress. The values of a point depend on its task alone: not on the worker, the order or the number of
jobs.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch
from pydantic import BaseModel

from curvoscope import checks
from curvoscope.errors import CurvoscopeError, RangeError
from curvoscope.papers.experiments.figure import Figure, Measure, MeasuredValue, Point, canonical
from curvoscope.papers.experiments.store import Store


class WorkerError(CurvoscopeError, RuntimeError):
    """A worker died, or a measurement failed."""


@dataclass(frozen=True)
class Task:
    """One point of one figure.

    Args:
        figure: the figure.
        point: the coordinates on its grid, by name.
        seed: the seed.

    Example:
        >>> from curvoscope.papers.experiments import Task, find
        >>> figure, = find(["fig3a"])
        >>> print(Task(figure, figure.points[0], seed=0))
        fig3a at sigma 0.01, seed 0
    """

    figure: Figure
    point: Point
    seed: int

    def __str__(self) -> str:
        coordinates = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.point.items()
        )
        return f"{self.figure.name} at {coordinates}, seed {self.seed}"

    @property
    def job(self) -> "Job":
        """The part of the task that a worker needs."""
        draw = self.figure.draw(self.point, self.seed)
        return Job(self.figure.measure, self.figure.configuration, self.point, self.seed, draw)


@dataclass(frozen=True)
class Job:
    """A measurement that can be sent to another process."""

    measure: Measure
    configuration: BaseModel
    point: Point
    seed: int
    draw: int

    def __call__(self) -> list[MeasuredValue]:
        """The values, computed with one thread."""
        with _one_thread():
            return self.measure(self.configuration, self.point, self.seed, self.draw)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums over threads depend on their number; so does the speed of several jobs on one machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


Results = Generator[tuple[Task, list[MeasuredValue]], None, None]


def missing(figures: Sequence[Figure], store: Store, quick: bool) -> list[Task]:
    """The tasks whose points are not in the store, figure by figure.

    Args:
        figures: from `find`.
        store: where values are kept.
        quick: whether to use the small grids.

    Returns:
        The tasks, for `run`.

    Example:
        >>> import tempfile
        >>> from curvoscope.papers.experiments import Store, find, missing
        >>> with tempfile.TemporaryDirectory() as folder, Store(f"{folder}/store.sqlite") as store:
        ...     tasks = missing(find(["fig3a"]), store, quick=True)
        >>> len(tasks), str(tasks[0])
        (60, 'fig3a at sigma 0.01, seed 0')
    """
    tasks = []
    for figure in figures:
        done = store.done(figure)
        tasks += [
            Task(figure, point, seed) for point, seed in figure.grid(quick) if (canonical(point), seed) not in done
        ]
    return tasks


def run(
    tasks: Sequence[Task],
    store: Store,
    jobs: int = 1,
    dask: str | None = None,
    progress: Callable[[Task], None] = lambda task: None,
) -> None:
    """Measure the tasks and commit each one when it is done.

    Args:
        tasks: from `missing`.
        store: where values are kept.
        jobs: the number of processes; 1: this one.
        dask: the address of a Dask scheduler, or "local" for one on this machine; None: no Dask.
        progress: called with each task that is done.

    Example:
        >>> import tempfile
        >>> from curvoscope.papers.experiments import Store, find, missing, run
        >>> figure, = find(["scalar"])
        >>> with tempfile.TemporaryDirectory() as folder, Store(f"{folder}/store.sqlite") as store:
        ...     run(missing([figure], store, quick=True)[:1], store, progress=print)
        ...     len(missing([figure], store, quick=True))
        scalar at norm 1, seed 0
        79
    """
    checks.at_least(1, jobs=jobs)
    if not tasks:
        return
    if dask is not None:
        results = on_dask(tasks, dask, jobs)
    elif jobs == 1:
        results = ((task, _measured(task)) for task in tasks)
    else:
        results = in_processes(tasks, min(jobs, len(tasks)))
    with contextlib.closing(results):  # a store that fails stops the workers
        for task, values in results:
            store.add(task.figure, task.point, task.seed, values)
            progress(task)


def _measured(task: Task) -> list[MeasuredValue]:
    try:
        return task.job()
    except CurvoscopeError as error:
        raise WorkerError("task", f"{task}: {error}") from error


def in_processes(tasks: Sequence[Task], jobs: int) -> Results:
    """Results as they come in. A task whose worker dies is tried once more, in a new worker."""
    waiting, deaths = deque(tasks), Counter[int]()
    workers: dict[Connection, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                worker = _Worker(waiting.popleft())
                workers[worker.connection] = worker
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                worker = workers[ready]
                task = worker.task
                try:
                    answer = ready.recv()
                except (EOFError, ConnectionError):  # the worker is gone
                    workers.pop(ready).stop()
                    deaths[id(task)] += 1
                    if deaths[id(task)] > 1:
                        raise WorkerError(
                            "jobs",
                            f"the worker died twice (exit code {worker.exit_code}) while measuring {task}; what was "
                            "measured stays; if memory ran out, run again with fewer jobs",
                        ) from None
                    waiting.appendleft(task)
                    continue
                if isinstance(answer, str):
                    raise WorkerError("task", f"{task}: {answer}")
                if waiting:
                    worker.give(waiting.popleft())
                else:
                    workers.pop(ready).stop()
                yield task, answer
    finally:
        for worker in workers.values():
            worker.stop()


class _Worker:
    """A process that measures one task after the other, and ends with this one."""

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _keeping_memory():
            self._process.start()
        theirs.close()  # so that the connection ends with the worker
        self.give(task)

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def give(self, task: Task) -> None:
        self.task = task
        with contextlib.suppress(BrokenPipeError):  # it died: the next `recv` says so
            self.connection.send(task.job)

    def stop(self) -> None:
        self._process.kill()  # it holds nothing that could be lost
        self._process.join()
        self.connection.close()


@contextlib.contextmanager
def _keeping_memory() -> Iterator[None]:
    """For a process started here: the C library keeps freed memory. To the kernel and back with every tensor, it would
    cost a third of the time."""
    settings = {name: str(2**33) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _work(connection: Connection) -> None:
    """Run by a worker until the connection closes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            job: Job = connection.recv()
            try:
                connection.send(job())
            except ConnectionError:
                return
            except Exception as error:  # whatever it is, it is said there and not here
                connection.send(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def on_dask(tasks: Sequence[Task], address: str, jobs: int) -> Results:
    """Results as they come, from the scheduler at `address`, or from `jobs` new processes for "local"."""
    try:
        from dask.distributed import Client, KilledWorker, LocalCluster, as_completed
    except ImportError as error:
        raise RangeError("dask", "needs the extra: pip install 'curvoscope[dask]'") from error
    try:
        if address == "local":
            cluster = LocalCluster(n_workers=jobs, threads_per_worker=1, processes=True, dashboard_address=None)
            client = Client(cluster)
        else:
            cluster, client = None, Client(address, timeout=10)
    except OSError as error:
        raise RangeError(
            "dask", f"no scheduler answers at {address!r} ({error}); give its address or 'local'"
        ) from error
    try:
        futures = {client.submit(task.job, pure=False): task for task in tasks}
        for future in as_completed(list(futures)):
            task = futures.pop(future)
            try:
                values = future.result()
            except KilledWorker as error:
                raise WorkerError("dask", f"workers died while measuring {task}; what was measured stays") from error
            yield task, values
    finally:
        client.close()
        if cluster is not None:
            cluster.close()
