"""Two live systems of one name: both are served, or the second one is refused with the reason."""

import asyncio

import pytest

from flexmarl.core.system import ActorSystem

from .clusters import QUICK, Cluster, over_every_transport
from .runtime_actors import Point, Subject


class TestTwins:
    @over_every_transport
    async def test_both_are_served_or_the_second_is_refused(self, cluster: Cluster) -> None:
        serving = await cluster.start("serving")
        actor = Subject()
        await serving.add(actor, "subject")
        first = await cluster.start("twin")
        if cluster.transport.name == "tcp+curve":
            second = await cluster.start("twin")
        else:  # they would listen on one address
            with pytest.raises(OSError, match="another system does|a node named twin is running"):
                await cluster.start("twin")
            if cluster.transport.name != "ipc":
                return
            second = await cluster._stack.enter_async_context(ActorSystem("twin", settings=QUICK))
        subjects = [twin.ref("subject", serving.address, Subject) for twin in (first, second)]
        for number in range(50):
            results = await asyncio.gather(
                *(subject.api.move(Point(number)) for subject in subjects),
                *(subject.api.add_slowly(2 * number + twin) for twin, subject in enumerate(subjects)),
            )
            assert results == [Point(number + 1)] * 2 + [1] * 2
            for twin, subject in enumerate(subjects):
                await subject.tell("hear", 2 * number + twin)
        for subject in subjects:
            assert [item async for item in subject.api.count(5)] == list(range(5))
        assert sorted(actor.heard) == list(range(100))
        assert actor.added == dict.fromkeys(range(100), 1)
        await first.__aexit__(None, None, None)
        assert await subjects[1].api.move(Point(1)) == Point(2), "the other one's end is not its own"
