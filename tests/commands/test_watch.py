import json
import os
import signal

import pytest
import torch

from curvoscope.commands import watch
from curvoscope.errors import ModelError, RangeError
from curvoscope.training import Record

SMALL = {"d": 4, "sequences": 4, "every": 2, "budget": 1.0}


def weights(out):
    return torch.load(out / watch.CHECKPOINT, weights_only=True)["model"]


def lines(out):
    return [Record.from_facts(json.loads(line)) for line in (out / watch.RECORDS).read_text().splitlines()]


def test_writes_records_figure_and_one_json_document(tmp_path, capsys):
    assert watch.run(watch.Options(steps=3, **SMALL), tmp_path, False, True) == 0
    document = json.loads(capsys.readouterr().out)
    assert [record["step"] for record in document["records"]] == [1, 3]
    assert [Record.from_facts(facts) for facts in document["records"]] == lines(tmp_path)
    assert (tmp_path / watch.FIGURE).read_bytes().startswith(b"\x89PNG")


def test_stopped_and_resumed_it_is_the_same_run(tmp_path, monkeypatch, capsys):
    options = watch.Options(steps=3, **SMALL)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    watch.run(options, whole, False, False)
    step = watch._Run.step

    def interrupted(self):
        if self.monitor.steps == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(watch._Run, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert watch.run(options, parts, False, False) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert [record.step for record in lines(parts)] == [1]
    assert "--resume" in capsys.readouterr().out
    monkeypatch.setattr(watch._Run, "step", step)
    assert watch.run(options, parts, True, False) == 0
    assert [record.step for record in lines(parts)] == [1, 3]
    first, second = weights(whole), weights(parts)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_errors(tmp_path):
    with pytest.raises(ModelError, match="without --resume"):
        watch.run(watch.Options(steps=1, **SMALL), tmp_path, True, False)
    watch.run(watch.Options(steps=1, **SMALL), tmp_path, False, False)
    with pytest.raises(ModelError, match="give --d 4"):
        watch.run(watch.Options(steps=1, **{**SMALL, "d": 5}), tmp_path, True, False)
    for options in ({"steps": 0}, {"optimizer": "lion"}, {"lr": 0.0}, {"seed": -1}):
        with pytest.raises(RangeError, match=next(iter(options))):
            watch.Options(**options)
    with pytest.raises(RangeError, match="every"):
        watch.run(watch.Options(every=0), tmp_path, False, False)
