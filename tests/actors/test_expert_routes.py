"""Routes on their way: their types, the parts of a turn that was continued, and messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.expert_routes import UNKNOWN, SentRoutes, dtype_of, join_routes, narrow, widen
from flexmarl.core.protocol import codec


@pytest.mark.parametrize(
    ("experts", "dtype"), [(8, "uint8"), (255, "uint8"), (256, "int16"), (1024, "int16")]
)
def test_routes_have_room_for_all_experts_and_for_unknown_ones(experts: int, dtype: str) -> None:
    assert dtype_of(experts) == dtype
    routes = narrow(np.arange(experts, dtype=np.int64).reshape(-1, 1, 1), experts)
    assert routes.dtype == dtype
    assert np.array_equal(widen(routes).ravel(), np.arange(experts))


def test_the_highest_byte_is_no_expert() -> None:
    assert widen(np.array([[[254, 255]]], np.uint8)).tolist() == [[[254, UNKNOWN]]]
    assert widen(np.array([[[255, UNKNOWN]]], np.int16)).tolist() == [[[255, UNKNOWN]]]


def test_a_continued_turn_keeps_the_routes_of_the_weights_that_drew_its_tokens() -> None:
    former, later = np.zeros((5, 2, 2), np.uint8), np.ones((9, 2, 2), np.uint8)
    assert join_routes(None, later) is later
    assert join_routes(former, later)[:, 0, 0].tolist() == [0] * 5 + [1] * 4


@given(st.lists(st.integers(0, 6), min_size=3, max_size=3), st.sampled_from([np.uint8, np.int16]))
def test_a_message_has_the_same_routes(shape: list[int], dtype: type[np.generic]) -> None:
    routes = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    sent = SentRoutes.of(routes)
    assert sent is not None
    encoder = codec.Encoder()
    plain = codec.unpack(encoder.pack(sent), encoder.take_buffers())
    received = SentRoutes(plain["dtype"], tuple(plain["shape"]), codec.Buffer(plain["data"])).array()
    assert received.dtype == dtype and received.shape == routes.shape and np.array_equal(received, routes)
    assert SentRoutes.of(None) is None
