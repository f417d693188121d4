"""The batches that the experiments run on."""

from curvoscope.data.addition import EQUALS, IGNORED, PLUS, VOCABULARY, addition, answer_targets

__all__ = ["EQUALS", "IGNORED", "PLUS", "VOCABULARY", "addition", "answer_targets"]
