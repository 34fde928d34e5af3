"""The gateway of a run, made from its config."""

import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

from ...actors.errors import ConfigError
from ...actors.gateway.gateway_config import WAITING_CONNECTIONS
from ...actors.gateway.server import missing_extra
from ...actors.messages import ConsoleApi, OrchestratorApi, RolloutApi, SessionsApi
from ...actors.run_events import GatewayListens
from ...core.ref import ActorRef
from ...core.system import ActorSystem
from ..config.run_config import RunConfig
from ..run_folder.run_directory import RunDirectory
from .gateway_config import address_of
from .served_front import ServedFront
from .service_key import service_key
from .session_front import SessionFront

Api = TypeVar("Api")


class Find(Protocol):
    """Returns an actor of the run, once it is being started."""

    def __call__(self, actor: str, api: type[Api]) -> Awaitable[ActorRef[Api]]: ...


@asynccontextmanager
async def opened_front(
    system: ActorSystem,
    config: RunConfig,
    directory: RunDirectory,
    find: Find,
    console: ActorRef[ConsoleApi],
) -> AsyncIterator[ActorRef[SessionsApi] | None]:
    """The gateway of a run, as an actor of the launcher's and a server that ends with the context; None if the config
    has none. Raises ConfigError, and RecipeError without the extra."""
    if config.gateway.listen is None:
        yield None
        return
    try:
        from ...actors.gateway.http_server import serve  # an extra
        from .front_app import application
    except ImportError as error:
        raise missing_extra(error) from error
    key_file = config.gateway.key_file or directory.gateway_key
    key = await system.run_blocking(service_key, config.gateway.key_file, directory.gateway_key)
    notify = partial(console.tell_nowait, "event")
    front: SessionFront | ServedFront
    reference = None
    if config.gateway.serves:
        workers = [partial(find, f"rollout-{number}", RolloutApi) for number in range(config.rollout.workers)]
        front = ServedFront(key, workers, config.gateway.open_timeout_s)
    else:
        orchestrator = partial(find, "orchestrator", OrchestratorApi)
        front = SessionFront(config.gateway, key, tuple(config.agents), orchestrator, notify)
        reference = await system.add(front, "gateway")
    listening = _listen(config.gateway.listen)
    async with serve(application(front), listening):
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        notify(GatewayListens(f"http://{shown}:{port}", str(key_file)))
        yield reference


def _listen(address: str) -> socket.socket:
    """Raises ConfigError."""
    host, port = address_of(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=WAITING_CONNECTIONS)
    except OSError as error:
        raise ConfigError(f"gateway.listen={address}: {error.strerror}") from error
