"""A reference to an actor: a value that can be kept, compared and sent in a message."""

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from .delivery.outbound import Call, Outbound, failed_call
from .errors import FlexmarlError, LocalProtocolError
from .protocol.messages import check_timeout
from .protocol.open_requests import Callee
from .signature import Signature, signature_of

if TYPE_CHECKING:
    from .delivery.peers import Network

# Covariant: a reference to an actor serves wherever one to a protocol that it fulfils is asked for.
Api = TypeVar("Api", covariant=True)

DEFAULT_TIMEOUT_S = 30.0


class ActorRef(Generic[Api]):
    """The name and address of an actor and, through the system that holds the reference, a way to call it.

        store = await system.lookup("store", StoreApi)       # an ActorRef[StoreApi]
        rows = await store.api.select(10)                    # within DEFAULT_TIMEOUT_S, 30 s
        rows = await store.within(2.0).select(10)            # within 2 s
        await store.tell("put", rows[0])                     # one way: no answer

    ``Api`` is the class whose endpoints may be called: the actor's own or a protocol that it fulfils. A parameter
    annotated ``ActorRef[StoreApi]`` receives a reference that is ready to use. It stays valid when the actor is
    restarted.
    """

    __slots__ = ("_api", "_network", "_outbound", "_proxy", "address", "name")

    def __init__(
        self, name: str, address: str, network: "Network | None" = None, api: type | None = None
    ) -> None:
        self.name = name
        self.address = address
        self._network = network
        self._api = api
        self._outbound: Outbound | None = None
        self._proxy: _Proxy | None = None

    @property
    def api(self) -> Api:
        """The actor's endpoints, as methods; each call has the default deadline.

        A call is sent at once, in the order of the program, and may be awaited later (``delivery.outbound.Call``). If
        credit is missing it waits behind earlier calls, with its arguments as they were.
        """
        if self._proxy is None:
            self._proxy = _Proxy(self, DEFAULT_TIMEOUT_S)
        return cast(Api, self._proxy)

    def within(self, timeout_s: float) -> Api:
        """The actor's endpoints, each call with a deadline of ``timeout_s`` seconds; for a stream, each of its items.

        Awaiting a call raises CallTimeout, ActorDead, RemoteError (the endpoint raised), RemoteProtocolError
        (arguments or result of the wrong type), LocalProtocolError or SystemClosed; ValueError if ``timeout_s`` is
        negative or NaN.
        """
        check_timeout(timeout_s)
        return cast(Api, _Proxy(self, timeout_s))

    def ask(self, endpoint: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any) -> Call:
        """Calls an endpoint by name; awaiting it raises what ``within`` lists."""
        signature = self._signature(endpoint)
        try:
            outbound = self._connect()
            callee = outbound.callee(self.name, endpoint, timeout_s)
        except FlexmarlError as error:
            return failed_call(error)
        return outbound.call(callee, args, kwargs, signature)

    def tell(self, endpoint: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any) -> Call:
        """Sends at once, without a reply: delivered at most once, in order with this system's other requests.

        To be awaited: it waits for credit if a whole window of messages to the actor is not processed yet, and raises
        CallTimeout after ``timeout_s``.
        """
        outbound = self._outbound
        if outbound is None or outbound.dead is not None:
            try:
                outbound = self._connect()
            except FlexmarlError as error:
                return failed_call(error)
        return outbound.tell(self.name, endpoint, args, kwargs, timeout_s)

    def tell_nowait(self, endpoint: str, *args: Any, **kwargs: Any) -> None:
        """``tell`` for code that can't wait: raises NoCredit if a whole window of messages is not processed yet."""
        self._connect().tell_nowait(self.name, endpoint, args, kwargs)

    def stream(
        self, endpoint: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """The items of a streaming endpoint, each within ``timeout_s``; raises what ``within`` lists.

            async with aclosing(greeter.stream("count", 3)) as numbers:      # or greeter.api.count(3)
                async for number in numbers:
                    print(number)

        To leave the iteration early, put ``contextlib.aclosing`` around it: otherwise the stream ends only when the
        garbage collector finds it.
        """
        check_timeout(timeout_s)
        signature = self._signature(endpoint)
        return self._connect().stream(self.name, endpoint, args, kwargs, timeout_s, signature)

    def _signature(self, endpoint: str) -> Signature | None:
        return None if self._api is None else signature_of(self._api, endpoint)

    def _connect(self) -> Outbound:
        """The connection's half for calls. Raises LocalProtocolError, SystemClosed, or the process's exit reason."""
        outbound = self._outbound
        if outbound is None or outbound.dead is not None:  # by now another actor may have that address
            if self._network is None:
                raise LocalProtocolError(f"the reference to {self.name} belongs to no actor system")
            outbound = self._outbound = self._network.connection(self.address).outbound
        return outbound

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
    """Turns ``proxy.endpoint(...)`` into a call; to type checkers it is the actor's API."""

    def __init__(self, ref: ActorRef[Any], timeout_s: float) -> None:
        self._ref = ref
        self._timeout_s = timeout_s

    def __getattr__(self, endpoint: str) -> Callable[..., Any]:
        ref, timeout_s = self._ref, self._timeout_s
        signature = ref._signature(endpoint)
        outbound: Outbound | None = None
        callee: Callee | None = None

        def stream(*args: Any, **kwargs: Any) -> Any:
            return ref.stream(endpoint, *args, timeout_s=timeout_s, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal outbound, callee
            if outbound is None or callee is None or outbound.dead is not None:
                try:
                    outbound = ref._connect()
                    callee = outbound.callee(ref.name, endpoint, timeout_s)
                except FlexmarlError as error:
                    return failed_call(error)
            return outbound.call(callee, args, kwargs, signature)

        method = stream if signature is not None and signature.streams else call
        setattr(self, endpoint, method)  # the next use finds it there
        return method
