"""The file of an offline run of Weights & Biases: the log format of LevelDB, with messages of its own inside."""

import json
from pathlib import Path

_BLOCK, _HEADER, _START = 32768, 7, 7  # bytes of a block, of a record's header, of the head of the file
_FIRST, _MIDDLE = 2, 3  # kinds of a record that goes on in the next one


def messages(path: Path) -> list[bytes]:
    """The messages of the file, one after another."""
    data, place, found, parts = path.read_bytes(), _START, [], b""
    assert data[:4] == b":W&B"
    while place + _HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:  # no header begins so late in a block
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind not in (_FIRST, _MIDDLE):
            found.append(parts)
            parts = b""
    return found


def history(folder: Path) -> list[dict[str, object]]:
    """The rows that were logged, as names and values."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("*.wandb")
    records = [Record.FromString(message) for message in messages(path)]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
