"""The process of a node: joins a run, and has processes for its actors until it is dismissed or the head is lost."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....core.base.texts import text_of
from ....core.durable.private_directory import private_directory
from ....core.errors import ActorDead, CallNotAllowed, CallTimeout, FlexmarlError
from ....core.supervision.process_node import ProcessNode
from ....core.system import ActorSystem
from ....core.wire.zeromq import Tcp
from ...errors import NoRunToJoin
from ...run.resuming import code_digests
from ...run.run_address import RunAddress
from ...run_folder.run_directory import RunDirectory
from .. import env
from ..host_description import describe_host
from ..local_address import own_address_toward
from .joining import NAME, Dismissal, Joining, NodesApi, Offer
from .membership import given_up_within, serve_run

_ASK_S: Final = 30.0
_RETRY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """``find``: reads the run's address; raises FileNotFoundError before the run has one. ``name``: of the node; empty:
    the host's. ``listen``: the address of this host at which its actors listen; empty: the one that the head sees.
    ``wait_s``: the longest wait for the run. ``again``: an earlier process of this node may have been in the run a
    moment before: while the head has not given that one up, the name is taken."""

    find: Callable[[], RunAddress]
    name: str
    listen: str
    wait_s: float
    again: bool = False


async def serve(
    options: NodeOptions, progress: Callable[[str], None], joined: Callable[[], None] = lambda: None
) -> Dismissal:
    """Joins a run and serves it until the node is dismissed. ``joined`` is called when the run has taken it.

    Raises NodeRefused or NameTaken; NoRunToJoin if the run can't be reached in time, InvalidKeys or UnsafeKeys;
    ActorDead if the head is lost.
    """
    run, offer = await _find_run(options, progress)
    tcp = Tcp(options.listen or own_address_toward(_host_of(run.address)), keys=run.keys)
    async with (
        private_directory(env.runtime_base()) as directory,
        ActorSystem("node", directory, tcp=tcp, settings=offer.settings) as system,
    ):
        environment = {**env.actor_environment(), **offer.environment}
        logs = RunDirectory(Path(offer.folder)).logs
        processes = ProcessNode(
            system, directory, logs, environment, modules=offer.modules, late_variables=env.LATE_VARIABLES
        )
        joining = await asyncio.to_thread(_describe, options.name, offer)
        text = f"node {joining.host.name} has joined the run {offer.folder} at {run.address}"

        def report_joined() -> None:
            joined()
            progress(text)

        return await serve_run(
            system,
            processes,
            system.ref(NAME, run.address, NodesApi),
            joining,
            memory=directory,
            name_taken_s=given_up_within(offer.settings) if options.again else 0.0,
            joined=report_joined,
        )


async def _find_run(options: NodeOptions, progress: Callable[[str], None]) -> tuple[RunAddress, Offer]:
    loop = asyncio.get_running_loop()
    deadline, said = loop.time() + options.wait_s, ""
    while True:
        run: RunAddress | None = None
        try:
            run = options.find()
            if run.keys is None:
                raise NoRunToJoin("the run listens on no network: write network.listen=ADDRESS in its config")
            async with ActorSystem("node", keys=run.keys) as system:
                return run, await system.ref(NAME, run.address, NodesApi).within(_ASK_S).offer()
        except CallNotAllowed as error:
            raise NoRunToJoin(
                "this address file does not give the right to join the run: use the run's own, runs/NAME/address"
            ) from error
        except (FileNotFoundError, ActorDead, CallTimeout) as error:
            problem: Exception = (run and await _unknown_host(run.address)) or error
            if isinstance(error, FileNotFoundError):
                problem = NoRunToJoin(
                    f"there is no file {error.filename}: the run has not begun, or its folder is not on a disk of this "
                    "host (--join, --key)"
                )
        if loop.time() >= deadline:
            raise NoRunToJoin(
                f"no run was found within {options.wait_s:g} s (--wait-s): {problem}"
            ) from problem
        if str(problem) != said:
            said = str(problem)
            progress(f"waiting for the run: {said}")
        await asyncio.sleep(_RETRY_S)


async def _unknown_host(address: str) -> NoRunToJoin | None:
    """The error if the name of the address's host is unknown here: else it looks like a host that does not answer."""
    try:
        await asyncio.get_running_loop().getaddrinfo(_host_of(address), None)
    except OSError as error:
        return NoRunToJoin(
            f"the host {_host_of(address)} of the run's address is unknown here ({error.strerror}): join by its IP "
            "address, --join tcp://ADDRESS:PORT --key FILE"
        )
    return None


def _describe(name: str, offer: Offer) -> Joining:
    folder, seen, problem = RunDirectory(Path(offer.folder)), "", ""
    try:
        seen = RunAddress.load(folder.control_address).address
        if not os.access(folder.logs, os.W_OK):
            problem = f"{folder.logs} can't be written"
    except (OSError, FlexmarlError) as error:
        problem = text_of(error)
    return Joining(describe_host(name), code_digests(Path(offer.recipe)), seen, problem)


def _host_of(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
