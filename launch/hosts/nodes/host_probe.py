"""The far side of ``flexmarl doctor --hosts``, started by ssh: describes its host and tries the connections.

    standard input     standard output
    a ProbeRequest ──> a ProbeAnswer
    any line       ──> the time of this host, at once
    its end        ──> (the process ends)

Each answer is one line of JSON behind ``MARK``: a shell may print lines of its own.
"""

import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from ..diagnosis import Diagnosis, diagnose
from ..local_address import own_address_toward

MARK: Final = "flexmarl-probe "
CONNECT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """``address``, ``port``: the asking host listens there; empty and 0 if it has no address. ``runs``: the folder of
    all runs. ``proof``: a file in that folder with the text ``text``; empty without such a file."""

    address: str
    port: int
    runs: str
    proof: str
    text: str


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """``not_reached``: the reason why the asking host is not reached from here, or empty. ``folder_problem``: the
    reason why the folder of runs is not the asking host's. ``address``, ``port``: at which this host listens."""

    diagnosis: Diagnosis
    not_reached: str
    folder_problem: str
    address: str
    port: int


def connection_problem(address: str, port: int) -> str:
    """Empty if a connection is made within 5 s."""
    try:
        with socket.create_connection((address, port), CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error) or "it does not answer"


def _folder_problem(request: ProbeRequest) -> str:
    """The reason why the folder of runs here is not the one of the asking host: its proof can't be read, or has another
    text. Empty if it is the same one, or if there is no proof."""
    if not request.proof:
        return ""
    try:
        seen = Path(request.proof).read_text()
    except (OSError, UnicodeDecodeError) as error:
        return str(error)
    return "" if seen == request.text else "it is another folder there"


def answer(request: ProbeRequest) -> tuple[ProbeAnswer, socket.socket]:
    """The answer, and the socket that listens. Raises OSError if no socket can listen."""
    not_reached, address = "", ""
    if request.port:
        not_reached = connection_problem(request.address, request.port)
        address = own_address_toward(request.address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    port = listening.getsockname()[1]
    probe_answer = ProbeAnswer(
        diagnose(Path(request.runs)), not_reached, _folder_problem(request), address, port
    )
    return probe_answer, listening


def main() -> None:
    """Answers one request, then each further line with the time, until standard input ends. Raises pydantic's
    ValidationError if the first line is not a ProbeRequest."""
    request = TypeAdapter(ProbeRequest).validate_json(sys.stdin.readline())
    probe_answer, listening = answer(request)
    with listening:
        _write(MARK + json.dumps(asdict(probe_answer)))
        for _ in sys.stdin:
            _write(f"{MARK}{time.time()!r}")


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
