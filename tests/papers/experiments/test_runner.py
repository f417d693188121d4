import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from curvoscope.errors import RangeError
from curvoscope.papers.experiments import MeasuredValue, Store, WorkerError, missing, run, runner
from preloaded import preloaded
from toy_experiment import Configuration, Grave, carry_on_with_forks, dying, measure, toy

SCRIPT = Path(__file__).parents[2] / "support" / "toy_experiment.py"


def dies(configuration, point, seed, draw):
    if point["sigma"] > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(configuration, point, seed, draw)


def fails(configuration, point, seed, draw):
    raise ZeroDivisionError("of the measurement")


def table_of(path):
    with Store(path) as store:
        return store.table()


def whole(tmp_path, name, jobs=1, **options):
    figure = toy(**options)
    with Store(tmp_path / name) as store:
        run(missing([figure], store, quick=False), store, jobs)
    return table_of(tmp_path / name)


@pytest.fixture
def loaded_workers(monkeypatch):
    """Workers that have torch already; others below start as those of a user do."""
    monkeypatch.setattr(runner, "multiprocessing", SimpleNamespace(get_context=lambda _: preloaded()))


def test_a_parallel_run_makes_the_table_of_a_serial_one_though_a_worker_dies_and_is_replaced(tmp_path, loaded_workers):
    grave = tmp_path / "grave"
    options = {"measure": dying, "seeds": 3, "configuration": Grave(pause=0.0, grave=str(grave))}
    parallel = whole(tmp_path, "parallel", jobs=2, **options)
    assert int(grave.read_text()) != os.getpid() and len(parallel[1]) == 5 * 3 * 4
    serial = whole(tmp_path, "serial", **options)
    assert serial == parallel == whole(tmp_path, "again", **options)


def test_what_is_there_is_not_measured_again(tmp_path):
    figure = toy(seeds=2)
    with Store(tmp_path / "s") as store:
        run(missing([figure], store, quick=True), store)
        assert len(missing([figure], store, quick=False)) == 8
        assert missing([figure], store, quick=True) == []
        assert len(missing([toy(seeds=2, configuration=Configuration(digits=9))], store, quick=True)) == 2
        assert len(missing([toy(seeds=2, version=2)], store, quick=True)) == 2


def test_draws_differ_by_point_seed_and_configuration():
    figure = toy()
    seeds = {figure.draw(point, seed) for point, seed in figure.grid(quick=False)}
    assert len(seeds) == 300
    assert toy(configuration=Configuration(digits=9)).draw({"sigma": 0.0}, 0) not in seeds


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_duplicate_nothing(tmp_path):
    """20 times kill -9 of the parent while two workers measure; then the run is carried to its end.

    On a busy machine the first of the runs that is not killed in time is the last; the five before it are enough.
    Parents and workers are forks of a process that has torch; the last run starts its processes anew.
    """
    expected = whole(tmp_path, "uninterrupted")
    path = tmp_path / "killed"
    moments, sizes = random.Random(0), [0]
    for _ in range(20):
        process = preloaded().Process(target=carry_on_with_forks, args=(path, 2))
        process.start()
        waited = time.monotonic()
        while not path.exists() and time.monotonic() - waited < 600:
            time.sleep(0.05)
        # counted from the first new row, the moment falls before, between and within commits
        while _size(path) <= sizes[-1] and process.is_alive():
            time.sleep(0.01)
        time.sleep(moments.random() * 0.04)
        process.kill()
        process.join()
        sizes.append(_size(path))
        if sizes[-1] == len(expected[1]):
            break
    assert 0 < sizes[1] < sizes[5] < len(expected[1])
    subprocess.run([sys.executable, str(SCRIPT), str(path), "2"], check=True)
    assert table_of(path) == expected


def _size(path):
    try:
        return len(table_of(path)[1])
    except Exception:  # it is just being made
        return 0


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path):
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path / "s"), "2"])
    children: list[int] = []
    while len(children) < 3 and process.poll() is None:  # two workers and the tracker of resources
        children = _children(process.pid)
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 300
    while any(_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children and not any(_alive(child) for child in children)


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_worker_that_dies_again_and_again_is_named(tmp_path, loaded_workers):
    figure = toy(measure=dies, seeds=1, configuration=Configuration(pause=0.0))
    with Store(tmp_path / "s") as store:
        with pytest.raises(WorkerError, match=r"^jobs: the worker died twice .* toy at sigma 1.333, seed 0; what was"):
            run(missing([figure], store, quick=False), store, jobs=2)
        assert len(store.done(figure)) >= 3  # what was measured stays


def test_a_measurement_that_fails_is_named(tmp_path, loaded_workers):
    figure = toy(measure=fails, seeds=1, points=1)
    with Store(tmp_path / "s") as store:
        with pytest.raises(WorkerError, match=r"task: toy at sigma .*: ZeroDivisionError: of the measurement"):
            run(missing([figure], store, quick=False), store, jobs=2)
        with pytest.raises(RangeError, match=r"^jobs: got 0"):
            run(missing([figure], store, quick=False), store, jobs=0)


def test_one_thread_during_a_measurement_and_as_many_as_before_after_it(tmp_path):
    import torch

    seen = []

    def threads(configuration, point, seed, draw):
        seen.append(torch.get_num_threads())
        return [MeasuredValue(1, "Q", "outer", 1.0)]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Store(tmp_path / "s") as store:
            run(missing([toy(measure=threads)], store, quick=True), store)
        assert torch.get_num_threads() == 2 and set(seen) == {1}
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_local_dask_cluster_makes_the_same_table(tmp_path):
    pytest.importorskip("distributed")
    figure = toy(seeds=2, configuration=Configuration(pause=0.0))
    with Store(tmp_path / "dask") as store:
        run(missing([figure], store, quick=False), store, jobs=1, dask="local")
    assert table_of(tmp_path / "dask") == whole(tmp_path, "serial", seeds=2, configuration=Configuration(pause=0.0))


@pytest.mark.slow
def test_a_dask_worker_killed_in_the_middle_costs_nothing(tmp_path):
    """Three workers, one of which dies by SIGKILL while it measures: its task goes to another."""
    pytest.importorskip("distributed")
    grave = tmp_path / "grave"
    figure = toy(measure=dying, seeds=4, configuration=Grave(pause=0.02, grave=str(grave)))
    with Store(tmp_path / "dask") as store:
        run(missing([figure], store, quick=False), store, jobs=3, dask="local")
    assert int(grave.read_text()) != os.getpid()
    with Store(tmp_path / "serial") as store:
        run(missing([figure], store, quick=False), store)
    assert table_of(tmp_path / "dask") == table_of(tmp_path / "serial")
    assert len(table_of(tmp_path / "dask")[1]) == 4 * 5 * 4
