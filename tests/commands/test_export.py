"""`curvoscope export` of a monitored run; that of experiments is tested with `reproduce`."""

import csv
import io

import pytest

from curvoscope.commands import export, watch
from curvoscope.commands.reproduce import STORE
from curvoscope.database import StoreError
from curvoscope.errors import RangeError
from curvoscope.training import RunStore
from curvoscope.versions import versions


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "write_report", lambda out, facts: "{}")  # nothing is read of it
        watch.run(watch.WatchOptions(steps=3, d=4, sequences=4, every=2, budget=1.0), out, False, False)
    return out


def test_csv_of_a_directory(run, capsys):
    export.run(run, "csv", None)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    with RunStore(run / STORE) as store:
        records = {record.step: record for record in store.run("run 1").records()}
    assert {(row["seed"], *(row[name] for name in versions())) for row in rows} == {("0", *versions().values())}
    assert {int(row["step"]) for row in rows} == {1, 3} and {row["run"] for row in rows} == {"run 1"}
    for row in rows:
        if row["quantity"] == "trace":
            trace = records[int(row["step"])].details.trace
            assert (float(row["value"]), float(row["stderr"])) == (trace.value, trace.stderr)
    assert {row["of"] for row in rows if row["quantity"] == "functional_norm"} == records[1].details.blocks.keys()


def test_parquet_of_a_file_has_the_same_numbers(run, tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    export.run(run / STORE, "parquet", tmp_path / "table.parquet")
    export.run(run, "csv", tmp_path / "table.csv")
    table = parquet.read_table(tmp_path / "table.parquet").to_pylist()
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(table) == len(rows)
    for one, other in zip(table, rows, strict=True):
        assert [one["quantity"], one["of"]] == [other["quantity"], other["of"]] and one["value"] == float(
            other["value"]
        )
        assert one["stderr"] == (float(other["stderr"]) if other["stderr"] else None)


def test_a_file_that_is_no_store(tmp_path):
    (tmp_path / STORE).write_bytes(b"no store" * 300)
    with pytest.raises(StoreError, match="is damaged"):
        export.run(tmp_path, "csv", None)


def test_a_run_without_a_store(tmp_path):
    with pytest.raises(RangeError, match=r"^RUN: there is no store at .*; give a run of watch or reproduce"):
        export.run(tmp_path, "csv", None)
