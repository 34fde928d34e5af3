"""The figures of a policy in a shared pool."""

from flexmarl.actors.trainer.pool.gangs import GangSeconds
from flexmarl.actors.trainer.pool.pool_record import MoveTimes, PoolRecord

NAMES = (
    "pool_computing_s", "pool_slots_s", "pool_idle_s", "pool_swapping_s", "pool_waiting_s", "pool_suspended_s",
    "suspensions", "swapped_mib", "repeated_micro_batches", "gather_s",
)  # fmt: skip


def test_figures_are_those_since_the_last_time() -> None:
    record = PoolRecord()
    seconds = GangSeconds(computing=3.0, waiting=1.0, computing_on_slots=6.0)
    record.suspensions, record.moved_bytes, record.repeated = 2, 3 * 2**19, 1
    record.gather_s = 0.25
    assert record.take(seconds) == dict(
        zip(NAMES, (3.0, 6.0, 0.0, 0.0, 1.0, 0.0, 2, 1.5, 1, 0.25), strict=True)
    )
    seconds.computing += 1.0
    seconds.computing_on_slots += 2.0
    seconds.idle = seconds.swapping = seconds.out = 0.5
    record.suspensions += 1
    assert record.take(seconds) == dict(
        zip(NAMES, (1.0, 2.0, 0.5, 0.5, 0.0, 0.5, 1, 0.0, 0, 0.0), strict=True)
    )


def test_moves_that_overlap_are_one_time_and_one_that_lasts_is_cut() -> None:
    now = 0.0
    times = MoveTimes(lambda: now)
    with times.move():
        now = 1.0
        with times.move():
            now = 3.0
    now = 4.0
    with times.move():
        now = 6.0
        assert times.take() == [(6.0, 3.0), (2.0, 0.0)]
        now = 9.0
    now = 10.0
    assert times.take() == [(4.0, 1.0)]
    assert times.take() == []
