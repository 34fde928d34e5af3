"""A reference to an actor: a value that can be kept, compared and sent in a message."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from .errors import LocalProtocolError

if TYPE_CHECKING:
    from .system import ActorSystem

# Covariant: a reference to an actor serves wherever one to a protocol that it fulfils is asked for.
Api = TypeVar("Api", covariant=True)

DEFAULT_TIMEOUT_S = 30.0


class ActorRef(Generic[Api]):
    """Where an actor is and, through the system that holds the reference, a way to call it.

    ``Api`` is the class whose endpoints may be called: the actor's own or a protocol it fulfils. A parameter
    annotated ``ActorRef[StoreApi]`` receives a reference that is ready to use.
    """

    __slots__ = ("_api", "_system", "address", "name")

    def __init__(
        self, name: str, address: str, system: "ActorSystem | None" = None, api: type | None = None
    ) -> None:
        self.name = name
        self.address = address
        self._system = system
        self._api = api

    @property
    def api(self) -> Api:
        """The actor's endpoints, as methods to await; each call has the default deadline."""
        return self.within(DEFAULT_TIMEOUT_S)

    def within(self, timeout_s: float) -> Api:
        """The actor's endpoints, each call with a deadline of ``timeout_s`` seconds.

        A call raises CallTimeout, ActorDead, RemoteError (the endpoint raised), RemoteProtocolError
        (arguments or result of the wrong type), LocalProtocolError or SystemClosed.
        """
        return cast(Api, _Proxy(self, timeout_s))

    async def ask(
        self, endpoint: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any
    ) -> Any:
        """Calls an endpoint by name; raises what ``within`` lists."""
        return await self._bound().call(self, self._api, endpoint, args, kwargs, timeout_s)

    def tell(self, endpoint: str, *args: Any, **kwargs: Any) -> None:
        """Sends without waiting for anything: delivered at most once, in order with this system's other messages."""
        self._bound().tell(self, endpoint, args, kwargs)

    def _bound(self) -> "ActorSystem":
        if self._system is None:
            raise LocalProtocolError(f"the reference to {self.name} belongs to no actor system")
        return self._system

    def __wire__(self) -> dict[str, str]:
        return {"name": self.name, "address": self.address}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorRef) and (self.name, self.address) == (other.name, other.address)

    def __hash__(self) -> int:
        return hash((self.name, self.address))

    def __repr__(self) -> str:
        return f"ActorRef({self.name} at {self.address})"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        api = next(iter(get_args(source)), None)
        fields = core_schema.typed_dict_schema(
            {
                "name": core_schema.typed_dict_field(core_schema.str_schema()),
                "address": core_schema.typed_dict_field(core_schema.str_schema()),
            },
            extra_behavior="forbid",
        )

        def bind(value: dict[str, str], info: core_schema.ValidationInfo) -> "ActorRef[Any]":
            return cls(value["name"], value["address"], info.context, api if isinstance(api, type) else None)

        from_wire = core_schema.with_info_after_validator_function(bind, fields)
        return core_schema.union_schema([core_schema.is_instance_schema(cls), from_wire])


class _Proxy:
    """Turns ``proxy.endpoint(...)`` into a call; seen by type checkers as the actor's API itself."""

    __slots__ = ("_ref", "_timeout_s")

    def __init__(self, ref: ActorRef[Any], timeout_s: float) -> None:
        self._ref = ref
        self._timeout_s = timeout_s

    def __getattr__(self, endpoint: str) -> Callable[..., Awaitable[Any]]:
        ref, timeout_s = self._ref, self._timeout_s
        return lambda *args, **kwargs: ref.ask(endpoint, *args, timeout_s=timeout_s, **kwargs)
