"""The runtime's contract: rubbish, and peers of several incarnations, over every wire."""

import asyncio
import time
from unittest import mock

from flexmarl.core.protocol import codec, envelopes, messages
from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.incarnations import new_epoch
from flexmarl.core.protocol.session import LinkState, Settings

from ..patience import PATIENCE_S
from .clusters import Cluster, over_every_transport, until
from .pairs import add_when_back, all_credit_is_back, two
from .runtime_actors import Point, Subject
from .strangers import Stranger, packed

HEADER = messages.pack_header("stranger", 1)
RUBBISH = {
    "another version": (packed(envelopes.MAGIC, envelopes.VERSION + 1, "stranger", 1), packed(Kind.BYE, 0)),
    "no header": (b"", packed(Kind.BYE, 0)),
    "no MessagePack": (b"\xc1", b"\xc1"),
    "an envelope of no kind": (HEADER, packed(99, 1)),
    "a call without its fields": (HEADER, packed(Kind.CALL, 1)),
    "a run without requests": (HEADER, packed(Kind.CALL, 1, "subject", "hear", 1.0, [])),
    "a run that is cut short": (HEADER, packed(Kind.CALL, 1, "subject", "hear", 1.0, [[1], {}, 1, [2], {}])),
    "no envelope": (HEADER, codec.Encoder().pack({"a": 1})),
    "a list cut short": (HEADER, b"\xdd\xff\xff\xff\xff"),
    "an invalid timeout": (HEADER, packed(Kind.CALL, 1, "subject", "hear", float("nan"), [[1], {}, 1])),
    "invalid ids": (HEADER, packed(Kind.PONG, 1, [[1]])),
    "invalid ranges": (HEADER, packed(Kind.DONE, 0, ["x"])),
}


class TestRubbish:
    @over_every_transport
    async def test_its_sender_gets_an_error_and_the_others_notice_nothing(self, cluster: Cluster) -> None:
        asking, actor, subject = await two(cluster)
        pending = asyncio.create_task(subject.api.hang())
        await until(lambda: actor.hanging == 1)
        for header, body in RUBBISH.values():
            stranger = Stranger()
            async with cluster.stranger(header, stranger) as wire:
                wire.connect(subject.address).send(body)
                await until(lambda: stranger.answers)  # noqa: B023  # it is waited for within the turn
            (((kind, _, reason),),) = stranger.answers
            assert kind == Kind.REFUSE and reason
        assert await subject.api.move(Point(1)) == Point(2)
        assert not pending.done()
        pending.cancel()
        await until(lambda: all_credit_is_back(asking, subject))


def add(request_id: int, key: int) -> bytes:
    """A call of a stranger."""
    return packed(Kind.CALL, request_id, "subject", "add", 30.0, [[key], {}, 1])


class TestIncarnations:
    @over_every_transport
    async def test_two_systems_of_one_name_are_both_served(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        one, other = Stranger(), Stranger()
        epochs = sorted((new_epoch(), new_epoch()))
        async with (
            cluster.stranger(messages.pack_header("twin", epochs[0]), one, "one") as wire,
            cluster.stranger(messages.pack_header("twin", epochs[1]), other, "other") as other_wire,
        ):
            link, other_link = wire.connect(subject.address), other_wire.connect(subject.address)
            for number in (1, 2, 3):
                for answers, sending, key in ((one, link, number), (other, other_link, -number)):
                    sending.send(add(number, key))
                    await until(lambda: len(answers.answers) == number)  # noqa: B023
                    assert answers.answers[-1] == [[Kind.REPLY, number, [1]]]
        assert actor.added == dict.fromkeys((1, 2, 3, -1, -2, -3), 1)

    @over_every_transport
    async def test_a_process_that_was_replaced_is_refused(self, cluster: Cluster) -> None:
        _, actor, subject = await two(cluster)
        zombie, successor = Stranger(), Stranger()
        epoch = new_epoch()
        async with (
            cluster.stranger(messages.pack_header("worker", epoch), zombie, "zombie") as old_wire,
            cluster.stranger(messages.pack_header("worker", epoch + 1), successor, "successor") as new_wire,
        ):
            old, new = old_wire.connect(subject.address), new_wire.connect(subject.address)
            old.send(add(1, 1))
            old.send(packed(Kind.CALL, 2, "subject", "hang", 30.0, [[], {}, 1]))
            await until(lambda: zombie.answers and actor.hanging)
            new.send(add(1, 2))
            await until(lambda: successor.answers)
            assert actor.hanging == 0, "the call of a process that has ended is cancelled"
            old.send(packed(Kind.TELL, 3, "subject", "hear", 0.0, [[1], {}, 1]))
            old.send(add(4, 4))
            await until(lambda: len(zombie.answers) >= 2)
            (kind, _, reason) = zombie.answers[-1][0]
            assert kind == Kind.REFUSE and "worker was replaced: a later incarnation" in reason
        assert actor.heard == [] and actor.added == {1: 1, 2: 1}

    @over_every_transport
    async def test_a_system_that_starts_after_the_clock_was_set_back_is_reachable(
        self, cluster: Cluster
    ) -> None:
        asking = await cluster.start("asking", Settings(connect_timeout_s=10))
        address, now_ns = "", time.time_ns()
        for turn in range(3):
            with mock.patch.object(time, "time_ns", lambda: now_ns - turn * 3600 * 10**9):  # noqa: B023
                serving = cluster.system("serving", again_at=address)
                await serving.__aenter__()
            try:
                address = serving.address
                await serving.add(Subject(), "subject")
                subject = asking.ref("subject", address, Subject)
                assert await add_when_back(subject, turn) == 1
                assert await subject.within(PATIENCE_S).add_slowly(turn) == 2
            finally:
                await serving.__aexit__(None, None, None)
            await until(lambda: asking._local.network.connection(address).session.state is LinkState.DOWN)  # noqa: B023
