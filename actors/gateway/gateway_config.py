"""Settings of a gateway."""

from typing import Annotated, Final

from pydantic import Field

from ..config_base import Config, Positive, Unit

WAITING_CONNECTIONS: Final = 2048
"""The most that wait to be accepted: a thousand programs may begin at once."""


class GatewayServerConfig(Config):
    """The servers of [agent programs](programs.md): one for each rollout worker, from its first program on."""

    listen: str = "127.0.0.1"
    """Address that it listens on. Another one than the loopback's is for programs in containers and on other machines:
    requests have a key, and are not encrypted."""
    port: Annotated[int, Field(ge=0, le=65535), Unit("port")] = 0
    """Port of the first worker; the next worker has the next one. 0: any free one."""
    calls_per_s: Annotated[Positive, Unit("calls/s")] = 100.0
    """Most calls of a session, refused ones too: on average, and ten times as many at once. A further one gets status
    429 with the time to wait. It ends no trajectory: a program that calls without pause is only slowed."""
    host: str | None = None
    """Name or address under which programs reach it; null: `listen`, or this host's name if it listens on all
    addresses."""
