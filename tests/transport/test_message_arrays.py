"""Arrays in messages: every dtype and shape arrives as it was sent, and nothing else gets in."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from flexmarl.core.errors import LocalProtocolError, RemoteProtocolError
from flexmarl.core.protocol import codec
from flexmarl.core.ref import ActorRef
from flexmarl.core.signature import Signature
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.launch.hosts import env
from flexmarl.transport import message_arrays

from .carrier import Batch, Carrier

SOURCES = Path(__file__).parents[2] / "scripts" / "src"
# The endpoint's own signature, without an actor around it.
ARRAY = Signature(Carrier.array)


def arrive(value: Any, signature: Signature, *, inline_bytes: int = 4096) -> Any:
    """``value`` after it was packed, carried in frames that are memory of their own, and validated."""
    encoder = codec.Encoder(inline_bytes=inline_bytes)
    packed = encoder.pack(value)
    frames = [bytearray(buffer) for buffer in encoder.take_buffers()]
    return signature.result(codec.unpack(packed, frames), None)


def bits(array: Any) -> bytes:
    """NaNs and their payloads compared too."""
    return bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


DTYPES = st.one_of(
    arrays_of.boolean_dtypes(),
    arrays_of.integer_dtypes(endianness="?"),
    arrays_of.unsigned_integer_dtypes(endianness="?"),
    arrays_of.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    arrays_of.complex_number_dtypes(endianness="?", sizes=(64, 128)),
)
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6)


class TestArraysArrive:
    @given(
        array=arrays_of.arrays(DTYPES, SHAPES),
        order=st.sampled_from(["C", "F", "reversed", "sliced", "read-only"]),
        inline_bytes=st.sampled_from([0, 4096]),
    )
    @settings(max_examples=150)
    def test_as_they_were_sent(self, array: np.ndarray, order: str, inline_bytes: int) -> None:
        match order:
            case "F":
                array = np.asfortranarray(array)
            case "reversed":
                array = array.T
            case "sliced" if array.ndim:
                array = array[::-2]
            case "read-only":
                array.flags.writeable = False
        writeable = array.flags.writeable
        received = arrive(array, ARRAY, inline_bytes=inline_bytes)
        assert type(received) is np.ndarray
        assert received.dtype == array.dtype and received.shape == array.shape
        assert bits(received) == bits(array)
        assert received.flags.writeable and received.flags.aligned
        assert array.flags.writeable is writeable

    def test_without_a_copy(self) -> None:
        array = np.arange(10_000.0)
        encoder = codec.Encoder()
        packed = encoder.pack(array)
        (buffer,) = encoder.take_buffers()
        assert np.frombuffer(buffer, np.uint8).ctypes.data == array.ctypes.data
        frame = bytearray(buffer)
        received = ARRAY.result(codec.unpack(packed, [frame]), None)
        frame[:8] = np.array(7.0).tobytes()
        assert received[0] == 7

    def test_a_frame_that_is_not_aligned_is_copied(self) -> None:
        memory = bytearray(8 * 1001)
        value = {"dtype": "float64", "shape": [1000], "data": memoryview(memory)[1:8001]}
        received = ARRAY.result(value, None)
        assert received.flags.aligned and not np.shares_memory(received, np.frombuffer(memory, np.uint8))

    def test_numbers_of_numpy_become_numbers(self) -> None:
        numbers = [np.float32(0.5), np.int64(-3), np.bool_(True), np.uint64(2**64 - 1)]
        assert codec.unpack(codec.Encoder().pack(numbers)) == [0.5, -3, True, 2**64 - 1]


class Sub(np.ndarray): ...


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([object()]), "array of object"),
        (np.array([None, 1]), "array of object"),
        (np.zeros(2, "i4,f4"), "can't be sent"),
        (np.array(["a"]), "can't be sent"),
        (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
        (np.zeros(2, np.longdouble), "can't be sent"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (np.zeros(2).view(Sub), "Sub can't be sent"),
        (np.zeros([1] * 33), "33 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_sent_says_why(value: Any, words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        codec.Encoder().pack(value)


GOOD = {"dtype": "float32", "shape": [2, 3], "data": bytes(24)}


class TestRubbish:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"dtype": "object"}, "dtype 'object' can't travel"),
            ({"dtype": "O"}, "can't travel"),
            ({"dtype": "i4,f4"}, "can't travel"),
            ({"dtype": ["float32"]}, "can't travel"),
            ({"shape": [2, 4]}, "32 bytes, not 24"),
            ({"shape": []}, "4 bytes, not 24"),
            ({"shape": [-2, -3]}, "invalid shape"),
            ({"shape": [2.0, 3]}, "invalid shape"),
            ({"shape": [True, 6]}, "invalid shape"),
            ({"shape": "23"}, "needs a list"),
            ({"shape": [1] * 31 + [2, 3]}, "needs a list of at most 32"),
            ({"shape": [2**32, 2**32]}, "too large"),
            ({"shape": [0, 2**63], "data": b""}, "too large"),
            ({"shape": [0, 2**40, 2**40], "data": b""}, "too large"),
            ({"data": b""}, "24 bytes, not 0"),
            ({"data": [0] * 24}, "needs a buffer"),
            ({"data": "x" * 24}, "needs a buffer"),
            ({"more": 1}, "invalid array"),
        ],
        ids=str,
    )
    def test_is_refused(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(RemoteProtocolError, match=words):
            ARRAY.result(GOOD | change, None)

    @pytest.mark.parametrize("value", [None, 1, "x", [], [1.0], b"1234", {}])
    def test_is_no_array(self, value: Any) -> None:
        with pytest.raises(RemoteProtocolError, match="invalid array"):
            ARRAY.result(value, None)

    @given(
        dtype=st.sampled_from(["float32", "bool", "complex128"]),
        shape=st.lists(st.integers(0, 2**64 - 1) | st.just(0), max_size=32),
    )
    def test_a_shape_is_refused_or_right(self, dtype: str, shape: list[int]) -> None:
        value = {"dtype": dtype, "shape": shape, "data": b""}
        try:
            received = ARRAY.result(value, None)
        except RemoteProtocolError:
            return
        assert list(received.shape) == shape and 0 in shape


class TestCalls:
    @pytest.fixture(params=["same process", "own process"])
    async def carrier(
        self, request: pytest.FixtureRequest, system: ActorSystem, private: Path, tmp_path: Path
    ) -> AsyncIterator[ActorRef[Carrier]]:
        if request.param == "same process":
            yield await system.add(Carrier(), "carrier")
            return
        path = os.pathsep.join([str(SOURCES), str(Path(__file__).parent)])
        environment = {**env.actor_environment(), "PYTHONPATH": path}
        async with Supervisor(system, ProcessNode(system, private, tmp_path, environment)) as supervisor:
            await supervisor.spawn("carrier:Carrier", "carrier", {})
            yield supervisor.reference("carrier", Carrier)

    async def test_there_and_back(self, carrier: ActorRef[Carrier]) -> None:
        # Inline, out of a batch of frames, a frame of its own.
        for size in (
            0,
            1,
            100,
            1500,
            3000,
            1_000_000,
        ):
            array = np.arange(size, dtype=np.float32)
            received = await carrier.api.array(array)
            assert np.array_equal(received, array) and received.flags.writeable
            assert not np.shares_memory(received, array)
        batch = Batch(
            np.arange(6).reshape(2, 3), np.linspace(0, 1, 5000), {"0-d": np.array(1j), ">": np.ones(3, ">f4")}
        )
        back = await carrier.api.batch(batch)
        assert back.tokens.tolist() == batch.tokens.tolist() and np.array_equal(back.logprobs, batch.logprobs)
        assert back.extra["0-d"] == 1j and back.extra["0-d"].shape == () and back.extra[">"].dtype == ">f4"
        assert await carrier.api.total(np.ones((3, 3))) == 9 and await carrier.api.total() == -1
        with pytest.raises(RemoteProtocolError, match="array: .*float33"):
            await carrier.ask("array", {"dtype": "float33", "shape": [0], "data": b""})

    @pytest.mark.parametrize("size", [10, 100_000])
    async def test_the_sender_keeps_its_own(self, carrier: ActorRef[Carrier], size: int) -> None:
        array = np.zeros(size)
        assert await carrier.api.add_one(array) == size
        assert not array.any()

    @pytest.mark.parametrize("size", [10, 4_000_000])
    async def test_what_is_returned_may_change_afterwards(
        self, carrier: ActorRef[Carrier], size: int
    ) -> None:
        assert (await carrier.api.lend(size) == 1.0).all()


def _modules_after(code: str) -> set[str]:
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    environment = {**env.actor_environment(), "PYTHONPATH": str(SOURCES)}
    return set(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    )


def test_arrays_come_without_torch_and_core_without_either() -> None:
    assert not {"torch", "numpy"} & _modules_after(
        "import flexmarl.core.system, flexmarl.core.supervision.supervisor"
    )
    modules = _modules_after(f"import {message_arrays.__name__}")
    assert "numpy" in modules and "torch" not in modules
