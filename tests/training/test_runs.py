"""The store of monitored runs, and the monitor that writes into it."""

import os
import signal
import sqlite3

import pytest
import torch
from torch import nn

from autodiff_cases import MLP, points
from curvoscope.database import StoreError
from curvoscope.papers.experiments import Store
from curvoscope.training import CurvatureMonitor, Incident, RunStore
from preloaded import preloaded


def monitor(store=None, **options):
    x, y = points()
    return CurvatureMonitor(
        MLP(nn.Tanh), nn.functional.mse_loss, [(x, y)], store=store, **{"every": 1, "budget": 1.0, **options}
    )


def test_records_and_incidents_come_back(tmp_path):
    path = tmp_path / "deep" / "runs.sqlite"
    with RunStore(path) as store:
        run = monitor(store.run("first", {"seed": 3}))
        run.step(1.0, 0.1)
        run.step(float("nan"), 0.1)
        with RunStore(path) as other:  # what is there is there at once, for all
            assert other.run("first").records() == run.records
        run.step(0.5, 0.1)
        store.run("second", {})
    with RunStore(path) as store:
        assert store.names == ["first", "second"]
        stored = store.run("first")
        assert stored.facts == {"seed": 3} and stored.records() == run.records
        assert stored.incidents() == run.incidents and [one.kind for one in run.incidents] == ["paused", "resumed"]
        assert store.run("second").records() == []
        with pytest.raises(StoreError, match="has no run 'third', it has 'first', 'second'"):
            store.run("third")


def test_what_is_there_stays_and_a_step_has_one_record(tmp_path):
    with RunStore(str(tmp_path / "s")) as store:
        run = store.run("a", {"seed": 1})
        first, second = monitor(run), monitor(store.run("a", {"seed": 2}))
        first.step(1.0, 0.1)
        second.step(2.0, 0.1)
        assert run.facts == {"seed": 1} and run.records() == second.records
        for _ in range(2):
            run.note(Incident(1, "failed", "once"))
        assert run.incidents() == [Incident(1, "failed", "once")]


def test_the_table_has_a_row_for_each_number(tmp_path):
    with RunStore(tmp_path / "s") as store:
        run = monitor(store.run("a", {"seed": 5, "versions": {"torch": "2.0"}}))
        record = run.step(1.0, 0.1)
        columns, rows = store.table()
    assert columns == ["run", "step", "quantity", "of", "value", "stderr", "seed", "curvoscope", "torch", "python"]
    assert {row[6:] for row in rows} == {(5, None, "2.0", None)}
    found = {(quantity, of): (value, stderr) for _, _, quantity, of, value, stderr, *_ in rows}
    assert {row[:2] for row in rows} == {("a", 1)} and len(found) == len(rows)
    assert found["loss", ""] == (1.0, None) and found["lr", ""] == (0.1, None) and found["edge", ""] == (20.0, None)
    top, norm = record.largest_eigenvalue, record.details.blocks["up.weight"].outer
    assert found["largest_eigenvalue", ""] == (top.value, top.stderr)
    assert found["outer_norm", "up.weight"] == (norm.value, norm.stderr)


def test_a_store_that_fails_is_an_incident_and_what_waited_is_stored_later(tmp_path):
    with RunStore(tmp_path / "s") as store:
        run = store.run("a", {})
        watching = monitor(run)
        store._connection.execute("PRAGMA query_only = ON")
        assert watching.step(1.0, 0.1) is not None and watching.step(1.0, 0.1) is not None
        assert [(one.step, one.kind) for one in watching.incidents] == [(1, "failed")]
        assert "store: StoreError: store: cannot write" in watching.incidents[0].message
        store._connection.execute("PRAGMA query_only = OFF")
        assert run.records() == []
        watching.step(1.0, 0.1)
        assert run.records() == watching.records and len(watching.records) == 3
        assert run.incidents() == watching.incidents


def test_a_store_that_fails_first_at_an_incident_is_told_of_with_the_next_record(tmp_path):
    store = RunStore(tmp_path / "s")
    watching = monitor(store.run("a", {}))
    store.close()
    watching.step(float("nan"), 0.1)
    watching.step(1.0, 0.1)
    watching.step(1.0, 0.1)
    assert [one.kind for one in watching.incidents] == ["paused", "resumed", "failed"]
    assert watching.incidents[-1].message.startswith("store: StoreError")


def test_training_goes_on_with_a_store_that_is_closed(tmp_path):
    def weights(broken):
        watching = None
        if broken:
            store = RunStore(tmp_path / "s")
            watching = monitor(store.run("a", {}))
            store.close()
        model = watching._model if broken else MLP(nn.Tanh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = points()
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if broken:
                watching.step(loss, 0.1)
        assert not broken or (len(watching.records) == 3 and watching.incidents[0].kind == "failed")
        return model.state_dict()

    plain, watched = weights(False), weights(True)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def record_and_die(path):
    watching = monitor(RunStore(path).run("a", {}))
    for _ in range(3):
        watching.step(1.0, 0.1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_is_killed_loses_nothing_that_was_written(tmp_path):
    path = tmp_path / "s"
    process = preloaded().Process(target=record_and_die, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with RunStore(path) as store:
        assert [record.step for record in store.run("a").records()] == [1, 2, 3]


class TestForeignFiles:
    def test_of_another_program(self, tmp_path):
        connection = sqlite3.connect(tmp_path / "s")
        connection.execute("CREATE TABLE runs (x)")
        connection.close()
        with pytest.raises(StoreError, match=r"^store: .* is a database of another program; name another file"):
            RunStore(tmp_path / "s")

    def test_of_experiments_and_the_other_way_round(self, tmp_path):
        Store(tmp_path / "experiments").close()
        with pytest.raises(StoreError, match="is a database of values of experiments, not of monitored runs"):
            RunStore(tmp_path / "experiments")
        RunStore(tmp_path / "runs").close()
        with pytest.raises(StoreError, match="is a database of monitored runs, not of values of experiments"):
            Store(tmp_path / "runs")

    def test_of_a_newer_version(self, tmp_path):
        RunStore(tmp_path / "s").close()
        connection = sqlite3.connect(tmp_path / "s")
        connection.execute("PRAGMA user_version = 7")
        connection.close()
        with pytest.raises(StoreError, match="has version 7, this program knows 1; use a newer curvoscope"):
            RunStore(tmp_path / "s")

    def test_that_is_none(self, tmp_path):
        (tmp_path / "s").write_bytes(b"not a database at all" * 100)
        with pytest.raises(StoreError, match="is damaged"):
            RunStore(tmp_path / "s")
