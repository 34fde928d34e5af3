"""The shares of the slots: their limits, and their proportion to the loads."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.pool.gangs import Gang
from flexmarl.actors.trainer.pool.slot_shares import slot_shares


def gang(number: int, fewest: int, ranks: int, load: float) -> Gang:
    return Gang(PolicyName(f"p{number}"), ranks, fewest, load=load)


def shares(slots: int, *gangs: tuple[int, int, float]) -> list[int]:
    """``gangs``: fewest, ranks and load."""
    return [*slot_shares(slots, [gang(number, *given) for number, given in enumerate(gangs)]).values()]


def test_slots_are_divided_by_load() -> None:
    assert shares(12, (1, 12, 10.0), (1, 12, 20.0), (1, 12, 30.0)) == [2, 4, 6]


def test_none_has_more_than_its_ranks_or_less_than_its_fewest() -> None:
    assert shares(12, (1, 3, 90.0), (4, 12, 1.0), (1, 12, 9.0)) == [3, 4, 5]
    assert shares(12, (1, 3, 1.0), (1, 3, 1.0)) == [3, 3], "more slots than ranks"


def test_without_slots_beyond_the_fewest_of_all_none_has_a_share() -> None:
    assert shares(5, (2, 4, 1.0), (3, 3, 5.0), (1, 4, 9.0)) == [4, 3, 4]
    assert shares(6, (2, 4, 1.0), (3, 3, 5.0), (1, 4, 9.0)) == [4, 3, 4]
    assert shares(7, (2, 4, 1.0), (3, 3, 5.0), (1, 4, 9.0)) == [2, 3, 2]


def test_larger_states_have_more_until_all_have_computed() -> None:
    assert shares(12, (1, 12, 0.0), (2, 12, 0.0), (3, 12, 50.0)) == [2, 4, 6]


GANGS = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 8), st.floats(0.1, 1e6)).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
    ),
    min_size=1,
    max_size=8,
)


@given(gangs=GANGS, slots=st.integers(1, 64))
def test_the_slots_are_given_out_as_far_as_the_limits_allow(
    gangs: list[tuple[int, int, float]], slots: int
) -> None:
    made = shares(slots, *gangs)
    limits = [(fewest, ranks) for fewest, ranks, _ in gangs]
    assert all(fewest <= share <= ranks for share, (fewest, ranks) in zip(made, limits, strict=True))
    least, most = (sum(limit[end] for limit in limits) for end in (0, 1))
    assert sum(made) == (most if least >= slots else min(most, slots))


@given(gangs=GANGS, slots=st.integers(1, 64))
def test_none_has_less_a_slot_than_one_that_could_give_it_one(
    gangs: list[tuple[int, int, float]], slots: int
) -> None:
    made = shares(slots, *gangs)
    if sum(fewest for fewest, _, _ in gangs) >= slots:
        return
    for share, (_, ranks, load) in zip(made, gangs, strict=True):
        for other, (fewest, _, other_load) in zip(made, gangs, strict=True):
            if share < ranks and other > fewest:
                assert load / share <= other_load / (other - 1) * (1 + 1e-9)
