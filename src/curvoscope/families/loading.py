"""Models from a local Hugging Face folder: its weights and nothing else, no code of the folder's and no network."""

import contextlib
import importlib.util
import inspect
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvoscope import checks
from curvoscope.autodiff.kernels import rescales
from curvoscope.errors import CurvoscopeError, MissingPackageError, RangeError
from curvoscope.families.tasks import HEADS_OF_BODIES, ModelTask, bodies_of, classes_of

GGUF = ".gguf"
SINGLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_SHARDS = "pytorch_model.bin", "pytorch_model.bin.index.json"

_ENDINGS = {  # of classes that transformers does not have
    "ForCausalLM": ModelTask.CAUSAL,
    "LMHeadModel": ModelTask.CAUSAL,
    "ForMaskedLM": ModelTask.MASKED,
    "ForImageClassification": ModelTask.IMAGE_CLASSIFICATION,
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


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and what it predicts: a `ModelTask`, or "addition".

    `unused`: tensors of the folder that the model has no place for. `saved_from`: the classes that the folder says it
    was saved from, if the model is of none of them.
    """

    model: nn.Module
    task: str
    unused: tuple[str, ...] = ()
    saved_from: tuple[str, ...] | None = None


def load(path: Path, dtype: torch.dtype = torch.float32, task: str | None = None) -> Loaded:
    """The model in the folder `path`: config.json and safetensors, in one file or in several with an index. A
    file `path` is a model in the format GGUF, whose weights are made floating point again.

    A folder without safetensors may have pickled weights (pytorch_model.bin); these are read with
    `torch.load(weights_only=True)`, which makes tensors and runs nothing.

    Args:
        path: the folder.
        dtype: of the weights, whatever the files have.
        task: what it predicts, a `ModelTask`; None: what the class predicts that the folder was saved from.
    """
    chosen = None if task is None else task_of(task)
    if path.is_file() and path.suffix == GGUF:
        if chosen not in (None, ModelTask.CAUSAL):
            raise RangeError("task", f"got {task}, but a GGUF file holds a causal model; leave it out")
        return _load_gguf(path, dtype)
    if not path.is_dir():
        raise NotAModelError("model", f"{path} is not a folder; expected one with config.json and {SINGLE}")
    configuration = read_configuration(path)
    files = _files(path)
    needed = sum(_check(file) for file in files) * dtype.itemsize
    checks.fits(needed, None, f"the model in {path}", "take a smaller model, or --dtype float32")
    return _load(path, configuration, dtype, files[0].suffix == ".safetensors", chosen)


def task_of(name: str) -> ModelTask:
    """The task of that name."""
    return ModelTask(checks.choice("task", name, tuple(map(str, ModelTask))))


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


def _load(path: Path, configuration: dict[str, Any], dtype: torch.dtype, safe: bool, task: ModelTask | None) -> Loaded:
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
    found_task, model_class = _class(package, path, config, task)
    options: dict[str, Any] = {}
    if found_task is ModelTask.EMBEDDING and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
        options["add_pooling_layer"] = False  # the embedding is made of the states
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
                **options,
            )
        except Exception as error:  # whatever transformers does not like
            raise LoadingError("model", f"{path}: {_one_line(error)}") from error
    name = type(model).__name__
    saved_from = tuple(str(one) for one in config.architectures or ())
    for reason in ("missing_keys", "mismatched_keys"):
        if found.get(reason):
            keys = sorted(key if isinstance(key, str) else key[0] for key in found[reason])
            what = "has no" if reason == "missing_keys" else "has another shape of"
            origin = "" if name in saved_from else f", and the folder was saved from {_some(saved_from) or 'no class'}"
            able = task is None and origin and classes_of(package, config)[ModelTask.EMBEDDING]
            cure = "; --task embedding reads it without a head" if able else ""
            raise MissingWeightsError(
                "model", f"{path} {what} {_some(keys)}: they would be random in {name}{origin}{cure}"
            )
    if hasattr(model, "set_experts_implementation") and not _can_group(model):
        model.set_experts_implementation("eager")  # one by one
    unused = tuple(sorted(found.get("unexpected_keys", ())))
    return Loaded(_ready(model), found_task, unused, None if name in saved_from else saved_from)


def _ready(model: Any) -> nn.Module:
    """The model in evaluation mode, with the weights that it computes with in this mode: RWKV scales them."""
    model.eval()
    for module in model.modules():
        if rescales(module):
            module._rescale_layers()
    return model


def _can_group(model: nn.Module) -> bool:
    """Whether torch's grouped products can take the experts of a model: not float64, and rows of whole 16 bytes."""
    stacked = [one for one in model.parameters() if one.ndim == 3]
    rows = (length * one.element_size() for one in stacked for length in one.shape[1:])
    return all(one.dtype != torch.float64 for one in stacked) and not any(size % 16 for size in rows)


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
    return Loaded(model.eval(), ModelTask.CAUSAL)


def _class(package: Any, path: Path, config: Any, task: ModelTask | None) -> tuple[ModelTask, Any]:
    """The class of a task; without one, the class in `architectures`, or if that has no head, its family's class."""
    known = classes_of(package, config)
    names = [str(name) for name in config.architectures or ()]
    if task is not None:
        return task, _class_for(path, config, task, known, names)
    for name in names:
        for one in (one for one in known if one is not ModelTask.EMBEDDING):
            found = next((each for each in known[one] if each.__name__ == name), None)
            if found is not None:
                return one, found
    ends = [one for name in names for ending, one in _ENDINGS.items() if name.endswith(ending)]
    bodies = bodies_of(package, config)
    several = len(getattr(config, "sub_configs", ())) > 1  # such as CLIP, which no single head goes on
    able = [one for one in HEADS_OF_BODIES if known[one]]
    if any(hasattr(package, name) for name in names) and (several or not bodies & set(names)):
        embeds = not several and any(one.__name__ in names for one in known[ModelTask.EMBEDDING])
        cure = "give --task embedding, or " if embeds else ""
        raise UnknownArchitectureError(
            "model", f"{path} is {_some(names)}, which this command has no data for; {cure}{CURE}"
        )
    chosen = [one for one in (ends or able) if one in able]
    if not chosen:
        seen, expected = _some(names) or "of no architecture", ", ".join(f"...{ending}" for ending in _ENDINGS)
        raise UnknownArchitectureError(
            "model",
            f"{path} is {seen} with model_type {config.model_type!r}; expected one of {expected}, or {CURE}",
        )
    return chosen[0], known[chosen[0]][0]


def _class_for(
    path: Path, config: Any, task: ModelTask, known: dict[ModelTask, list[Any]], names: Sequence[str]
) -> Any:
    """The class for a task: the one that the folder was saved from, if it is one of them."""
    if not known[task]:
        able = ", ".join(one for one in known if known[one]) or "none"
        raise UnknownArchitectureError(
            "task", f"got {task}, which no class with the model_type {config.model_type!r} of {path} has; it has {able}"
        )
    return next((one for one in known[task] if one.__name__ in names), known[task][0])


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


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
