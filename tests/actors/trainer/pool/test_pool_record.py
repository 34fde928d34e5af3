"""The figures of a policy in a shared pool."""

from flexmarl.actors.trainer.pool.gangs import GangSeconds
from flexmarl.actors.trainer.pool.pool_record import PoolRecord

NAMES = (
    "pool_computing_s", "pool_idle_s", "pool_swapping_s", "pool_waiting_s", "pool_suspended_s", "suspensions",
    "swapped_mib", "repeated_micro_batches",
)  # fmt: skip


def test_figures_are_those_since_the_last_time() -> None:
    record = PoolRecord()
    seconds = GangSeconds(computing=3.0, waiting=1.0)
    record.suspensions, record.moved_bytes, record.repeated = 2, 3 * 2**19, 1
    assert record.take(seconds) == dict(zip(NAMES, (3.0, 0.0, 0.0, 1.0, 0.0, 2, 1.5, 1), strict=True))
    seconds.computing += 1.0
    seconds.idle = seconds.swapping = seconds.out = 0.5
    record.suspensions += 1
    assert record.take(seconds) == dict(zip(NAMES, (1.0, 0.5, 0.5, 0.0, 0.5, 1, 0.0, 0), strict=True))
