"""Addition of two numbers as next-token prediction: `XXXXX+YYYYY=ZZZZZZ`, most significant digit first.

Tokens 0 to 9 are the digits, 10 is `+`, 11 is `=`. With five digits a sequence has 18 tokens, and the six
answer digits (tokens 12 to 17) are each predicted one position earlier (logits at positions 11 to 16).
"""

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import DtypeError, ShapeError

PLUS, EQUALS, VOCABULARY = 10, 11, 12
IGNORED = -100  # the target of a position without one, torch's ignore_index

_SHARE_OF_BATCHES = 0.2  # batches in which long carries are made frequent
_SHARE_OF_PAIRS = 0.2  # digit pairs made to sum to nine in such a batch


def addition(sequences: int = 64, digits: int = 5, seed: int = 0) -> Tensor:
    """One batch of additions `XXXXX+YYYYY=ZZZZZZ` as tokens.

    Digits are uniform on 0..9. A pair of digits that sums to nine passes a carry on, so long carries need
    many such pairs: with probability 1/5 a batch has a fifth of its digit pairs, at random places, made to
    sum to nine. The batch is a function of the arguments alone; torch's global generator is not used.

    Args:
        sequences: the number of additions.
        digits: of each of the two numbers.
        seed: for the digits.

    Returns:
        Tokens (sequences, 3 digits + 3), int64: 10 is "+", 11 is "=".

    Example:
        >>> from curvoscope.papers.tasks import addition
        >>> addition(sequences=2, digits=1)  # 4 + 3 = 07, 9 + 0 = 09
        tensor([[ 4, 10,  3, 11,  0,  7],
                [ 9, 10,  0, 11,  0,  9]])
    """
    checks.at_least(1, sequences=sequences, digits=digits)
    checks.torch_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 10, (sequences, digits), generator=generator)
    second = torch.randint(0, 10, (sequences, digits), generator=generator)
    if torch.rand((), generator=generator) < _SHARE_OF_BATCHES:
        pairs = sequences * digits
        places = torch.randperm(pairs, generator=generator)[: int(_SHARE_OF_PAIRS * pairs)]
        second.view(-1)[places] = 9 - first.view(-1)[places]
    sign = torch.tensor([PLUS, EQUALS]).expand(sequences, 2)
    return torch.cat([first, sign[:, :1], second, sign[:, 1:], _sum_of(first, second)], dim=1)


def answer_targets(tokens: Tensor) -> Tensor:
    """The next token if it is an answer digit, else `IGNORED`.

    Position t of the result is the target of the logits at position t, so the model is fed `tokens[:, :-1]`.

    Args:
        tokens: from `addition`, (N, 3 digits + 3).

    Returns:
        Targets (N, 3 digits + 2), int64.

    Example:
        >>> from curvoscope.papers.tasks import addition, answer_targets
        >>> answer_targets(addition(sequences=2, digits=1))
        tensor([[-100, -100, -100,    0,    7],
                [-100, -100, -100,    0,    9]])
    """
    if tokens.dtype != torch.int64:
        raise DtypeError("tokens", f"expected torch.int64, got {tokens.dtype}")
    if tokens.ndim != 2 or tokens.shape[1] < 6 or tokens.shape[1] % 3:
        raise ShapeError("tokens", f"got shape {tuple(tokens.shape)}, expected (sequences, 3 * digits + 3)")
    digits = tokens.shape[1] // 3 - 1
    targets = tokens[:, 1:].clone()
    targets[:, : 2 * digits + 1] = IGNORED
    return targets


def _sum_of(first: Tensor, second: Tensor) -> Tensor:
    """Digits of the sums, (N, n) and (N, n) -> (N, n + 1), by carrying: no number of digits overflows."""
    pairs = first + second
    answer = torch.empty(first.shape[0], first.shape[1] + 1, dtype=first.dtype)
    carry = torch.zeros_like(first[:, 0])
    for place in reversed(range(first.shape[1])):
        total = pairs[:, place] + carry
        answer[:, place + 1], carry = total % 10, total // 10
    answer[:, 0] = carry
    return answer
