"""A process of ``scripts/bench/run relays``: the owner of a state, or one of its readers on another host.

Standard input carries a line of JSON with the settings, then one with each command; standard output carries a line of
JSON with the result of each. The process ends with its standard input.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from flexmarl.core import Keys
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.state import StateTransport

_HANDLES = TypeAdapter(StateHandle)


async def main() -> None:
    """Obeys until the standard input ends."""
    settings = json.loads(sys.stdin.readline())
    bulk = Bulk(settings["address"], Keys.load(Path(settings["keys"])), encrypted=settings["encrypted"])
    state = {"w": np.zeros(settings["size_bytes"], np.uint8)}
    async with StateTransport(Path(settings["directory"]), bulk=bulk) as transport:
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            result = await (_set if "version" in command else _get)(transport, state, command)
            print(json.dumps(result), flush=True)


async def _set(transport: StateTransport, state: dict[str, Any], command: dict[str, Any]) -> dict[str, Any]:
    # Nothing of the version before: no byte comes as a change.
    state["w"][:] = np.random.default_rng(command["version"]).integers(0, 256, len(state["w"]), np.uint8)
    handle = await transport.set("weights", state, version=command["version"], timeout_s=600)
    return {"handle": _HANDLES.dump_python(handle, mode="json")}


async def _get(transport: StateTransport, state: dict[str, Any], command: dict[str, Any]) -> dict[str, Any]:
    before, started = transport.statistics().numbers(), time.perf_counter()
    await transport.get(_HANDLES.validate_python(command["handle"]), into=state, timeout_s=600)
    seconds, after = time.perf_counter() - started, transport.statistics().numbers()
    got = {name: after[name] - before[name] for name in after if name.startswith("transport_network_")}
    return {"seconds": seconds, **{name.removeprefix("transport_network_"): got[name] for name in got}}


if __name__ == "__main__":
    asyncio.run(main())
