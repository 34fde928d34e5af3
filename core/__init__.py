"""The actor runtime: actors of one process or of many, and messages between them.

    from flexmarl.core import Actor, ActorSystem, endpoint

    class Greeter(Actor):
        @endpoint
        async def greet(self, name: str) -> str:
            return f"hello {name}"

    async with ActorSystem("service") as system:
        greeter = await system.spawn(Greeter, "greeter", process=True)
        await greeter.api.greet("world")

Names are imported when they are first used. None of them imports torch or NumPy.
"""

from typing import TYPE_CHECKING

from .base.front_door import lazy_exports
from .errors import (
    ActorDead,
    ActorFailed,
    ActorNotFound,
    CallNotAllowed,
    CallTimeout,
    FlexmarlError,
    InvalidKeys,
    JournalError,
    LocalProtocolError,
    NoCredit,
    PlainTcpRefused,
    RemoteError,
    RemoteProtocolError,
    SystemClosed,
    TooManyRestarts,
    Unreachable,
    UnsafeDirectory,
    UnsafeKeys,
)

if TYPE_CHECKING:
    from .actor import Actor, DeadActor, endpoint
    from .protocol.codec import Buffer
    from .protocol.session import Settings
    from .ref import ActorRef
    from .supervision.process_node import ProcessNode
    from .supervision.restart_policy import Intensity
    from .supervision.supervisor import Supervisor
    from .system import ActorSystem
    from .wire.curve import Keys
    from .wire.zeromq import Tcp
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "actor": ["Actor", "DeadActor", "endpoint"],
            "protocol.codec": ["Buffer"],
            "protocol.session": ["Settings"],
            "ref": ["ActorRef"],
            "supervision.process_node": ["ProcessNode"],
            "supervision.restart_policy": ["Intensity"],
            "supervision.supervisor": ["Supervisor"],
            "system": ["ActorSystem"],
            "wire.curve": ["Keys"],
            "wire.zeromq": ["Tcp"],
        },
    )

__all__ = [
    "Actor",
    "ActorDead",
    "ActorFailed",
    "ActorNotFound",
    "ActorRef",
    "ActorSystem",
    "Buffer",
    "CallNotAllowed",
    "CallTimeout",
    "DeadActor",
    "FlexmarlError",
    "Intensity",
    "InvalidKeys",
    "JournalError",
    "Keys",
    "LocalProtocolError",
    "NoCredit",
    "PlainTcpRefused",
    "ProcessNode",
    "RemoteError",
    "RemoteProtocolError",
    "Settings",
    "Supervisor",
    "SystemClosed",
    "Tcp",
    "TooManyRestarts",
    "Unreachable",
    "UnsafeDirectory",
    "UnsafeKeys",
    "endpoint",
]
