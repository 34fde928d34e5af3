"""Times of training: the rank with the most to compute decides, or the exchange of weights."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.backends.trainer_times import TrainerTimes

TIMES = TrainerTimes(
    token_s=1.0, pair_s=0.01, spare_tokens=10.0, exchange_s=100.0, tokens_per_forward=50,
    optimizer_s=1.0, save_s=1.0,
)  # fmt: skip
LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=40)
RANKS = st.integers(1, 16)


def test_one_rank_computes_all_tokens_and_exchanges_nothing() -> None:
    attention = 0.01 * (30 * 30 + 10 * 10) / 2
    assert TIMES.micro_batch_s([30, 10], 1) == 40 + attention + 10
    attention = 0.01 * (60 * 60 + 10 * 10) / 2
    assert TIMES.micro_batch_s([60, 10], 1) == 70 + attention + 2 * 10, "two forwards"


def test_the_rank_with_the_most_decides_and_takes_the_exchange_at_least() -> None:
    assert TIMES.micro_batch_s([200, 10], 2) == 200 + 0.01 * 200 * 200 / 2 + 4 * 10
    assert TIMES.micro_batch_s([20, 10], 2) == 100.0, "the exchange takes longer than 20 tokens"


def test_replicas_sum_once_a_micro_batch_beside_the_last_backward() -> None:
    apart = TIMES.model_copy(update={"exchange_s": 20.0, "replica_sum_s": 45.0})
    alone = apart.model_copy(update={"replica_sum_s": 0.0})
    four, one = [200, 10], [20, 10]
    # Four forwards of 100 s and more each: the sum hides behind the last one.
    assert apart.micro_batch_s(four, 2) == alone.micro_batch_s(four, 2)
    assert alone.micro_batch_s(one, 2) < 65.0 and apart.micro_batch_s(one, 2) == 65.0, (
        "one forward, exchange and sum"
    )
    slow = apart.model_copy(update={"replica_sum_s": 1000.0})
    assert slow.micro_batch_s([20] * 10, 2) < 2 * 1000.0, "once, not in each of its forwards"
    assert slow.micro_batch_s(one, 1) == alone.micro_batch_s(one, 1)


def test_forwards_and_elements_take_their_time_beside_the_products() -> None:
    slow = TIMES.model_copy(update={"forward_s": 7.0, "element_token_s": 0.5})
    assert slow.micro_batch_s([60, 10], 1) == TIMES.micro_batch_s([60, 10], 1) + 2 * 7.0 + 70 * 0.5


@given(lengths=LENGTHS, ranks=RANKS)
def test_a_further_sample_never_makes_it_shorter_by_more_than_the_division_allows(
    lengths: list[int], ranks: int
) -> None:
    """The largest share of Graham's rule is at most 4/3 of the least possible one."""
    assert TIMES.micro_batch_s([*lengths, 1], ranks) >= 0.75 * TIMES.micro_batch_s(lengths, ranks)


@given(lengths=LENGTHS)
def test_more_tokens_on_a_rank_take_longer(lengths: list[int]) -> None:
    first, *others = lengths
    assert TIMES.micro_batch_s([*lengths, 1], 1) > TIMES.micro_batch_s(lengths, 1)
    assert TIMES.micro_batch_s([first + 1, *others], 1) > TIMES.micro_batch_s(lengths, 1)


@given(lengths=LENGTHS, ranks=RANKS)
def test_no_number_of_ranks_is_faster_than_an_even_division(lengths: list[int], ranks: int) -> None:
    assert TIMES.micro_batch_s(lengths, ranks) >= sum(lengths) / ranks
