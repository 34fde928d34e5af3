"""The queue of an actor's records: bounded, and never the reason for the actor's end."""

from flexmarl.actors.messages import ArchiveApi
from flexmarl.actors.record_queue import ANSWER_TIMEOUT_S, QUEUE_BYTES, RecordKind, RecordQueue, Work
from flexmarl.actors.recorded_trajectory import Record, RecordedTrajectory, compress_record, pack_record
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem

from ..patience import PATIENCE_S
from .rollout.fake_cluster import Archive
from .test_recorded_trajectory import DONE


async def in_place(work: Work) -> list[bytes]:
    return work()


def queue_of(archive: ActorRef[ArchiveApi], most_bytes: int = QUEUE_BYTES) -> RecordQueue[Record]:
    kind = RecordKind("trajectories", compress_record, archive.within(ANSWER_TIMEOUT_S).keep)
    return RecordQueue(kind, in_place, most_bytes)


def add(queue: RecordQueue[Record], *trajectories: RecordedTrajectory) -> None:
    record = pack_record(trajectories)
    queue.add(record, record.size, len(trajectories))


async def test_records_without_room_are_dropped_and_counted_on_both_sides(system: ActorSystem) -> None:
    archive = Archive()
    size = pack_record([DONE]).size
    queue = queue_of(await system.add(archive, "archive"), 2 * size)
    for number in range(5):
        add(queue, DONE._replace(number=number))
    assert queue.dropped == 3
    await queue.drain(PATIENCE_S)
    assert [record.number for record in archive.records] == [0, 1]
    assert archive.dropped == 3
    add(queue, DONE)
    await queue.drain(PATIENCE_S)
    assert len(archive.records) == 3 and archive.dropped == 3, "reported once"


async def test_records_that_are_refused_are_counted(system: ActorSystem) -> None:
    archive = Archive()
    archive.refuses = True
    queue = queue_of(await system.add(archive, "archive"))
    add(queue, DONE, DONE._replace(number=2))
    await queue.drain(PATIENCE_S)
    assert queue.dropped == 2


async def test_an_archive_that_is_gone_costs_records_and_nothing_else(system: ActorSystem) -> None:
    archive = await system.add(Archive(), "archive")
    await system.remove("archive")
    queue = queue_of(archive)
    add(queue, DONE)
    await queue.drain(PATIENCE_S)
    assert queue.dropped == 1


async def test_a_drain_ends_at_its_limit(system: ActorSystem) -> None:
    archive = Archive()
    archive.gate.clear()
    queue = queue_of(await system.add(archive, "archive"))
    add(queue, DONE)
    await queue.drain(0.01)
    assert queue.dropped == 1
