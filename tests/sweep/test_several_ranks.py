"""A sweep over several processes: the same numbers as in one process that has all their batches."""

import pytest
import torch

from autodiff_cases import tokens
from distributed_workers import (
    ROWS,
    batches,
    launched,
    shares,
    swept,
    swept_by,
    swept_by_routes,
    swept_routes,
    swept_until_tired,
)


@pytest.mark.parametrize("cuts", [(4, 3), (3, 0, 4)], ids=str)
def test_all_have_the_numbers_of_one_process(cuts):
    alone = swept_by([batch for rows in shares(cuts) for batch in batches(tokens(ROWS), rows)])
    for found in launched(swept, len(cuts), cuts):
        assert found.keys() == alone.keys()
        largest = max(float(K.abs().max()) for K in alone.values())
        for name, K in alone.items():
            torch.testing.assert_close(found[name], K, rtol=1e-8, atol=1e-12 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 3])
def test_batches_that_use_different_parameters(cut):
    alone = swept_by_routes(slice(None))
    for found in launched(swept_routes, 2, cut):
        for name, K in alone.items():
            torch.testing.assert_close(found[name], K, rtol=1e-8, atol=1e-12)


@pytest.mark.slow
def test_a_failure_on_one_rank_ends_the_sweep_on_all():
    told, failed = launched(swept_until_tired, 2)
    assert failed == ("ValueError", "tired")
    assert told[0] == "RankError" and "rank 1 failed with ValueError: tired" in told[1]
