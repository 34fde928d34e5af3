"""Values that the columns of a table take, and values that they refuse."""

from typing import Any

import pytest
from pydantic import ValidationError

from flexmarl.actors.columns.column_refs import ColumnRefs, pack, refs_of, unpack
from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.errors import ConfigError, StoreError
from flexmarl.actors.store.schema import Schema

SCHEMA = Schema(
    {
        "score": Column(type="float"),
        "length": Column(type="int"),
        "solved": Column(type="bool"),
        "note": Column(type="str"),
        "tokens": Column(type="tokens", required=True),
        "logits": Column(type="tensor", dtype="float32", shape=(None, 4)),
        "any": Column(type="tensor"),
    }
)


def ref(size_bytes: int, dtype: str, *shape: int, offset: int = 0) -> list[Any]:
    """As it arrives in a message."""
    return ["m-1", offset, size_bytes, dtype, list(shape)]


@pytest.mark.parametrize(
    ("name", "value", "cell"),
    [
        ("reward", 0.5, 0.5),
        ("score", 3, 3.0),
        ("length", -(2**63), -(2**63)),
        ("solved", True, True),
        ("note", "é" * 256, "é" * 256),
        ("note", ref(900, "utf8", 900), ("m-1", 0, 900, "utf8", (900,))),
        ("tokens", ref(12, "int32", 3), ("m-1", 0, 12, "int32", (3,))),
        ("tokens", ref(0, "int32", 0), ("m-1", 0, 0, "int32", (0,))),
        ("logits", ref(32, "float32", 2, 4), ("m-1", 0, 32, "float32", (2, 4))),
        ("any", ref(2, "bfloat16"), ("m-1", 0, 2, "bfloat16", ())),
    ],
)
def test_a_value_becomes_a_cell_of_the_columns_type(name: str, value: object, cell: object) -> None:
    (checked,) = SCHEMA.check("a", ["1:q_0_0"], {name: [value]})[name]
    assert checked == cell
    assert type(checked) is type(cell)


def test_none_in_an_optional_column_is_not_written() -> None:
    ids = ["1:q_0_0", "1:q_0_1", "1:q_0_2"]
    given: dict[str, Any] = {
        "score": [None, 1, None],
        "any": [ref(1, "bool"), None, None],
        "note": [None, None, "x"],
    }
    checked = SCHEMA.check("a", ids, given)
    assert checked == {
        "score": [None, 1.0, None],
        "any": [("m-1", 0, 1, "bool", ()), None, None],
        "note": [None, None, "x"],
    }
    with pytest.raises(StoreError, match="sample 1:q_0_2: column score wants a finite float, not 'x'"):
        SCHEMA.check("a", ids, {"score": [None, 1, "x"]})
    with pytest.raises(StoreError, match="sample 1:q_0_1: column tokens wants .*, not None"):
        SCHEMA.check("a", ids[:2], {"tokens": [ref(4, "int32", 1), None]})


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("reward", float("nan"), "a finite float, not nan"),
        ("reward", float("-inf"), "a finite float, not -inf"),
        ("reward", 10**400, "a finite float"),
        ("reward", True, "a finite float, not True"),
        ("reward", None, "a finite float, not None"),
        ("reward", "1", "a finite float, not '1'"),
        ("length", 1.0, "an int of 64 bits, not 1.0"),
        ("length", True, "an int of 64 bits"),
        ("length", 2**63, "an int of 64 bits"),
        ("solved", 1, "a bool, not 1"),
        ("note", "x" * 257, "a string of up to 256 characters"),
        ("note", b"x", "a string, or a reference"),
        ("note", ref(900, "utf8", 899), "a string, or a reference"),
        ("tokens", [1, 2, 3], "to int32 of one dimension, not"),
        ("tokens", ref(24, "int64", 3), "to int32 of one dimension"),
        ("tokens", ref(16, "int32", 2, 2), "to int32 of one dimension"),
        ("tokens", ref(16, "int32", 3), "to int32 of one dimension"),
        ("tokens", ref(-4, "int32", -1), "to int32 of one dimension"),
        ("tokens", ref(4, "int32", 1, offset=-4), "to int32 of one dimension"),
        ("tokens", [1, 0, 4, "int32", [1]], "to int32 of one dimension"),
        ("tokens", ["m-1", 0, 4, "int32", [True]], "to int32 of one dimension"),
        ("tokens", ["m-1", 0, 4, "int32", 1], "to int32 of one dimension"),
        ("tokens", ["m-1", 0, 4, "int32"], "to int32 of one dimension"),
        ("tokens", ["m-1", 0, 4, ["int32"], [1]], "to int32 of one dimension"),
        ("tokens", "abcde", "to int32 of one dimension"),
        ("logits", ref(16, "float64", 2, 1), r"to float32 of shape \[any, 4\]"),
        ("logits", ref(24, "float32", 2, 3), r"to float32 of shape \[any, 4\]"),
        ("any", ref(4, "object", 4), "to any dtype of any shape"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object, wanted: str) -> None:
    good = {"reward": 1.0, "length": 1, "solved": True, "note": "", "any": ref(1, "bool")}
    good |= {"tokens": ref(4, "int32", 1), "logits": ref(16, "float32", 1, 4)}
    with pytest.raises(StoreError, match=f"table a: sample 1:q_0_1: column {name} wants .*{wanted}"):
        SCHEMA.check("a", ["1:q_0_0", "1:q_0_1"], {name: [good[name], value]})


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"rewrad": [1.0]}, "unknown column 'rewrad'; there are: reward, score, length"),
        ({"reward": [1.0, 2.0]}, "column reward has 2 values for 1 rows"),
        ({"tokens": {"refs": [["m-1", "int32", [0], [[1], [1]]]]}}, "to int32 of one dimension"),
        ({"reward": {"refs": [["m-1", "int32", [0], [[1]]]]}}, "column reward wants a finite float"),
        ({"tokens": {}}, "invalid packed column"),
        ({"tokens": {"refs": [["m-1", "object", [0], [[1]]]]}}, "invalid packed column"),
        ({"tokens": {"refs": [["m-1", "int32", [0], [[1, 2]]]]}}, "invalid packed column"),
        ({"tokens": {"refs": [["m-1", "int32", [-1], [[1]]]]}}, "invalid packed column"),
        ({"tokens": {"refs": [["m-1", "int32", [0], [["1"]]]]}}, "invalid packed column"),
        ({"tokens": {"refs": [[1, "int32", [0], [[1]]]]}}, "invalid packed column"),
        ({"tokens": {"refs": 3}}, "invalid packed column"),
    ],
)
def test_a_malformed_column_is_refused(columns: dict[str, Any], why: str) -> None:
    with pytest.raises(StoreError, match=why):
        SCHEMA.check("a", ["1:q_0_0"], columns)


def test_a_packed_column_is_unpacked_to_the_same() -> None:
    values = [
        ("m-1", 0, 12, "int32", (3,)),
        ("m-1", 64, 4, "int32", (1,)),
        ("d-2", 0, 4, "int32", (1,)),
        ("d-2", 64, 8, "int32", (2, 1)),
        ("d-2", 128, 4, "float32", ()),
        ("d-2", 192, 7, "utf8", (7,)),
    ]
    packed: ColumnRefs = pack(values)
    assert len(packed["refs"]) == 5
    assert unpack(packed) == values
    assert refs_of([1.0, None, *values]) == values
    assert SCHEMA.check("a", ["x"] * 2, {"tokens": pack(values[:2])})["tokens"] == values[:2]


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"Score": Column(type="float")}, "column 'Score': a name is"),
        ({"a-b": Column(type="float")}, "column 'a-b': a name is"),
        ({"status": Column(type="str")}, "column 'status': every table has it already"),
        ({"reward": Column(type="int")}, "column 'reward' is a float, not int"),
    ],
)
def test_an_invalid_schema_is_refused(columns: dict[str, Column], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Schema(columns)


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ({"type": "tokens", "dtype": "int32"}, "a tokens has no dtype and shape to choose"),
        ({"type": "float", "shape": [1]}, "a float has no dtype and shape to choose"),
        ({"type": "tensor", "dtype": "object"}, "dtype 'object' is unknown"),
        ({"type": "tensor", "shape": [-1]}, "negative size"),
    ],
)
def test_an_invalid_column_is_refused(column: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Column.model_validate(column)
