import subprocess
import sys
from dataclasses import asdict, replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from flexmarl.transport.errors import StateMismatch
from flexmarl.transport.handle import DTYPE_BYTES, ShmSource, StateHandle, TcpSource, TensorSpec

SPEC = TensorSpec("w", (2, 3), "float32", 64)
SOURCES = (
    ShmSource("shm", "host", "12_ab", "12_ab-0-solver.arena", 6),
    TcpSource("tcp", "host", "12_ab", "host:5555", True, "12_ab-0-solver.arena", 6),
)
HANDLE = StateHandle("solver", 4, 88, 2**64 - 1, (SPEC,), SOURCES)
ADAPTER = TypeAdapter(StateHandle)

specs = st.builds(
    TensorSpec,
    name=st.text(max_size=5),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    offset=st.integers(0, 10).map(lambda line: 64 * line),
)


@given(
    st.lists(specs, max_size=4, unique_by=lambda spec: spec.name).map(tuple),
    st.integers(0, 2**63 - 1),
    st.none() | st.integers(0, 2**64 - 1),
)
def test_a_handle_survives_messages(
    tensors: tuple[TensorSpec, ...], version: int, digest: int | None
) -> None:
    handle = replace(HANDLE, tensors=tensors, version=version, digest=digest, size_bytes=4096)
    received = ADAPTER.validate_python(msgpack.unpackb(msgpack.packb(asdict(handle))))
    assert received == handle
    assert isinstance(received.tensors, tuple)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", -1, "version -1"),
        ("size_bytes", 87, "ends at byte 88 of a payload of 87"),
        ("sources", [{"path": "carrier pigeon"}], "shm"),
        ("tensors", [asdict(SPEC), asdict(SPEC)], "same name"),
        ("tensors", [asdict(SPEC) | {"offset": 63}], "multiple of 64"),
        ("tensors", [asdict(SPEC) | {"offset": -64}], "negative offset -64"),
        ("tensors", [asdict(SPEC) | {"shape": [-1]}], "negative size"),
        ("tensors", [asdict(SPEC) | {"shape": [2**40, 2**40]}], "ends at byte"),
        ("tensors", [asdict(SPEC) | {"dtype": "object"}], "can't travel"),
    ],
)
def test_a_bad_handle_is_refused_on_receipt(field: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python(asdict(HANDLE) | {field: value})


def test_handles_are_values() -> None:
    assert hash(HANDLE) == hash(replace(HANDLE)) != hash(replace(HANDLE, sources=SOURCES[:1]))
    assert SPEC.size_bytes == 24


def test_importing_handles_does_not_import_torch() -> None:
    program = (
        "import flexmarl.transport.handle, flexmarl.transport.select, sys; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_the_package_offers_the_transport() -> None:
    import flexmarl.transport
    from flexmarl.transport import StateTransport, state

    assert StateTransport is state.StateTransport
    assert not hasattr(flexmarl.transport, "nonsense")


def test_rows_are_a_part_of_dimension_0() -> None:
    part = SPEC.rows(1, 2)
    assert (part.shape, part.offset, part.size_bytes) == ((1, 3), 64 + 12, 12)
    assert SPEC.rows(2, 2).size_bytes == 0
    for start, stop in ((-1, 1), (1, 3), (2, 1)):
        with pytest.raises(ValueError, match=rf"w: no rows {start} to {stop} in shape \[2, 3\]"):
            SPEC.rows(start, stop)
    with pytest.raises(ValueError, match="no rows 0 to 1"):
        TensorSpec("scalar", (), "float32", 0).rows(0, 1)


def test_a_selection_keeps_the_order_and_names_what_is_missing() -> None:
    other = TensorSpec("b", (4,), "int8", 0)
    handle = replace(HANDLE, tensors=(other, SPEC))
    assert handle.select() is handle.tensors
    assert handle.select(["w", "b"]) == (other, SPEC)
    assert handle.select(["w"], {"w": (0, 1)}) == (SPEC.rows(0, 1),)
    assert handle.select(rows={"b": (1, 2)}) == (other.rows(1, 2), SPEC)
    with pytest.raises(StateMismatch) as raised:
        handle.select(["w", "x"], {"w": (0, 9), "b": (0, 1)})
    assert raised.value.problems == [
        "x: not in the state",
        "b: rows of a tensor that is not asked for",
        "w: no rows 0 to 9 in shape [2, 3]",
    ]
