"""The figures of a policy in a shared pool."""

from flexmarl.actors.messages import PoolFigures
from flexmarl.actors.trainer.gangs import GangSeconds
from flexmarl.actors.trainer.pool_record import PoolRecord


def test_figures_are_those_since_the_last_time() -> None:
    record = PoolRecord()
    seconds = GangSeconds(computing=3.0, waiting=1.0)
    record.suspensions, record.moved_bytes, record.repeated = 2, 100, 1
    assert record.take(seconds) == PoolFigures(3.0, 0.0, 0.0, 1.0, 0.0, 2, 100, 1)
    seconds.computing += 1.0
    seconds.idle = seconds.swapping = seconds.out = 0.5
    record.suspensions += 1
    assert record.take(seconds) == PoolFigures(1.0, 0.5, 0.5, 0.0, 0.5, 1, 0, 0)
