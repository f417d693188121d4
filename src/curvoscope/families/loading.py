"""Models from a local Hugging Face folder: its weights and nothing else, no code of the folder's and no network."""

import contextlib
import importlib.util
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvoscope import checks
from curvoscope.errors import CurvoscopeError

GGUF = ".gguf"
SINGLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_SHARDS = "pytorch_model.bin", "pytorch_model.bin.index.json"

# What a class does, by transformers' tables of classes. The first that fits counts: BART is among the masked models,
# and an encoder has a causal variant.
_TABLES = {
    "text to text": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "sound to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "text class": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "token class": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
}
_BOTH_SIDES = ("text to text", "sound to text")  # kinds with an encoder and a decoder
_WITHOUT_HEAD = ("masked", "causal", "image", *_BOTH_SIDES)  # kinds that a body may be the body of
_BODIES = ("MODEL_MAPPING", "MODEL_FOR_PRETRAINING_MAPPING")
_ENDINGS = {  # of classes that transformers does not have
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForImageClassification": "image",
}
CURE = "load it in Python and give cv.hessian(model, loss_fn, batches) batches of your own"
_FLOATING = ("F64", "F32", "F16", "BF16")
_NAMED = 3  # keys that a message names


class LoadingError(CurvoscopeError, ValueError):
    """A model that cannot be loaded."""


class NotAModelError(LoadingError):
    """A path that is no folder with a configuration and weights."""


class CorruptFileError(LoadingError):
    """A file that is truncated, or is not what its name says."""


class UnknownArchitectureError(LoadingError):
    """An architecture that transformers does not have, or that has no loss of a known kind."""


class RemoteCodeError(LoadingError):
    """A folder that asks for code of its own, which is never run."""


class MissingWeightsError(LoadingError):
    """Weights that the folder does not have: they would be random numbers."""


class QuantisedError(LoadingError):
    """Weights that are not floating point, so that there is no derivative."""


class MissingPackageError(CurvoscopeError, ImportError):
    """A package must be installed first."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and what it predicts.

    `kind`: "causal" or "masked" tokens; the text that goes with another text ("text to text") or with sound ("sound to
    text"); the class of an "image", of a text ("text class") or of each token ("token class"); the digits of sums
    ("addition").
    """

    model: nn.Module
    kind: str
    unused: tuple[str, ...] = ()  # tensors of the folder that the model has no place for


def load(path: Path, dtype: torch.dtype = torch.float32) -> Loaded:
    """The model in the folder `path`: config.json and safetensors, in one file or in several with an index. A
    file `path` is a model in the format GGUF, whose weights are made floating point again.

    A folder without safetensors may have pickled weights (pytorch_model.bin); these are read with
    `torch.load(weights_only=True)`, which makes tensors and runs nothing.

    Args:
        path: the folder.
        dtype: of the weights, whatever the files have.
    """
    if path.is_file() and path.suffix == GGUF:
        return _load_gguf(path, dtype)
    if not path.is_dir():
        raise NotAModelError("model", f"{path} is not a folder; expected one with config.json and {SINGLE}")
    configuration = read_configuration(path)
    files = _files(path)
    needed = sum(_check(file) for file in files) * dtype.itemsize
    checks.fits(needed, None, f"the model in {path}", "take a smaller model, or --dtype float32")
    return _load(path, configuration, dtype, safe=files[0].suffix == ".safetensors")


def transformers() -> Any:
    """The package, or an error that says how to install it."""
    try:
        import transformers as package
    except ImportError as error:
        install = 'pip install "curvoscope[hf]", in the environment that curvoscope is installed in'
        raise MissingPackageError("model", f"models other than 'addition' need transformers: {install}") from error
    return package


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


def _files(path: Path) -> list[Path]:
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


def _check(file: Path) -> int:
    """How many numbers a file of weights has, once it is known to be whole and floating point."""
    return _check_safetensors(file) if file.suffix == ".safetensors" else _check_pickle(file)


def _check_safetensors(file: Path) -> int:
    transformers()  # safetensors comes with it
    import safetensors

    numbers = 0
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118  (it is no mapping)
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
    except Exception as error:  # torch raises a dozen kinds for what is no checkpoint
        raise CorruptFileError("model", message) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise CorruptFileError("model", message)
    return sum(tensor.numel() for tensor in tensors.values())


# ---- the model


def _load(path: Path, configuration: dict[str, Any], dtype: torch.dtype, safe: bool) -> Loaded:
    package = transformers()
    local = {"local_files_only": True, "trust_remote_code": False}  # nothing from the hub
    name = configuration.get("model_type", "nothing")
    try:
        config = package.AutoConfig.from_pretrained(path, **local)  # nosec B615
    except Exception as error:  # a bad value can fail anywhere in the class of the configuration
        if name not in package.CONFIG_MAPPING:
            raise UnknownArchitectureError(
                "model", f"{path / 'config.json'} has model_type {name!r}, which transformers does not know"
            ) from error
        raise CorruptFileError("model", f"{path / 'config.json'}: {_one_line(error)}") from error
    kind, model_class = _class(package, path, config)
    with quiet(package):
        try:
            model, found = model_class.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                use_safetensors=safe,
                weights_only=True,
                attn_implementation="sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are errors all the same, below
                local_files_only=True,
            )
        except Exception as error:  # whatever transformers does not like
            raise LoadingError("model", f"{path}: {_one_line(error)}") from error
    for reason in ("missing_keys", "mismatched_keys"):
        if found.get(reason):
            keys = sorted(key if isinstance(key, str) else key[0] for key in found[reason])
            what = "has no" if reason == "missing_keys" else "has another shape of"
            raise MissingWeightsError(
                "model", f"{path} {what} {_some(keys)}: they would be random in {type(model).__name__}"
            )
    return Loaded(model.eval(), kind, tuple(sorted(found.get("unexpected_keys", ()))))


def _load_gguf(path: Path, dtype: torch.dtype) -> Loaded:
    """A causal language model from one file."""
    package = transformers()
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError("model", f'to read {path.name} install gguf: pip install "curvoscope[gguf]"')
    with quiet(package), contextlib.redirect_stderr(io.StringIO()):  # its bar comes from tqdm
        try:
            model = package.AutoModelForCausalLM.from_pretrained(  # nosec B615
                path.parent, gguf_file=path.name, dtype=dtype, local_files_only=True, attn_implementation="sdpa"
            )
        except Exception as error:  # whatever transformers does not like
            raise LoadingError("model", f"{path}: {_one_line(error)}") from error
    return Loaded(model.eval(), "causal")


def _class(package: Any, path: Path, config: Any) -> tuple[str, Any]:
    """The class in `architectures`, and what it predicts; where that is a body without a head, its family's class."""
    known = {kind: _classes(package, table, config) for kind, table in _TABLES.items()}
    if not getattr(config, "is_encoder_decoder", False):  # a language model that reads sound or images as well
        known = {kind: [] if kind in _BOTH_SIDES else classes for kind, classes in known.items()}
    names = [str(name) for name in config.architectures or ()]
    for name in names:
        for kind, classes in known.items():
            found = next((one for one in classes if one.__name__ == name), None)
            if found is not None:
                return kind, found
    ends = [kind for name in names for ending, kind in _ENDINGS.items() if name.endswith(ending)]
    bodies = {one.__name__ for table in _BODIES for one in _classes(package, table, config)}
    several = len(getattr(config, "sub_configs", ())) > 1  # such as CLIP, which no single head goes on
    able = [kind for kind in _TABLES if kind in _WITHOUT_HEAD and known[kind]]
    if any(hasattr(package, name) for name in names) and (several or not bodies & set(names)):
        raise UnknownArchitectureError("model", f"{path} is {_some(names)}, which this command has no data for; {CURE}")
    chosen = [kind for kind in (ends or able) if kind in able]
    if not chosen:
        seen = _some(names) if names else "of no architecture"
        expected = ", ".join(f"...{ending}" for ending in _ENDINGS)
        raise UnknownArchitectureError(
            "model", f"{path} is {seen} with model_type {config.model_type!r}; expected one of {expected}, or {CURE}"
        )
    return chosen[0], known[chosen[0]][0]


def _classes(package: Any, table: str, config: Any) -> list[Any]:
    """The classes for a configuration in one of transformers' tables."""
    mapping = getattr(package, table)
    if type(config) not in mapping:
        return []
    found = mapping[type(config)]
    return list(found) if isinstance(found, tuple | list) else [found]


class quiet:  # noqa: N801
    """No progress bar and no report of transformers' own: what matters of it becomes an error or a line of ours."""

    def __init__(self, package: Any) -> None:
        self._logging = package.utils.logging

    def __enter__(self) -> None:
        self._level, self._bars = self._logging.get_verbosity(), self._logging.is_progress_bar_enabled()
        self._logging.set_verbosity_error()
        self._logging.disable_progress_bar()

    def __exit__(self, *exception: object) -> None:
        self._logging.set_verbosity(self._level)
        if self._bars:
            self._logging.enable_progress_bar()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
