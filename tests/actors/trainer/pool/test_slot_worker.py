"""A slot's moves beside its computations."""

import asyncio
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from flexmarl.actors.messages import Moved
from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.pool.slot_worker import SlotWorker
from flexmarl.core.base.threads import in_thread

SOLVER = PolicyName("solver")


def test_memory_for_a_state_is_taken_by_a_thread() -> None:
    """A device that is short of memory lets the call wait for the computations under way: the loop would miss its
    heartbeats."""
    threads: list[threading.Thread] = []

    def memory(_policy: PolicyName, _specs: Iterable[Any]) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {}

    async def fetch_all(_parts: object) -> Moved:
        return Moved(0, "none")

    worker = SlotWorker.__new__(SlotWorker)
    stub = cast("Any", worker)
    stub.system, stub._slot = SimpleNamespace(run_blocking=in_thread), SimpleNamespace(memory=memory)
    stub._prefetched, stub._fetch_all = {}, fetch_all
    rest = SimpleNamespace(tensors=())
    state = SimpleNamespace(base=SimpleNamespace(rest=rest), step=None)
    asyncio.run(worker._prefetch(SOLVER, cast("Any", state)))
    assert worker._prefetched == {SOLVER: {}}
    assert threads and threads[0] is not threading.main_thread()
