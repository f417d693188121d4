import os
import resource
import sqlite3

import pytest

from curvoscope.errors import NonFiniteError
from curvoscope.papers.experiments import MeasuredValue, Store, StoreError
from curvoscope.versions import versions
from preloaded import preloaded
from toy_experiment import Configuration, toy

VALUE = MeasuredValue(1, "Q", "outer", 0.1 + 0.2, 1e-300)


def filled(path):
    with Store(path) as store:
        store.add(
            toy(), {"sigma": 1 / 3}, 7, [VALUE, MeasuredValue(2, "V", "total", 5e-324, quantity="trace", at=-0.25)]
        )
    return path


def test_values_come_back_to_the_last_bit(tmp_path):
    path = filled(tmp_path / "runs" / "store.sqlite")
    with Store(path) as store:
        rows = store.rows(toy(), quick=False)
        assert store.done(toy()) == {('{"sigma":0.3333333333333333}', 7)}
    assert [row.found for row in rows] == [VALUE, MeasuredValue(2, "V", "total", 5e-324, quantity="trace", at=-0.25)]
    assert rows[0].point == {"sigma": 1 / 3} and rows[0].seed == 7


def test_a_change_of_configuration_or_version_finds_nothing(tmp_path):
    with Store(filled(tmp_path / "s")) as store:
        assert store.rows(toy(configuration=Configuration(digits=9)), quick=False) == []
        assert store.done(toy(version=2)) == set()
        assert len(store.done(toy())) == 1
        assert store.rows(toy(), quick=True) == []  # the point is not on the quick grid


def test_a_point_that_is_there_is_not_overwritten(tmp_path):
    with Store(filled(tmp_path / "s")) as store:
        store.add(toy(), {"sigma": 1 / 3}, 7, [MeasuredValue(1, "Q", "outer", 99.0)])
        assert store.rows(toy(), quick=False)[0].found == VALUE


def test_forgetting_is_of_one_figure(tmp_path):
    other = toy(version=2)
    with Store(filled(tmp_path / "s")) as store:
        store.add(other, {"sigma": 0.0}, 0, [VALUE])
        store.forget(toy())
        assert store.done(toy()) == set() and len(store.done(other)) == 1
        assert store.read("SELECT count(*) FROM programs") == [(1,)]


def test_forgetting_is_whole_or_not_at_all(tmp_path):
    """Programs that stay behind would be named as those of values measured later."""
    with Store(filled(tmp_path / "s")) as store:
        store._connection.execute(
            "CREATE TRIGGER kept BEFORE DELETE ON programs BEGIN SELECT RAISE(ABORT, 'kept'); END"
        )
        with pytest.raises(StoreError):
            store.forget(toy())
        assert len(store.done(toy())) == 1


def test_wal_mode(tmp_path):
    connection = sqlite3.connect(filled(tmp_path / "s"))
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_no_number_is_stored_that_is_none(tmp_path):
    with Store(tmp_path / "s") as store:
        for bad in (float("nan"), float("inf")):
            with pytest.raises(NonFiniteError, match="toy measured"):
                store.add(toy(), {"sigma": 0.0}, 0, [VALUE, MeasuredValue(1, "V", "outer", bad)])
        assert store.done(toy()) == set()


def test_a_store_of_a_newer_version_is_left_alone(tmp_path):
    path = filled(tmp_path / "s")
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"^store: .* has version 99, this program knows 2"):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_store_is_said_and_left_alone(tmp_path, content):
    path = tmp_path / "s"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"^store: .* is damaged .* left as it is"):
        Store(path)
    assert path.read_bytes() == content


def test_a_store_with_a_hole_is_said_and_left_alone(tmp_path):
    path = tmp_path / "s"
    with Store(path) as store:
        for seed in range(200):
            store.add(toy(), {"sigma": 0.0}, seed, [VALUE])
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 6000] = b"\x55" * 6000
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is damaged"):
        Store(path)
    assert path.read_bytes() == content


def test_a_database_of_another_program(tmp_path):
    connection = sqlite3.connect(tmp_path / "s")
    connection.execute("CREATE TABLE measured (x)")
    connection.close()
    with pytest.raises(StoreError, match="of another program"):
        Store(tmp_path / "s")


def test_a_path_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"^store: cannot open"):
        Store(tmp_path / "file" / "store.sqlite")
    with pytest.raises(StoreError, match=r"^store: cannot open"):
        Store(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_store(tmp_path):
    path = filled(tmp_path / "s")
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    with pytest.raises(StoreError, match="store: cannot"), Store(path) as store:
        store.add(toy(), {"sigma": 0.0}, 0, [VALUE])
    tmp_path.chmod(0o755)


def test_a_store_opened_read_only_says_so(tmp_path):
    path = filled(tmp_path / "s")
    store = Store(path)
    store._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match=r"cannot write .*readonly.*; what was measured before stays"):
        store.add(toy(), {"sigma": 0.0}, 0, [VALUE])
    store.close()


def fill(path, told):
    """Add values until the store refuses, and write down which one it was."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    with Store(path) as store:
        try:
            for seed in range(100_000):
                store.add(toy(), {"sigma": 0.0}, seed, [MeasuredValue(1, "Q", "outer", float(seed))])
        except StoreError as error:
            told.write_text(f"{seed} {error}")


def test_a_full_disk_keeps_what_was_measured(tmp_path):
    """A limit on the size of files stands for a full disk."""
    path = tmp_path / "s"
    process = preloaded().Process(target=fill, args=(path, tmp_path / "told"))
    process.start()
    process.join()
    assert process.exitcode == 0
    seed, message = (tmp_path / "told").read_text().split(" ", 1)
    assert int(seed) > 5
    assert message.startswith("store: cannot write") and "what was measured before stays" in message
    with Store(path) as store:
        columns, table = store.table()
        values = [row[columns.index("value")] for row in table]
    assert values == [float(i) for i in range(int(seed))]


def test_a_store_of_the_first_version_is_read_and_goes_on(tmp_path):
    """It knew nothing of programs."""
    path = filled(tmp_path / "s")
    connection = sqlite3.connect(path)
    connection.executescript("DROP TABLE programs; PRAGMA user_version = 1")
    connection.close()
    with Store(path) as store:
        store.add(toy(), {"sigma": 0.0}, 8, [VALUE])
        columns, table = store.table()
    found = {row[columns.index("seed")]: row[columns.index("torch")] for row in table}
    assert found == {7: None, 8: versions()["torch"]}
