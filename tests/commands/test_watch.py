"""`curvoscope watch`: what it writes, stopping, killing and going on."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from curvoscope.commands import OutputError, watch, watch_run
from curvoscope.commands.document import REPORTS
from curvoscope.commands.reproduce import STORE
from curvoscope.database import StoreError
from curvoscope.errors import MissingPackageError, ModelError, RangeError
from curvoscope.papers.experiments import Store
from curvoscope.training import Record, RunStore

SMALL = {"d": 4, "sequences": 4, "every": 2, "budget": 1.0}


def weights(out):
    return torch.load(out / watch.CHECKPOINT, weights_only=True)["model"]


def same_weights(first, second):
    first, second = weights(first), weights(second)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def stored(out, name="run 1"):
    with RunStore(out / STORE) as store:
        return store.run(name).records()


def test_writes_records_figure_and_one_json_document(tmp_path, capsys):
    assert watch.run(watch.WatchOptions(steps=3, **SMALL), tmp_path, False, True) == 0
    out = capsys.readouterr().out
    document = json.loads(out)
    assert (tmp_path / watch.DOCUMENT).read_text() == out
    assert [record["step"] for record in document["records"]] == [1, 3]
    assert [Record.from_facts(facts) for facts in document["records"]] == stored(tmp_path)
    assert (tmp_path / "watch.png").read_bytes().startswith(b"\x89PNG")
    assert all((tmp_path / name).is_file() for name in REPORTS)
    assert document["seed"] == 0 and {"curvoscope", "torch", "python"} <= document["versions"].keys()
    assert document["command"].startswith("curvoscope watch --steps 3 --seed 0 --task addition --d 4 ")
    with RunStore(tmp_path / STORE) as store:
        facts = store.run("run 1").facts
    assert facts["versions"] == document["versions"] and facts["configuration"]["seed"] == 0


@pytest.mark.slow
def test_a_text_model(undrawn, tmp_path, capsys):
    options = watch.WatchOptions(steps=2, task="text", **SMALL)
    assert watch.run(options, tmp_path, False, True) == 0
    document = json.loads(capsys.readouterr().out)
    record = Record.from_facts(document["records"][0])
    assert {"h.0.attn", "h.1.attn"} == record.attention.keys()
    assert "corpus" in document["about"][1] and document["configuration"]["task"] == "text"
    assert 4 < record.probe_loss < 8  # of 256 bytes, log 256 = 5.5 at random


def test_batches_of_text_are_of_the_text_and_of_the_seed_alone():
    run = watch_run.TrainingRun(watch.WatchOptions(task="text", **SMALL))
    (inputs, targets), (again, _), (other, _) = (run._data.batch(seed) for seed in (5, 5, 6))
    assert torch.equal(inputs, again) and not torch.equal(inputs, other) and inputs.shape == (4, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    from curvoscope.families import text

    assert bytes(inputs[0].tolist()) in text.corpus().encode()


@pytest.mark.slow
def test_a_logger(undrawn, tmp_path, capsys, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watch.run(watch.WatchOptions(steps=3, **SMALL), tmp_path, False, False, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("curvature/largest_eigenvalue")
    found = [(record.step, pytest.approx(record.largest_eigenvalue.value)) for record in stored(tmp_path)]
    assert [(event.step, event.value) for event in events] == found and len(found) == 2
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingPackageError, match=r"^logger: 'tensorboard' needs its package"):
        watch.run(watch.WatchOptions(steps=1, **SMALL), tmp_path / "none", False, False, "tensorboard")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "gauss-newton"])
def test_stopped_and_resumed_it_is_the_same_run(undrawn, tmp_path, monkeypatch, capsys, optimizer):
    budget = 1.0 if optimizer == "adam" else 1e-6  # the others: after the first step nothing is measured
    options = watch.WatchOptions(steps=3, optimizer=optimizer, **{**SMALL, "budget": budget})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    watch.run(options, whole, False, False)
    step = watch.TrainingRun.step

    def interrupted(self):
        if self.monitor.steps == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(watch.TrainingRun, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert watch.run(options, parts, False, False) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert [record.step for record in stored(parts)] == [1]
    assert "--resume" in capsys.readouterr().out
    monkeypatch.setattr(watch.TrainingRun, "step", step)
    assert watch.run(options, parts, True, False) == 0
    assert [record.step for record in stored(parts)] == ([1, 3] if optimizer == "adam" else [1])
    assert same_weights(whole, parts)


@pytest.mark.slow
def test_a_run_that_dies_goes_on_from_its_last_checkpoint(undrawn, tmp_path, monkeypatch, capsys):
    """It dies two steps after the checkpoint; what was measured since then is kept."""
    options = watch.WatchOptions(steps=4, **{**SMALL, "every": 1})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    watch.run(options, whole, False, True)
    step, keep, kept = watch.TrainingRun.step, watch.save, []

    def seldom(path, state):
        if state["monitor"]["steps"] in (0, 1):
            kept.append(state["monitor"]["steps"])
            keep(path, state)

    def dies(self):
        if self.monitor.steps == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(watch, "save", seldom)
    monkeypatch.setattr(watch.TrainingRun, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        watch.run(options, parts, False, True)
    assert kept == [0, 1] and [record.step for record in stored(parts)] == [1, 2, 3]
    monkeypatch.setattr(watch, "save", keep)
    monkeypatch.setattr(watch.TrainingRun, "step", step)
    capsys.readouterr()
    watch.run(options, parts, True, True)
    document = json.loads(capsys.readouterr().out)
    assert [record["step"] for record in document["records"]] == list(range(1, 5))
    assert same_weights(whole, parts)
    pairs = zip(stored(whole), stored(parts), strict=True)
    assert all(a.probe_loss == b.probe_loss and a.gradient_norm == b.gradient_norm for a, b in pairs)


KILLED = """
import os, signal, sys
from curvoscope.cli import main
from curvoscope.commands import watch

step, left = watch.TrainingRun.step, [int(sys.argv.pop(1))]

def counted(*arguments):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)

watch.TrainingRun.step = counted
main()
"""


@pytest.mark.slow
def test_killed_it_goes_on_and_ends_with_the_same_weights(tmp_path):
    """Killed by itself in the middle of a step, at the same one on a machine of any speed."""
    words = ["watch", "--steps", "400", "--d", "8", "--sequences", "16", "--budget", "0.5", "--every", "5", "--json"]
    command = [sys.executable, "-c", "from curvoscope.cli import main; main()", *words]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run([*command, "--out", str(whole)], check=True, capture_output=True)
    for steps, resume in ((150, []), (100, ["--resume"])):
        process = [sys.executable, "-c", KILLED, str(steps), *words, "--out", str(parts), *resume]
        assert subprocess.run(process, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
    seen = [record.step for record in stored(parts)]
    done = subprocess.run([*command, "--out", str(parts), "--resume"], check=True, capture_output=True, text=True)
    steps = [record["step"] for record in json.loads(done.stdout)["records"]]
    assert set(seen) <= set(steps) and steps == sorted(steps) and seen
    assert same_weights(whole, parts)


@pytest.mark.slow
def test_a_second_run_in_a_directory_leaves_the_records_of_the_first(undrawn, tmp_path, capsys):
    watch.run(watch.WatchOptions(steps=1, **SMALL), tmp_path, False, True)
    first = stored(tmp_path)
    watch.run(watch.WatchOptions(steps=1, **{**SMALL, "d": 5}), tmp_path, False, True)
    assert stored(tmp_path) == first and len(stored(tmp_path, "run 2")) == 1


@pytest.mark.parametrize(("options", "steps"), [({}, 100), ({"steps": 39}, 2), ({"steps": 3}, 1), ({"every": 7}, 7)])
def test_at_most_twenty_measurements_unless_told_otherwise(options, steps):
    assert watch.WatchOptions(**options).spacing == steps and watch.WatchOptions(**options).budget == 1


class TestErrors:
    def test_nothing_to_resume(self, tmp_path):
        with pytest.raises(ModelError, match="without --resume"):
            watch.run(watch.WatchOptions(steps=1, **SMALL), tmp_path, True, False)

    def test_another_model(self, undrawn, tmp_path, capsys):
        watch.run(watch.WatchOptions(steps=1, **SMALL), tmp_path, False, False)
        for name, value in (("d", 5), ("task", "text"), ("seed", 3)):
            before = watch.WatchOptions(**SMALL)
            with pytest.raises(ModelError, match=f"give --{name} {getattr(before, name)}"):
                watch.run(watch.WatchOptions(steps=1, **{**SMALL, name: value}), tmp_path, True, False)

    def test_an_option_that_was_not_given(self):
        run = watch_run.TrainingRun(watch.WatchOptions(**{**SMALL, "every": 1}))
        state = run.state()
        with pytest.raises(ModelError, match=r"^every: is 1, and was not given in the run to resume; leave it out"):
            run.load({**state, "options": {**state["options"], "every": None}})

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but no more", b"no checkpoint" * 50])
    def test_a_checkpoint_that_cannot_be_read(self, tmp_path, content):
        (tmp_path / watch.CHECKPOINT).write_bytes(content)
        with pytest.raises(ModelError, match=r"^resume: .* cannot be read: .* without --resume$"):
            watch.run(watch.WatchOptions(steps=1, **SMALL), tmp_path, True, False)
        assert (tmp_path / watch.CHECKPOINT).read_bytes() == content

    def test_a_checkpoint_of_something_else(self, tmp_path):
        torch.save({"weights": torch.zeros(2)}, tmp_path / watch.CHECKPOINT)
        with pytest.raises(ModelError, match="is not a checkpoint of a watched run"):
            watch.run(watch.WatchOptions(steps=1, **SMALL), tmp_path, True, False)

    def test_a_full_disk_leaves_no_half_checkpoint(self, tmp_path, monkeypatch):
        def full(state, path):
            path.write_bytes(b"half")
            raise OSError("no space left")

        watch_run.save(tmp_path / watch.CHECKPOINT, {"run": "old"})
        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(OutputError, match=r"^out: cannot write .*: no space left"):
            watch_run.save(tmp_path / watch.CHECKPOINT, {"run": "new"})
        assert [path.name for path in tmp_path.iterdir()] == [watch.CHECKPOINT]
        assert torch.load(tmp_path / watch.CHECKPOINT, weights_only=True) == {"run": "old"}

    def test_the_store_of_another_command(self, tmp_path):
        Store(tmp_path / STORE).close()
        with pytest.raises(StoreError, match="not of monitored runs; name another file"):
            watch.run(watch.WatchOptions(steps=1, **SMALL), tmp_path, False, False)

    def test_options(self, tmp_path):
        wrong = {"steps": 0, "optimizer": "lion", "lr": 0.0, "seed": -1, "task": "chess", "sequences": 0}
        for name, value in wrong.items():
            with pytest.raises(RangeError, match=f"^{name}: "):
                watch.WatchOptions(**{name: value})
        for name, value in (("every", 0), ("budget", 0.0), ("d", 0)):
            with pytest.raises(RangeError, match=f"^{name}: "):
                watch.run(watch.WatchOptions(**{**SMALL, name: value}), tmp_path, False, False)
        with RunStore(tmp_path / STORE) as store:
            assert store.names == []


@pytest.mark.slow
def test_a_store_that_fails_does_not_end_the_run(undrawn, tmp_path, monkeypatch, capsys):
    def full(self, record):
        raise StoreError("store", "the disk is full")

    monkeypatch.setattr("curvoscope.training.runs.StoredRun.add", full)
    assert watch.run(watch.WatchOptions(steps=3, **SMALL), tmp_path, False, True) == 0
    document = json.loads(capsys.readouterr().out)
    assert [record["step"] for record in document["records"]] == [1, 3]
    assert "the disk is full" in document["incidents"][0]["message"]
