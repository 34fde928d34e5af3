"""Columns that a run declares: which there can be, and what a person's values become in them."""

from typing import Any

import numpy as np
import pytest
import torch

from flexmarl.actors.columns.declared_columns import Column, check_names, checked_value, common_types
from flexmarl.actors.errors import ConfigError

EMBEDDING = Column(type="tensor", dtype="float32", shape=(None, 2))


@pytest.mark.parametrize(
    ("column", "value", "checked"),
    [
        (Column(type="float"), 1, 1.0),
        (Column(type="float"), np.float32(0.5), 0.5),
        (Column(type="int"), np.int8(-3), -3),
        (Column(type="bool"), np.bool_(True), True),
        (Column(type="str"), "é" * 300, "é" * 300),
        (Column(type="str"), "", ""),
    ],
)
def test_numbers_and_text_become_plain(column: Column, value: object, checked: object) -> None:
    got = checked_value(column, value)
    assert got == checked and type(got) is type(checked)


@pytest.mark.parametrize(
    "value", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), np.array([1, 2], "u1")]
)
def test_tokens_are_int32_of_one_dimension(value: Any) -> None:
    tokens = checked_value(Column(type="tokens"), value)
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.tolist() == [1, 2]


def test_no_tokens_are_tokens() -> None:
    tokens = checked_value(Column(type="tokens"), [])
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.shape == (0,)


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_a_tensor_is_copied_and_may_change_afterwards(make: Any) -> None:
    value = make([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float32 if make is torch.tensor else np.float32).T
    array = checked_value(EMBEDDING, value)
    value[0, 0] = 9.0
    assert isinstance(array, np.ndarray) and array.flags.c_contiguous
    assert array.dtype == np.float32 and array.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_a_tensor_that_wants_gradients_and_one_of_big_endian_numbers() -> None:
    assert checked_value(Column(type="tensor"), torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]  # type: ignore[union-attr]
    little = checked_value(Column(type="tensor", dtype="int32"), np.array([1, 2], ">i4"))
    assert isinstance(little, np.ndarray) and little.tobytes() == b"\1\0\0\0\2\0\0\0"


@pytest.mark.parametrize(
    ("column", "value", "wanted"),
    [
        (Column(type="float"), True, "a finite float"),
        (Column(type="float"), float("nan"), "a finite float"),
        (Column(type="float"), 10**400, "a finite float"),
        (Column(type="float"), "0.5", "a finite float"),
        (Column(type="int"), 1.0, "an int of 64 bits"),
        (Column(type="int"), False, "an int of 64 bits"),
        (Column(type="int"), 2**63, "an int of 64 bits"),
        (Column(type="bool"), 1, "a bool"),
        (Column(type="str"), b"x", "a str"),
        (Column(type="str"), "\ud800", "a str without lone surrogates"),
        (Column(type="tokens"), [0.5], "tokens: a flat"),
        (Column(type="tokens"), [True], "tokens: a flat"),
        (Column(type="tokens"), [2**31], "tokens: a flat"),
        (Column(type="tokens"), [[1, 2]], "tokens: a flat"),
        (Column(type="tokens"), [[1, 2], [3]], "tokens: a flat"),
        (Column(type="tokens"), "12", "tokens: a flat"),
        (Column(type="tokens"), None, "tokens: a flat"),
        (EMBEDDING, [[1.0, 2.0]], r"a tensor float32 \[any, 2\], as an array of NumPy or torch"),
        (EMBEDDING, np.zeros((1, 2)), r"a tensor float32 \[any, 2\]; this is float64 \[1, 2\]"),
        (EMBEDDING, np.zeros((1, 3), np.float32), r"this is float32 \[1, 3\]"),
        (Column(type="tensor"), np.array(["x"]), "a tensor; this is"),
        (Column(type="tensor"), np.array([{}]), "a tensor; this is object"),
        (
            Column(type="tensor"),
            torch.zeros(1, dtype=torch.bfloat16),
            "NumPy has no torch.bfloat16: convert it",
        ),
    ],
)
def test_another_value_is_refused_with_what_is_wanted(column: Column, value: object, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        checked_value(column, value)


@pytest.mark.parametrize("name", ["Score", "a-b", "", "1st", "a" * 64, "status", "reward", "tokens"])
def test_a_name_that_can_not_be_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"column {name!r}: "):
        check_names({name: Column(type="float")}, reserved=("reward", "tokens"))


def test_agents_agree_about_a_columns_type() -> None:
    score = {"score": Column(type="float")}
    assert common_types({"a": score, "b": {**score, "note": Column(type="str")}}) == {
        "score": "float",
        "note": "str",
    }
    with pytest.raises(ConfigError, match="'score' is str for agent 'b' and float for another"):
        common_types({"a": score, "b": {"score": Column(type="str")}})
