"""The audit of all linear blocks of GPT-2 small, 6 sequences of 1,024 tokens: an hour, so it runs only if named."""

from benchmarks.measure import in_own_process

SIZES = ("12", "768", "6", "1024", "32")  # layers, width, sequences, tokens of each, samples


def run() -> dict[str, object]:
    """The sweep and the audit that watches it, with two threads."""
    return in_own_process("benchmarks.audit", *SIZES)
