"""The hosts of a hosts file against this one, for ``flexmarl doctor --hosts``."""

import asyncio
import json
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError

from ....actors.errors import ConfigError
from ....core.base.texts import listing
from ..diagnosis import Diagnosis
from ..host_description import version_problems
from ..local_address import own_address
from .host_probe import MARK, ProbeAnswer, ProbeRequest, connection_problem
from .hosts_file import SshHost
from .ssh import ssh_command

_AT_ONCE: Final = 32
_HOST_S: Final = 60.0
_END_S: Final = 5.0
_LAST_LINES: Final = 5
_CLOCK_ROUNDS: Final = 5
_LINE_BYTES: Final = 1 << 20
MOST_SKEW_S: Final = 1.0
_OPEN_PORTS: Final = (
    "the kernel chooses the ports of a run: open all of them between the hosts, or name addresses of a network in "
    "which they are open (network.listen, and the hosts file)"
)


@dataclass(frozen=True, slots=True)
class HostFinding:
    """A host of the hosts file. ``diagnosis``: None if it could not be asked. ``clock_ahead_s``: seconds by which its
    clock is ahead of this host's, known to ``clock_error_s``. ``problems``: each a sentence, and what to do."""

    name: str
    destination: str
    diagnosis: Diagnosis | None
    clock_ahead_s: float | None
    clock_error_s: float
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probed:
    """A host's answer. ``not_reached``: the reason why it is not reached from here, or empty."""

    answer: ProbeAnswer
    not_reached: str
    clock_ahead_s: float
    clock_error_s: float


async def probe(hosts: Sequence[SshHost], local: Diagnosis) -> list[HostFinding]:
    """Asks the hosts, 32 at once, each for 65 s at most. Leaves nothing behind. ``local``: this host."""
    try:
        address, no_address = await asyncio.to_thread(own_address), ""
    except ConfigError as error:
        address, no_address = "", str(error)
    with (
        socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        ) as listening,
        _proof(local) as (proof, text),
    ):
        port = listening.getsockname()[1] if address else 0
        request = ProbeRequest(address, port, local.runs.path, proof, text)
        free = asyncio.Semaphore(_AT_ONCE)

        async def find(host: SshHost) -> HostFinding:
            async with free:
                return await _finding(host, request, local, no_address)

        # The hosts' connections are accepted and closed: of those that are not accepted the kernel keeps 128.
        async with await asyncio.start_server(_close, sock=listening), asyncio.TaskGroup() as group:
            asking = [group.create_task(find(host)) for host in hosts]
    return [task.result() for task in asking]


async def _close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@contextmanager
def _proof(local: Diagnosis) -> Iterator[tuple[str, str]]:
    """A file in the folder of runs, and its text; empty if none can be written there, as ``local`` says."""
    if local.runs.refused:
        yield "", ""
        return
    text = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile("w", dir=local.runs.path, prefix=".flexmarl-doctor-") as file:
        file.write(text)
        file.flush()
        yield file.name, text


async def _finding(host: SshHost, request: ProbeRequest, local: Diagnosis, no_address: str) -> HostFinding:
    try:
        async with asyncio.timeout(_HOST_S):
            probed = await _ask(host, request)
    except TimeoutError:
        probed = f"it has not answered within {_HOST_S:g} s"
    if isinstance(probed, str):
        text = f"{host.where}: {host.name} ({host.destination}) can't be asked: {probed}"
        return HostFinding(host.name, host.destination, None, None, 0.0, (text,))
    problems = tuple(problems_of(host, probed, request, local))
    if no_address:
        problems = (*problems, no_address)
    ahead, error = round(probed.clock_ahead_s, 4), round(probed.clock_error_s, 4)
    return HostFinding(host.name, host.destination, probed.answer.diagnosis, ahead, error, problems)


def problems_of(host: SshHost, probed: Probed, request: ProbeRequest, local: Diagnosis) -> Iterator[str]:
    """The problems of a host that has answered, each a sentence with its remedy: those that it has by itself, and those
    between it and this host (versions, user, connections both ways, folder, clock)."""
    answer, name = probed.answer, host.name
    yield from (f"{name}: {problem}" for problem in answer.diagnosis.problems)
    for problem in version_problems([local.host, answer.diagnosis.host]):
        yield f"{problem}: install the same, or name another python in {host.where}"
    if (user := answer.diagnosis.user) != local.user:
        yield (
            f"{name} is reached as the user {user}, and the user here is {local.user}: a run's files are of one user; "
            f"name that one in {host.where}, as user@address"
        )
    if answer.not_reached:
        where = f"this host at {request.address}, port {request.port}"
        yield f"{name} does not reach {where}: {answer.not_reached}; {_OPEN_PORTS}"
    if probed.not_reached:
        where = f"{name} at {answer.address}, port {answer.port}"
        yield f"this host does not reach {where}: {probed.not_reached}; {_OPEN_PORTS}"
    if answer.folder_problem:
        yield (
            f"{request.runs}, the folder of all runs, is not shared with {name}: {answer.folder_problem}; name one by "
            "--runs that all hosts have under the same path"
        )
    if abs(probed.clock_ahead_s) - probed.clock_error_s > MOST_SKEW_S:
        yield (
            f"the clock of {name} differs by {probed.clock_ahead_s:+.1f} s from this host's: set both by NTP, or "
            "events of several hosts seem to be out of order"
        )


async def _ask(host: SshHost, request: ProbeRequest) -> Probed | str:
    """Asks a host. Returns its answer, or the reason why it gave no answer."""
    try:
        process = await asyncio.create_subprocess_exec(
            *ssh_command(host, ["-m", "flexmarl.launch.hosts.nodes.host_probe"]),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        return "there is no program ssh here"
    try:
        line = await _exchange(process, json.dumps(asdict(request)))
        if line is None:
            return await _reason(process)
        try:
            answer = TypeAdapter(ProbeAnswer).validate_json(line)
        except ValidationError:
            return f"{host.python} there has another flexmarl than this one: install the same"
        clock = await _clock_ahead(process)
        if clock is None:
            return await _reason(process)
        not_reached = ""
        if answer.address:
            not_reached = await asyncio.to_thread(connection_problem, answer.address, answer.port)
        return Probed(answer, not_reached, *clock)
    finally:
        await _end(process)


async def _exchange(process: asyncio.subprocess.Process, line: str) -> str | None:
    """The next answer; None if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(ConnectionError):  # it has ended
        process.stdin.write(f"{line}\n".encode())
        await process.stdin.drain()
    async for answer in process.stdout:
        text = answer.decode(errors="replace")
        if text.startswith(MARK):
            return text.removeprefix(MARK)
    return None


async def _clock_ahead(process: asyncio.subprocess.Process) -> tuple[float, float] | None:
    """Seconds by which the other clock is ahead, and the most that this is wrong by: half of the fastest exchange
    (Cristian: Probabilistic clock synchronization, 1989). None if the process has ended."""
    measurements: list[tuple[float, float]] = []
    for _ in range(_CLOCK_ROUNDS):
        before = time.time()
        clock = await _exchange(process, "time")
        after = time.time()
        if clock is not None:
            measurements.append(((after - before) / 2, float(clock) - (before + after) / 2))
    if not measurements:
        return None
    error, ahead = min(measurements)
    return ahead, error


async def _reason(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = (await process.stderr.read()).decode(errors="replace").splitlines()
    return f"ssh ended with status {await process.wait()}{listing(said[-_LAST_LINES:])}"


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
