"""The section ``gateway``: the address at which programs outside the run open sessions."""

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator

from ...actors.config_base import Config, Count, Seconds, Unit

LOOPBACK: Final = "127.0.0.1"


def _text(listen: Any) -> Any:
    """YAML has a port alone as a number."""
    return str(listen) if isinstance(listen, int) and not isinstance(listen, bool) else listen


def _check_address(listen: str | None) -> str | None:
    if listen is not None:
        address_of(listen)
    return listen


ListenAddress = Annotated[str | None, BeforeValidator(_text), AfterValidator(_check_address)]
"""``HOST:PORT`` or ``PORT``, for ``address_of``; None: nothing listens."""


class GatewayConfig(Config):
    """The run's gateway: a service opens [sessions](programs.md#from-a-service) at it, has them played by any program,
    and reports their rewards."""

    listen: ListenAddress = None
    """`HOST:PORT` or `PORT` (of 127.0.0.1) at which it listens, without encryption. Port 0: a free one, which
    `events.jsonl` names. `null`: there is no gateway."""
    key_file: Path | None = None
    """File with the key of services, which may open sessions; readable by its owner alone. `null`: the run makes one,
    and keeps it in its folder in `gateway.key`."""
    session_s: Seconds = 3600.0
    """Longest life of a session, and its life if the service asks for none. One that has no rewards then expires."""
    open_timeout_s: Seconds = 60.0
    """Time within which a new session must be at a rollout worker. Under `strict` and `sync` that is when the next step
    begins. Then the request is refused, and the service asks again."""
    stop_s: Seconds = 3.0
    """Time that open sessions have in a run that was asked to stop, if its steps wait for them: programs end their
    calls, services report rewards. Then the sessions are lost."""
    serves: bool = False
    """`true`: nothing is trained or evaluated, and requests with the key go to the agents, until the run is stopped.
    `flexmarl serve` sets it."""
    max_sessions: Annotated[Count, Unit("sessions")] = 1000
    """Most open sessions. A further one is refused."""


def address_of(listen: str) -> tuple[str, int]:
    """Host and port. Raises ValueError."""
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{listen!r} is invalid: write HOST:PORT, or PORT alone")
    return host.strip("[]") or LOOPBACK, int(port)
