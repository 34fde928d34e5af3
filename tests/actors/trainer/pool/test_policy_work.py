"""The computations of a policy: their order, and those that are done again after a loss."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from flexmarl.actors.trainer.pool.policy_work import Computation, PolicyWork


async def nothing(_gang: object) -> None: ...


@pytest.fixture
async def work() -> AsyncIterator[PolicyWork]:
    yield PolicyWork(lambda: 0.0)


def added(work: PolicyWork, *names: str) -> list[Computation]:
    found = [
        Computation(name, nothing, changes_base=name == "optimizer_step", repeated=name == "accumulate")
        for name in names
    ]
    for computation in found:
        work.add(computation)
    return found


def done(work: PolicyWork, count: int) -> None:
    for _ in range(count):
        work.begin()
        work.end()


async def test_they_begin_in_their_order_one_at_a_time(work: PolicyWork) -> None:
    first, second = added(work, "accumulate", "save")
    assert work.begin() is first is work.running
    with pytest.raises(AssertionError, match="one computation"):
        work.begin()
    work.end()
    assert work.begin() is second


async def test_after_a_loss_the_step_is_computed_again_in_its_order(work: PolicyWork) -> None:
    first, saved, second, running, waiting = added(
        work, "accumulate", "save", "accumulate", "accumulate", "optimizer_step"
    )
    done(work, 3)
    work.begin()
    assert work.lose() == [first, second, running], "what was saved stays saved"
    for again in (first, second, running):
        assert work.begin() is again
        work.end()
    assert work.begin() is waiting and not saved.done.done()


async def test_what_a_base_state_contains_is_not_computed_again(work: PolicyWork) -> None:
    *_, step, later = added(work, "accumulate", "optimizer_step", "accumulate")
    done(work, 3)
    assert (work.is_unsaved, step.saved.done()) == (True, False)
    work.save()
    assert (work.is_unsaved, step.saved.done()) == (False, True)
    assert work.lose() == [later]


async def test_a_step_whose_base_state_is_not_saved_is_computed_again(work: PolicyWork) -> None:
    computations = added(work, "accumulate", "optimizer_step", "accumulate")
    done(work, 3)
    assert work.lose() == computations and not work.is_unsaved
    done(work, 2)
    work.save()
    assert work.lose() == [], "the last one waits still"
    assert work.begin() is computations[-1]


async def test_one_that_failed_is_not_computed_again(work: PolicyWork) -> None:
    (failing,) = added(work, "accumulate")
    work.begin().fail(ValueError("no tokens"))
    work.end()
    assert work.lose() == []
    with pytest.raises(ValueError, match="no tokens"):
        await failing.done


async def test_a_second_result_changes_nothing(work: PolicyWork) -> None:
    (computation,) = added(work, "accumulate")
    computation.succeed(1)
    computation.succeed(2)
    assert await computation.done == 1
    (left,) = added(work, "accumulate")
    left.done.cancel()
    await asyncio.sleep(0)
    left.succeed(1)


async def test_a_policy_that_is_lost_for_good_fails_all_of_them(work: PolicyWork) -> None:
    running, waiting = added(work, "accumulate", "optimizer_step")
    work.begin()
    assert work.fail(ValueError("no room"))
    for computation in (running, waiting):
        for result in (computation.done, computation.saved):
            with pytest.raises(ValueError, match="no room"):
                await result
    assert work.lose() == []


async def test_a_step_whose_base_state_can_not_be_saved_has_its_result_and_the_error(
    work: PolicyWork,
) -> None:
    (step,) = added(work, "optimizer_step")
    done(work, 1)
    step.succeed(1)
    assert not work.fail(ValueError("no room")), "its caller has left with the result"
    assert await step.done == 1
    with pytest.raises(ValueError, match="no room"):
        await step.saved
