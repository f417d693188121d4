"""A sweep over several processes: the same numbers as in one process that has all their batches."""

import pytest
import torch

from autodiff_cases import tokens
from distributed_workers import ROWS, batches, launched, shares, swept, swept_by


@pytest.mark.parametrize("cuts", [(4, 3), (3, 0, 4)], ids=str)
def test_all_have_the_numbers_of_one_process(cuts):
    alone = swept_by([batch for rows in shares(cuts) for batch in batches(tokens(ROWS), rows)])
    for found in launched(swept, len(cuts), cuts):
        assert found.keys() == alone.keys()
        largest = max(float(K.abs().max()) for K in alone.values())
        for name, K in alone.items():
            torch.testing.assert_close(found[name], K, rtol=1e-8, atol=1e-12 * largest)
