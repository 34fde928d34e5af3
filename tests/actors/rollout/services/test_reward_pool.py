"""The service that a rollout worker asks for a reward."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.rollout.services.reward_pool import choose_service

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def test_the_near_service_is_asked_while_it_has_a_process_for_each_call() -> None:
    assert choose_service([3, 0], near=0, processes=4) == 0
    assert choose_service([4, 0], near=0, processes=4) == 1, "the other one is free"
    assert choose_service([4, 4], near=1, processes=4) == 1, "both are full: the near one"
    assert choose_service([5, 4, 4], near=0, processes=4) == 1
    assert choose_service([0, 3], near=0, processes=4, lost=[0]) == 1
    assert choose_service([0, 3], near=0, processes=4, lost=[0, 1]) == 0, "it may be restarted"


@given(COUNTS, st.data(), st.integers(1, 5))
def test_no_service_is_left_idle_while_another_one_has_a_queue(
    open_calls: list[int], data: st.DataObject, processes: int
) -> None:
    services = range(len(open_calls))
    near = data.draw(st.sampled_from(services))
    lost = data.draw(st.sets(st.sampled_from(services)))
    chosen = choose_service(open_calls, near, processes, lost)
    there = [number for number in services if number not in lost] or [*services]
    assert chosen in there
    assert open_calls[chosen] < processes or open_calls[chosen] == min(open_calls[number] for number in there)
