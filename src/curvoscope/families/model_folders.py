"""A local Hugging Face folder: its configuration and its files of weights, checked before a model is made of them."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from curvoscope.errors import CurvoscopeError

SINGLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_SHARDS = "pytorch_model.bin", "pytorch_model.bin.index.json"
_FLOATING = ("F64", "F32", "F16", "BF16")


class LoadingError(CurvoscopeError, ValueError):
    """A model that cannot be loaded."""


class NotAModelError(LoadingError):
    """A path that is not a folder with a configuration and weights."""


class CorruptFileError(LoadingError):
    """A file that is truncated, or is not what its name says."""


class RemoteCodeError(LoadingError):
    """A folder that asks for code of its own, which is never run."""


class MissingWeightsError(LoadingError):
    """Weights that the folder does not have: they would be random numbers."""


class QuantisedError(LoadingError):
    """Weights that are not floating point, so that there is no derivative."""


def read_configuration(path: Path) -> dict[str, Any]:
    """config.json, once it is known to ask for no code of its own and for no quantised weights."""
    file = path / "config.json"
    if not file.is_file():
        hint = "; it has an adapter: merge it into its model first" if (path / "adapter_config.json").is_file() else ""
        raise NotAModelError("model", f"{path} has no config.json{hint}")
    configuration = _json(file)
    if configuration.get("auto_map"):
        asked = ", ".join(sorted(map(str, configuration["auto_map"])))
        raise RemoteCodeError("model", f"{file} requires custom code (auto_map: {asked}), which is never run")
    if configuration.get("quantization_config"):
        kind = configuration["quantization_config"]
        name = kind.get("quant_method", "unnamed") if isinstance(kind, dict) else kind
        raise QuantisedError("model", f"{file} has quantised weights ({name}); save the model without quantisation")
    return configuration


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFileError("model", f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptFileError("model", f"{file} has a {type(found).__name__}, expected an object")
    return found


# ---- the files of weights


def weight_files(path: Path) -> list[Path]:
    """The files of weights, safetensors before pickles, one file before several."""
    for single, index in ((SINGLE, SHARDED), (PICKLED, PICKLED_SHARDS)):
        if (path / single).is_file():
            return [path / single]
        if (path / index).is_file():
            return list(_shards(path / index))
    raise NotAModelError("model", f"{path} has no weights; expected {SINGLE} or {SHARDED}")


def _shards(index: Path) -> Iterator[Path]:
    names = _json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CorruptFileError("model", f"{index} has no weight_map")
    for name in sorted(set(map(str, names.values()))):
        if Path(name).name != name:
            raise CorruptFileError("model", f"{index} names {name!r}, which is outside the folder")
        if not (index.parent / name).is_file():
            raise MissingWeightsError("model", f"{index} names {name}, which is not there")
        yield index.parent / name


def numbers_in(file: Path) -> int:
    """How many numbers a file of weights has, once it is known to be whole and floating point."""
    return _check_safetensors(file) if file.suffix == ".safetensors" else _check_pickle(file)


def _check_safetensors(file: Path) -> int:
    import safetensors

    numbers = 0
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118  (it is not a mapping)
                part = content.get_slice(name)
                kind, size = part.get_dtype(), torch.Size(part.get_shape()).numel()
                if kind not in _FLOATING and name.endswith("weight"):
                    raise QuantisedError("model", f"{name} in {file} is {kind}, expected floating point")
                numbers += size
    except safetensors.SafetensorError as error:
        raise CorruptFileError("model", f"{file} is truncated or corrupt: {error}; copy it again") from error
    return numbers


def _check_pickle(file: Path) -> int:
    message = f"{file} is corrupt, or has more than tensors: torch.load(weights_only=True) refuses it"
    try:
        with warnings.catch_warnings(action="ignore"):
            tensors = torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:  # torch raises a dozen kinds for what is not a checkpoint
        raise CorruptFileError("model", message) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise CorruptFileError("model", message)
    return sum(tensor.numel() for tensor in tensors.values())
