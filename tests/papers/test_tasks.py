import pytest
import torch

from curvoscope.errors import DtypeError, RangeError, ShapeError
from curvoscope.papers.tasks import EQUALS, IGNORED, PLUS, VOCABULARY, addition, answer_targets


def number(digits):
    return int("".join(str(int(digit)) for digit in digits))


@pytest.mark.parametrize("digits", [1, 2, 5, 25])  # 25 digits do not fit into an int64
def test_sums_are_right(digits):
    for seed in range(12):
        tokens = addition(16, digits, seed)
        assert tokens.shape == (16, 3 * digits + 3) and tokens.dtype == torch.int64
        for row in tokens:
            first, second, answer = row[:digits], row[digits + 1 : 2 * digits + 1], row[2 * digits + 2 :]
            assert number(first) + number(second) == number(answer)
            assert row[digits] == PLUS and row[2 * digits + 1] == EQUALS
            assert len(answer) == digits + 1
        assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCABULARY


def test_five_digits_make_eighteen_tokens_with_the_answer_at_twelve_to_seventeen():
    tokens = addition()
    assert tokens.shape == (64, 18)
    targets = answer_targets(tokens)
    assert targets.shape == (64, 17)
    torch.testing.assert_close(targets[:, 11:17], tokens[:, 12:18], rtol=0, atol=0)
    assert bool((targets[:, :11] == IGNORED).all())


def share_of_nines(tokens):
    return float((tokens[:, :5] + tokens[:, 6:11] == 9).double().mean())


def test_digits_are_uniform_and_a_fifth_of_the_batches_has_frequent_carries():
    # 10,000 pairs a batch: a plain one has a share 0.1 of nines (standard deviation 0.003), one with long
    # carries 0.2 + 0.8 * 0.1 = 0.28.
    batches = [addition(2000, seed=seed) for seed in range(300)]
    shares = torch.tensor([share_of_nines(batch) for batch in batches])
    rich = shares > 0.2
    assert bool(((shares - 0.1).abs() < 0.02)[~rich].all())
    assert bool(((shares - 0.28).abs() < 0.02)[rich].all())
    assert 0.2 * 300 - 4 * 6.9 < int(rich.sum()) < 0.2 * 300 + 4 * 6.9  # binomial, four standard deviations
    for some in (batches[int(rich.nonzero()[0])], batches[int((~rich).nonzero()[0])]):
        for summand in (some[:, :5], some[:, 6:11]):
            counts = torch.bincount(summand.flatten(), minlength=10) / summand.numel()
            assert float((counts - 0.1).abs().max()) < 0.02


def test_a_batch_is_a_function_of_its_seed_alone():
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one = addition(seed=7)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(one, addition(seed=7))
    assert not torch.equal(one, addition(seed=8))


@pytest.mark.parametrize(
    ("argument", "value"),
    [("sequences", 0), ("sequences", -3), ("digits", 0), ("seed", -1), ("seed", 2**32)],
)
def test_numbers_out_of_range_are_named(argument, value):
    with pytest.raises(RangeError, match=f"^{argument}: got {value}") as caught:
        addition(**{argument: value})
    assert caught.value.argument == argument


def test_targets_of_something_else():
    with pytest.raises(DtypeError, match=r"^tokens: expected torch\.int64"):
        answer_targets(addition().double())
    for shape in [(18,), (4, 17), (4, 3)]:
        with pytest.raises(ShapeError, match=r"^tokens: got shape"):
            answer_targets(torch.zeros(shape, dtype=torch.int64))
