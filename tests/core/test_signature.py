"""Signatures: what an endpoint takes and gives is checked against its annotations, and errors name the field."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Protocol, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter

from flexmarl.core.errors import RemoteProtocolError
from flexmarl.core.protocol import codec
from flexmarl.core.protocol.codec import Buffer, Encoder
from flexmarl.core.protocol.wire_types import register_type, wire_type
from flexmarl.core.signature import (
    EndpointOptions,
    Signature,
    constructor_signature,
    mark_endpoint,
    signature_of,
)


class Vector:
    """A plain class, unknown to the codec until it is registered."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vector) and self.numbers == other.numbers

    def __hash__(self) -> int:
        return hash(self.numbers)


def _vector(plain: Any) -> Vector:
    if not isinstance(plain, list):
        raise ValueError("a list of numbers is wanted")
    return Vector(*plain)


register_type(Vector, lambda vector: list(vector.numbers), _vector)


@dataclass
class Point:
    x: int
    y: int = 0


if TYPE_CHECKING:
    WiredVector = Vector
else:
    WiredVector = wire_type(Vector)


@dataclass
class Body:
    at: WiredVector


class Model(BaseModel):
    name: str = Field(max_length=3)


class Api(Protocol):
    """Docstrings alone make a body: what counts is the annotation."""

    async def take(self, x: int, label: str = "none", *, point: Point | None = None) -> list[int]:
        """Gives numbers."""
        ...

    def items(self, count: int) -> AsyncIterator[int]:
        """A stream."""
        ...

    async def vectors(self, all: list[Vector], named: dict[str, Vector] | None = None) -> Vector | None:  # noqa: A002
        """Registered types in other types."""
        ...

    async def anything(self, value, *, flag=False):  # type: ignore[no-untyped-def]
        """No annotations at all."""

    value: int = 3


def of(name: str) -> Signature:
    signature = signature_of(Api, name)
    assert signature is not None
    return signature


def through_the_wire(value: Any) -> Any:
    return codec.unpack(Encoder().pack(value))


def test_arguments_come_by_position_and_by_name_with_the_defaults_of_those_that_are_missing() -> None:
    take = of("take")
    assert take.arguments([3], {}, None) == ((3,), {"label": "none", "point": None})
    assert take.arguments([3, "a"], {}, None) == ((3, "a"), {"point": None})
    given = {"x": 3, "point": {"x": 1}}
    assert take.arguments([], given, None) == ((), {"x": 3, "label": "none", "point": Point(1)})
    assert take.arguments([3], {"point": None}, None) == ((3,), {"label": "none", "point": None})


def test_arguments_that_have_only_a_position_and_defaults_that_can_change() -> None:
    async def keep(self: object, count: int, into: list[int] = [], /) -> None: ...  # noqa: B006  # as users write

    signature = Signature(keep)
    (count, into), kwargs = signature.arguments([1], {}, None)
    assert count == 1 and into == [] and kwargs == {}
    into.append(count)
    assert signature.arguments([1], {}, None) == ((1, []), {}), "each call has a default of its own"
    with pytest.raises(RemoteProtocolError, match="keep: .*count"):
        signature.arguments([], {"count": 1}, None)


def test_any_number_of_arguments() -> None:
    def construct(first: int, *rest: Point, **options: float) -> None: ...

    signature = Signature(construct, bound=False)
    assert signature.arguments([1], {}, None) == ((1,), {})
    args, kwargs = signature.arguments([1, {"x": 2}, {"x": 3}], {"rate": 4}, None)
    assert args == (1, Point(2), Point(3)) and kwargs == {"rate": 4.0}
    with pytest.raises(RemoteProtocolError, match="construct: 2.x: .*integer"):
        signature.arguments([1, {"x": 2}, {"x": "?"}], {}, None)
    with pytest.raises(RemoteProtocolError, match="construct: rate: .*number"):
        signature.arguments([1], {"rate": "fast"}, None)


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ([], {}, "x: Missing required argument"),
        (["three"], {}, "x: .*integer.*'three'"),
        ([1.5], {}, "x: .*integer"),
        ([None], {}, "x: .*integer"),
        ([1, 2], {}, "label: .*string"),
        ([1, "a", None, 4], {}, "takes 2 arguments by position, got more"),
        ([1], {"unknown": 2}, "unknown: Unexpected keyword"),
        ([1], {"point": {"y": 2}}, "point.*x: Field required"),
        ([1], {"point": {"x": "?"}}, "point.*x: .*integer"),
        ([1], {"point": 7}, "point"),
        ([1], {5: 2}, "5|keys|string"),
        ([1], {"self": 2}, "self: Unexpected keyword"),
        ([1], {0: 2}, "0: Keys should be strings"),
        ([1], {"point": {"x": 1, "z": 2}}, "point.z: Unexpected"),
    ],
)
def test_wrong_arguments_are_named(args: list[Any], kwargs: dict[Any, Any], problem: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"Api.take.*({problem})"):
        of("take").arguments(args, kwargs, None)


def test_an_argument_given_twice_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match="Api.take: x: Got multiple values"):
        of("take").arguments([1], {"x": 2}, None)


def test_the_result_is_validated_and_a_wrong_one_is_named() -> None:
    assert of("take").result([1, 2], None) == [1, 2]
    with pytest.raises(RemoteProtocolError, match=r"result of Api.take: 1: .*integer.*'b'"):
        of("take").result([1, "b"], None)
    with pytest.raises(RemoteProtocolError, match="result of Api.take: value: "):
        of("take").result(None, None)


def test_an_error_shows_only_the_beginning_of_what_was_wrong() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        of("take").arguments(["x" * 10_000], {}, None)
    assert len(str(caught.value)) < 300


def test_what_is_not_annotated_can_be_anything() -> None:
    anything = of("anything")
    args, kwargs = anything.arguments([[1, {"a": None}]], {"flag": b"raw"}, None)
    assert args == ([1, {"a": None}],) and kwargs == {"flag": b"raw"}
    assert anything.result({"x": 1}, None) == {"x": 1}
    with pytest.raises(RemoteProtocolError, match="value: Missing required argument"):
        anything.arguments([], {}, None)


def test_what_is_no_function_has_no_signature() -> None:
    assert signature_of(Api, "value") is None and signature_of(Api, "missing") is None


def test_what_takes_nothing() -> None:
    nothing = constructor_signature(object)
    assert nothing.arguments([], {}, None) == ((), {})
    with pytest.raises(RemoteProtocolError, match="takes 0 arguments"):
        nothing.arguments([1], {}, None)


def test_options_are_read_from_the_mark() -> None:
    async def once(self: object) -> None: ...

    assert not Signature(once).is_endpoint
    mark_endpoint(once, EndpointOptions())
    assert Signature(once).is_endpoint


# --------------------------------------------------------------------------- streams


async def generator(self: object, count: int) -> AsyncGenerator[int, None]:
    yield count


def iterator(self: object) -> AsyncIterator[Point]: ...  # type: ignore[empty-body]


def iterable(self: object) -> AsyncIterable[Point]: ...  # type: ignore[empty-body]


async def unannotated(self):  # type: ignore[no-untyped-def]
    yield 1


@pytest.mark.parametrize("function", [generator, iterator, iterable, unannotated])
def test_streams_are_known_by_their_annotation_or_their_body(function: Any) -> None:
    assert Signature(function).streams


def test_what_is_no_stream() -> None:
    assert not of("take").streams and of("items").streams


def test_each_item_is_validated() -> None:
    assert of("items").result(3, None) == 3
    with pytest.raises(RemoteProtocolError, match="result of Api.items"):
        of("items").result("three", None)
    assert Signature(iterator).result({"x": 1}, None) == Point(1)
    assert Signature(unannotated).result([1], None) == [1]


# --------------------------------------------------------------------------- registered types

one = [1.0, 2.0]
vector = Vector(1.0, 2.0)


@pytest.mark.parametrize(
    ("annotation", "sent", "received"),
    [
        (Vector, one, vector),
        (list[Vector], [one, one], [vector, vector]),
        (dict[str, Vector], {"a": one}, {"a": vector}),
        (tuple[Vector, int], [one, 3], (vector, 3)),
        (tuple[Vector, ...], [one, one], (vector, vector)),
        (frozenset[Vector], [one], frozenset([vector])),
        (Vector | None, one, vector),
        (Vector | None, None, None),
        (Optional[Vector], one, vector),  # noqa: UP045
        (Union[int, Vector], one, vector),  # noqa: UP007
        (int | Vector, 5, 5),
        (list[dict[str, Vector | None]], [{"a": one, "b": None}], [{"a": vector, "b": None}]),
        (dict[str, list[tuple[int, Vector]]], {"a": [[1, one]]}, {"a": [(1, vector)]}),
        (Annotated[list[int], Field(max_length=2)], [1, 2], [1, 2]),
        (Annotated[list[Vector], Field(max_length=2)], [one], [vector]),
        (Sequence[Vector], [one], [vector]),
        (Mapping[str, Vector], {"a": one}, {"a": vector}),
        (Literal["a", "b"], "a", "a"),
        (Body, {"at": one}, Body(vector)),
        (list[Body], [{"at": one}], [Body(vector)]),
        (Any, one, one),
        (list[int], [1], [1]),
    ],
)
def test_registered_types_are_received_wherever_they_stand(annotation: Any, sent: Any, received: Any) -> None:
    adapter = TypeAdapter(wire_type(annotation))
    assert adapter.validate_python(sent) == received
    assert adapter.validate_python(received) == received, "what is there already stays"
    if not isinstance(received, frozenset):
        assert adapter.validate_python(through_the_wire(received)) == received


@pytest.mark.parametrize(
    "annotation", [int, list[int], dict[str, int | None], Literal[1], Annotated[int, Field(gt=0)]]
)
def test_what_has_no_registered_type_in_it_stays_as_it_is(annotation: Any) -> None:
    assert wire_type(annotation) is annotation


def test_a_registered_type_is_checked_by_its_own_function() -> None:
    vectors = of("vectors")
    args, kwargs = vectors.arguments([[one]], {"named": {"a": one}}, None)
    assert args == ([vector],) and kwargs == {"named": {"a": vector}}
    assert vectors.result(one, None) == vector and vectors.result(None, None) is None
    with pytest.raises(RemoteProtocolError, match="all.0: .*a list of numbers is wanted"):
        vectors.arguments([["no list"]], {}, None)
    with pytest.raises(RemoteProtocolError, match="result of Api.vectors"):
        vectors.result("no list", None)


def test_models_and_buffers_are_arguments_too() -> None:
    async def put(self: object, model: Model, content: Buffer) -> None: ...

    signature = Signature(put)
    (model, content), _ = signature.arguments([{"name": "abc"}, b"raw"], {}, None)
    assert model == Model(name="abc") and bytes(content.view) == b"raw"
    with pytest.raises(RemoteProtocolError, match="model.name: .*at most 3"):
        signature.arguments([{"name": "abcd"}, b""], {}, None)
    with pytest.raises(RemoteProtocolError, match="content: .*not bytes"):
        signature.arguments([{"name": "a"}, "text"], {}, None)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_arrives_is_validated_or_refused(value: Any) -> None:
    kwargs = value if isinstance(value, dict) else {"point": value}
    args = value if isinstance(value, list) else [value]
    for name in ("take", "vectors", "items"):
        signature = of(name)
        attempts: Any = ((signature.arguments, (args, {}, None)), (signature.arguments, ([], kwargs, None)))
        for attempt, given_it in (*attempts, (signature.result, (value, None))):
            try:
                attempt(*given_it)
            except RemoteProtocolError as error:
                assert "Api." in str(error)
