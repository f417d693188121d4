"""The tokenizer of a local Hugging Face folder: its tables, no code of the folder's and no network."""

import json
from pathlib import Path
from typing import Any

from curvoscope.families.loading import GGUF, quiet, transformers
from curvoscope.families.model_folders import CorruptFileError, RemoteCodeError

_TABLES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class FolderTokenizer:
    """A tokenizer of transformers, without the tokens that it puts around a text."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.about = "the model's tokenizer"
        self.mask: int | None = inner.mask_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        with quiet(transformers()):  # a text longer than the context is meant: it is cut later
            return list(self._inner.encode(text, add_special_tokens=False))


def tokenizer(path: Path) -> FolderTokenizer | None:
    """The tokenizer in the folder, or in the GGUF file; None if it has none."""
    if path.suffix == GGUF and path.is_file():
        return _read(path.parent, gguf_file=path.name)
    if not any((path / name).is_file() for name in _TABLES):
        return None
    settings = path / "tokenizer_config.json"
    if settings.is_file():
        try:
            found = json.loads(settings.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CorruptFileError("model", f"{settings} is not JSON: {error}") from error
        if isinstance(found, dict) and found.get("auto_map"):
            raise RemoteCodeError("model", f"{settings} requires custom code (auto_map), which is never run")
    return _read(path)


def _read(path: Path, **options: str) -> FolderTokenizer:
    package = transformers()
    with quiet(package):
        try:
            inner = package.AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, **options
            )
        except Exception as error:  # whatever transformers does not like
            reason = " ".join(str(error).split())
            raise CorruptFileError("model", f"the tokenizer in {path} cannot be read: {reason}") from error
    return FolderTokenizer(inner)
