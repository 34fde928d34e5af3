"""Refusals over every wire: the log of a receiver does not grow with what its peers send."""

import asyncio

import structlog

from flexmarl.core.protocol import messages
from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.incarnations import new_epoch

from .clusters import Cluster, over_every_transport, until
from .runtime_actors import Point, Subject
from .strangers import Stranger, packed


class TestBoundedLog:
    @over_every_transport
    async def test_a_flood_of_invalid_messages_is_counted_and_not_logged(self, cluster: Cluster) -> None:
        serving = await cluster.start("serving")
        await serving.add(Subject(), "subject")
        header = messages.pack_header("stranger", new_epoch())
        with structlog.testing.capture_logs() as lines:
            async with cluster.stranger(header, Stranger()) as wire:
                link = wire.connect(serving.address)
                link.send(packed(Kind.CALL, 1, "subject", "move", 30.0, [[{"x": 1, "labels": []}], {}, 1]))
                for number in range(1000):
                    link.send(packed(Kind.CALL, number))  # without its other fields
                    link.flush()
                    if number % 100 == 0:
                        await asyncio.sleep(0)
                await until(lambda: serving._local.network.refused_messages >= 1000)
            refused = [line for line in lines if line["event"] == "message refused"]
            assert 1 <= len(refused) <= 20
            await serving.__aexit__(None, None, None)
        refused = [line for line in lines if line["event"] == "message refused"]
        logged = sum("peer" in line for line in refused)
        counted = sum(line.get("not_logged", 0) for line in refused)
        assert logged + counted == serving._local.network.refused_messages

    @over_every_transport
    async def test_a_flood_to_unknown_actors_and_endpoints_is_counted(self, cluster: Cluster) -> None:
        asking, serving = await cluster.start("asking"), await cluster.start("serving")
        await serving.add(Subject(), "subject")
        subject = asking.ref("subject", serving.address, Subject)
        with structlog.testing.capture_logs() as lines:
            for number in range(300):
                await asking.ref(f"missing-{number}", serving.address).tell("hear", number)
                await subject.tell("missing", number)
            assert await subject.api.move(Point(1)) == Point(2)
        for event in ("one-way message for an unknown actor", "one-way message refused"):
            assert sum(line["event"] == event for line in lines) == 10
