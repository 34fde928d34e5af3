"""A call that has been made: to be awaited, at once or later."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from .signature import Signature

if TYPE_CHECKING:
    from .delivery.outbound import Outbound


class Call(asyncio.Future[Any], Coroutine[Any, Any, Any]):
    """The result of a call, which was sent when it was made.

    A future, so that ``gather``, ``wait_for`` and ``shield`` make no task for it, and a coroutine too, because
    ``create_task`` and ``TaskGroup.create_task`` take nothing else. ``asyncio.wait`` refuses coroutines: give it tasks.
    As with any future, cancelling an awaiter cancels the call, and the event loop logs the error of a call that is
    never awaited.
    """

    __slots__ = ("owner", "request_id", "signature", "unsent")

    owner: "Outbound"
    """The connection that the call was made on."""
    signature: Signature | None
    """The endpoint's, for the result; None if it is unknown."""
    request_id: int
    """The request's, once it has been sent."""
    unsent: Any
    """The request while it waits for credit (``delivery.unsent.Unsent``), else None."""

    def cancel(self, msg: Any = None) -> bool:
        """Cancels the call at the callee too."""
        cancelled = super().cancel(msg)
        if cancelled:
            self.owner.give_up(self)
        return cancelled

    # ------------------------------------------------------------------ as a coroutine, which waits for the future

    def send(self, value: Any, /) -> Any:
        return self.__await__().send(value)

    def throw(self, *error: Any) -> Any:
        self.cancel()
        return self.__await__().throw(*error)

    def close(self) -> None:
        self.cancel()
