"""What a command is asked to look at."""

import pytest

from curvoscope.commands.request import Request


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt2-tiny", "gpt2-tiny"),
        ("/models/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1.gguf"),
        ("models/my-llama/", "my-llama"),
    ],
)
def test_a_path_is_named_by_its_last_part(model, name):
    assert Request(model, 0).name == name


def test_the_folder_one_is_in_is_named(tmp_path, monkeypatch):
    (tmp_path / "my-llama").mkdir()
    monkeypatch.chdir(tmp_path / "my-llama")
    assert Request(".", 0).name == "my-llama"
