"""``is_loss``: the errors after which the same work may succeed, once an actor has been started again."""

import pytest

from flexmarl.core.errors import (
    CANCELLED,
    ActorDead,
    ActorFailed,
    CallTimeout,
    RemoteError,
    RemoteProtocolError,
    SystemClosed,
    TooManyRestarts,
    Unreachable,
    is_loss,
)

DEAD = ActorDead("store", "killed")


def remote(kind: str) -> RemoteError:
    return RemoteError("trainer", "train", kind, "text", "traceback")


@pytest.mark.parametrize(
    "error",
    [
        DEAD,
        Unreachable("store", "no connection"),
        CallTimeout("store", "put", 1.0),
        TooManyRestarts("store", 3, 60.0, DEAD),
        remote("ActorDead"),
        remote("Unreachable"),
        remote("CallTimeout"),
        ActorFailed("trainer", "actor store died", "", kind="ActorDead"),
        ActorFailed("trainer", "no answer", "", kind="CallTimeout", raised_in="rollout"),
        RemoteError("router", "routes", CANCELLED, "cancelled", ""),
        ActorFailed("rollout", "cancelled", "", kind=CANCELLED, raised_in="router"),
        ExceptionGroup("two", [ValueError(), ExceptionGroup("one", [DEAD])]),
    ],
)
def test_a_lost_actor_and_its_consequences_are_losses(error: BaseException) -> None:
    assert is_loss(error)


@pytest.mark.parametrize(
    "error",
    [
        ActorFailed("trainer", "ActorDead", "ActorDead", kind="ValueError"),
        remote("ValueError"),
        RemoteProtocolError("?"),
        SystemClosed("closed"),
        OSError("no space"),
        ExceptionGroup("two", [ValueError(), OSError()]),
    ],
)
def test_a_defect_is_no_loss(error: BaseException) -> None:
    assert not is_loss(error)
