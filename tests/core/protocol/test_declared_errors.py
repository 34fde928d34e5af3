"""Declared errors: their fields cross the wire, the caller's declaration decides what is built, none is lost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import (
    ActorDead,
    CallNotAllowed,
    CallTimeout,
    Deadlock,
    FlexmarlError,
    PlainTcpRefused,
    RemoteError,
    TooManyRestarts,
    Unreachable,
    UnsafeKeys,
)
from flexmarl.core.protocol import codec
from flexmarl.core.protocol.declared_errors import DeclaredErrors
from flexmarl.core.signature import signature_of


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


class Plain(FlexmarlError):
    """Without a constructor of its own."""


class Full(Plain):
    """All kinds of fields."""

    def __init__(
        self, path: Path, points: tuple[Point, ...], share: float | None = None, *, whole: bool = False
    ) -> None:
        super().__init__(f"{path}: {len(points)} points, {share}, {whole}")
        self.path = path
        self.points = points
        self.share = share
        self.whole = whole


class Fuller(Full):
    """It inherits the constructor."""


class Picky(FlexmarlError):
    """Its constructor refuses."""

    def __init__(self, number: int) -> None:
        if number < 0:
            raise ValueError("negative")
        super().__init__(f"number {number}")
        self.number = number


class Computed(FlexmarlError):
    def __init__(self, number: int) -> None:
        super().__init__("computed")
        self._number = number

    @property
    def number(self) -> int:
        if self._number < 0:
            raise ZeroDivisionError
        return self._number


@dataclass
class Described(Exception):
    reason: str
    counts: dict[str, int] = field(default_factory=dict)


def crossed(
    error: BaseException, there: Sequence[type[Exception]], here: Sequence[type[Exception]] | None = None
) -> Exception:
    """``error`` as a caller gets it whose endpoint declares ``here``, from one that declares ``there``."""
    declared, fields = DeclaredErrors(there).to_wire(error)
    fields = codec.unpack(codec.Encoder().pack(fields))
    arrived = RemoteError("actor", "endpoint", type(error).__name__, str(error), "trace", declared, fields)
    return DeclaredErrors(there if here is None else here).from_wire(arrived, None)


ERRORS: list[Exception] = [
    Plain("some words"),
    Plain(""),
    ValueError("a builtin"),
    Full(Path("/a/b"), (Point(1), Point(2, 3)), 0.5, whole=True),
    Full(Path("relative"), ()),
    Fuller(Path("/a"), (Point(1),)),
    Picky(3),
    Computed(4),
    Described("words", {"a": 1}),
    CallTimeout("actor", "endpoint", 1.5, "some phase"),
    ActorDead("actor", "reason", stopped=True),
    Unreachable("actor", "reason"),
    UnsafeKeys(Path("/keys"), "problem", "remedy"),
    PlainTcpRefused("host"),
    CallNotAllowed("actor", "endpoint"),
    Deadlock(3.0, ["one", "two"]),
    RemoteError("actor", "endpoint", "KeyError", "message", "trace"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_declared_error_arrives_as_it_was(error: Exception) -> None:
    arrived = crossed(error, [type(error)])
    assert type(arrived) is type(error) and arrived is not error
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_an_undeclared_error_arrives_as_remote_error() -> None:
    for there, here in (([], [Picky]), ([Picky], []), ([Plain], [Picky])):
        arrived = crossed(Picky(3), there, here)
        assert isinstance(arrived, RemoteError)
        assert (arrived.kind, arrived.message, arrived.remote_traceback) == ("Picky", "number 3", "trace")
    assert isinstance(crossed(KeyboardInterrupt(), [Plain]), RemoteError)


def test_a_subclass_arrives_as_the_nearest_class_that_is_declared() -> None:
    error = Fuller(Path("/a"), (Point(1),), 2.0)
    assert type(crossed(error, [Full, Plain])) is Full
    arrived = crossed(error, [Plain])
    assert type(arrived) is Plain and str(arrived) == str(error)
    assert isinstance(crossed(error, [Full], [Plain]), RemoteError), "the caller knows no class of that name"


def test_a_caller_without_a_declaration_sees_the_fields() -> None:
    arrived = crossed(Picky(3), [Picky], [])
    assert isinstance(arrived, RemoteError) and (arrived.declared, arrived.fields) == ("Picky", {"number": 3})


class Other:
    """Classes of the same names, with other constructors."""

    class Picky(FlexmarlError):
        def __init__(self, number: int, more: str) -> None:
            self.number, self.more = number, more

    class Full(FlexmarlError):
        """Text alone."""

    class Plain(FlexmarlError):
        def __init__(self, number: int) -> None:
            self.number = number


@pytest.mark.parametrize(
    ("error", "here", "problem"),
    [
        (Picky(3), Other.Picky, "more: Field required"),
        (Full(Path("/"), ()), Other.Full, "it has no fields"),
        (Plain("words"), Other.Plain, "number: Field required"),
    ],
)
def test_fields_that_do_not_fit_the_callers_class_leave_a_remote_error_that_says_so(
    error: Exception, here: type[Exception], problem: str
) -> None:
    arrived = crossed(error, [type(error)], [here])
    assert isinstance(arrived, RemoteError) and arrived.message == str(error)
    assert any(f"not raised as {here.__name__}: {problem}" in note for note in arrived.__notes__)


def test_fields_that_are_not_there_or_can_not_be_had_leave_a_remote_error() -> None:
    without, broken = Picky(3), Computed(-1)
    del without.number
    for error in (without, broken):
        assert isinstance(crossed(error, [type(error)]), RemoteError)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner),
    max_leaves=6,
)
names = st.sampled_from(["path", "points", "share", "whole", "number", "self", "args", "__class__"])


@given(
    st.sampled_from(
        ["Plain", "Full", "Fuller", "Picky", "Described", "Exception", "SystemExit", "os.system", ""]
    )
    | st.text(max_size=5),
    st.dictionaries(names | junk.filter(lambda key: key.__hash__ is not None), junk, max_size=4),
)
def test_whatever_a_peer_sends_a_declared_error_or_the_remote_error_comes_of_it(
    declared: str, fields: dict[Any, Any]
) -> None:
    error = RemoteError("actor", "endpoint", declared, "message", "trace", declared, fields)
    classes: list[type[Exception]] = [Plain, Full, Picky, Described]
    arrived = DeclaredErrors(classes).from_wire(error, None)
    assert arrived is error or (type(arrived) in classes and type(arrived).__name__ == declared)
    if isinstance(arrived, Full):
        assert isinstance(arrived.path, Path) and all(isinstance(point, Point) for point in arrived.points)


class Unannotated(FlexmarlError):
    def __init__(self, number) -> None:  # type: ignore[no-untyped-def]
        self.number = number


class Forgetful(FlexmarlError):
    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")


class Variadic(FlexmarlError):
    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers


class Positional(FlexmarlError):
    def __init__(self, number: int, /) -> None:
        self.number = number


class Unsendable(FlexmarlError):
    def __init__(self, made_by: Callable[[], int], other: "Positional") -> None:
        self.made_by, self.other = made_by, other


class OwnText(FlexmarlError):
    def __str__(self) -> str:
        return "always the same"


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (Unannotated, "constructor's number has no annotation"),
        (Forgetful, "constructor's number: int is not kept as an attribute of the same name"),
        (TooManyRestarts, "constructor's cause: BaseException is not kept"),
        (Variadic, r"constructor's \*numbers: int can't be given by name"),
        (Positional, "constructor's number: int can't be given by name"),
        (Unsendable, "its fields can't be sent: .*Positional"),
        (OwnText, "its text is not its only argument"),
        (KeyError, "its text is not its only argument"),
        (OSError, "its text is not its only argument"),
        (StopIteration, "a class of exceptions is wanted"),
        (KeyboardInterrupt, "a class of exceptions is wanted"),
        (int, "a class of exceptions is wanted"),
        (Plain("an instance"), "a class of exceptions is wanted"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_when_the_endpoint_is_declared(cls: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=f"Refused.method: .*can't be declared: .*{problem}"):

        class Refused(Actor):
            @endpoint(raises=(Plain, cls))
            async def method(self) -> None: ...

        del Refused


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="two declared errors have the name Picky"):
        DeclaredErrors([Picky, Other.Picky])
    assert type(crossed(Picky(1), [Picky, Picky])) is Picky


class Api:
    @endpoint(raises=(Picky,))
    async def method(self) -> None: ...


class Fulfils(Actor, Api):
    @endpoint(raises=(Plain,))
    async def method(self) -> None: ...

    @endpoint
    async def other(self) -> None: ...


def test_an_endpoint_declares_what_the_endpoints_declare_that_it_overrides() -> None:
    signature, other = signature_of(Fulfils, "method"), signature_of(Fulfils, "other")
    assert signature is not None and other is not None
    assert signature.errors.to_wire(Picky(3)) == ("Picky", {"number": 3})
    assert signature.errors.to_wire(Plain("words")) == ("Plain", {})
    assert other.errors.to_wire(Picky(3)) == ("", {})
