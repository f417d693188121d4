"""When the steps of an iteration may end."""

import math


def remaining(change: float, before: float) -> float:
    """What all further steps of an iteration add, if each changes as much less as this one did than the one before.

    Not known (infinite) without a change before.
    """
    if math.isinf(before):
        return before
    return change * change / (before - change) if change < before else change
