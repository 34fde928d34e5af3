"""The section ``rollout.sandbox``: the table of the sandboxes that a config can name.

The classes are imported when a worker makes its sandbox: the client of servers is an extra.
"""

from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from ....core.wire.curve import read_private
from ...config_base import Config, Natural, Seconds, chosen_by_name
from .sandbox import ComputeInProcess, Sandbox

RunBlocking = Callable[..., Awaitable[Any]]


class LocalSandboxConfig(Config):
    """Commands of [`run_in_sandbox`](environments.md#sandboxes), by processes of the rollout worker."""

    name: Literal["local"] = "local"
    """Place of commands: `local`, processes of the rollout worker (`rollout.processes`), with its rights; `rex`,
    servers of SWE-ReX."""

    def sandbox(self, compute: ComputeInProcess, folder: Path, run_blocking: RunBlocking) -> Sandbox:
        """A sandbox for a worker, with ``compute`` of its pool. ``folder``: for its files; made when it is needed."""
        from .local_sandbox import LocalSandbox

        return LocalSandbox(compute, folder, run_blocking)


class RexSandboxConfig(Config):
    """Commands of [`run_in_sandbox`](environments.md#sandboxes), by servers of SWE-ReX."""

    name: Literal["rex"] = "rex"
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Addresses of the servers, such as `http://10.0.0.7:8000`. Each computes one command of a worker at a time."""
    key_file: str
    """File with the key of the servers (`--auth-token`), readable by its owner alone."""
    retries: Natural = 2
    """Number of times that a command is begun again, at the next server, because its server can't be reached or has
    gone away."""
    queue_timeout_s: Seconds = 600.0
    """Deadline of the wait for a server that is free."""

    @model_validator(mode="after")
    def _client_is_there(self) -> "RexSandboxConfig":
        if find_spec("httpx2") is None:
            raise ValueError("name=rex: httpx2 is missing; install it by: pip install 'flexmarl[sandbox]'")
        return self

    def sandbox(self, compute: ComputeInProcess, folder: Path, run_blocking: RunBlocking) -> Sandbox:
        """As for ``local``, whose arguments it does not need. Raises OSError, UnsafeKeys for the file of the
        key."""
        from .rex_sandbox import RexSandbox

        key = read_private(Path(self.key_file)).decode().strip()
        return RexSandbox(self.urls, key, self.retries, self.queue_timeout_s)


SandboxConfig = Annotated[
    Annotated[LocalSandboxConfig, Tag("local")] | Annotated[RexSandboxConfig, Tag("rex")],
    chosen_by_name("local"),
]
"""The section ``rollout.sandbox``."""
