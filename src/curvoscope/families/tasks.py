"""Tasks: what a model predicts. A class of transformers has the task of the table that it stands in."""

from enum import StrEnum
from typing import Any


class ModelTask(StrEnum):
    """What a model predicts.

    The first that fits counts: BART is among the masked models as well, and an encoder has a causal variant.
    """

    SEQ2SEQ = "seq2seq"
    SPEECH_TO_TEXT = "speech-to-text"
    MASKED = "masked"
    CAUSAL = "causal"
    IMAGE_CLASSIFICATION = "image-classification"
    AUDIO_CLASSIFICATION = "audio-classification"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    EMBEDDING = "embedding"


_TABLES = {
    ModelTask.SEQ2SEQ: ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",),
    ModelTask.SPEECH_TO_TEXT: ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",),
    ModelTask.MASKED: ("MODEL_FOR_MASKED_LM_MAPPING",),
    ModelTask.CAUSAL: ("MODEL_FOR_CAUSAL_LM_MAPPING",),
    ModelTask.IMAGE_CLASSIFICATION: ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",),
    ModelTask.AUDIO_CLASSIFICATION: ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",),
    ModelTask.SEQUENCE_CLASSIFICATION: ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",),
    ModelTask.TOKEN_CLASSIFICATION: ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",),
    ModelTask.QUESTION_ANSWERING: ("MODEL_FOR_QUESTION_ANSWERING_MAPPING",),
    ModelTask.EMBEDDING: ("MODEL_FOR_TEXT_ENCODING_MAPPING", "MODEL_MAPPING"),
}
_BODIES = ("MODEL_MAPPING", "MODEL_FOR_PRETRAINING_MAPPING")
BOTH_SIDES = (ModelTask.SEQ2SEQ, ModelTask.SPEECH_TO_TEXT)  # an encoder and a decoder
HEADS_OF_BODIES = (*BOTH_SIDES, ModelTask.MASKED, ModelTask.CAUSAL, ModelTask.IMAGE_CLASSIFICATION)


def classes_of(package: Any, config: Any) -> dict[ModelTask, list[Any]]:
    """The classes of transformers for a configuration, by task."""
    found = {
        task: [one for table in tables for one in _classes(package, table, config)] for task, tables in _TABLES.items()
    }
    if getattr(config, "is_encoder_decoder", False):
        found[ModelTask.EMBEDDING] = _classes(package, "MODEL_FOR_TEXT_ENCODING_MAPPING", config)
    else:  # a language model that reads sound or images as well
        found |= {task: [] for task in BOTH_SIDES}
    return found


def bodies_of(package: Any, config: Any) -> set[str]:
    """Names of the classes without a head, or with those of pretraining."""
    return {one.__name__ for table in _BODIES for one in _classes(package, table, config)}


def _classes(package: Any, table: str, config: Any) -> list[Any]:
    """The classes for a configuration in one of transformers' tables."""
    mapping = getattr(package, table)
    if type(config) not in mapping:
        return []
    found = mapping[type(config)]
    return list(found) if isinstance(found, tuple | list) else [found]
