"""Rotary positions as products of complex numbers."""

import cmath

import pytest
import torch

from curvoscope.exact.attention.rotary import Rotary
from reference import normal


@pytest.mark.parametrize("base, width", [(100.0, 6), (10_000.0, 2), (1.0, 4)])
@pytest.mark.parametrize("back", [False, True])
def test_features_p_and_p_plus_half_turn_by_position_times_base_to_minus_2p_by_k(base, width, back):
    half, vectors = width // 2, normal(1)(5, width)
    found = Rotary(base, width).turn(vectors, torch.arange(5), back)
    for i, vector in enumerate(vectors.tolist()):
        for p in range(half):
            angle = i * base ** (-2 * p / width) * (-1 if back else 1)
            z = complex(vector[p], vector[p + half]) * cmath.exp(1j * angle)
            assert abs(complex(found[i, p], found[i, p + half]) - z) < 1e-13
