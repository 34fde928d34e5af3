"""The contract of every transfer path, checked on each of them through Set and Get."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.core import Keys
from flexmarl.transport import StateHandle
from flexmarl.transport.errors import NoPath, StaleHandle, StateMismatch, TransportClosed
from flexmarl.transport.handle import DTYPE_BYTES, PathName
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.state import StateTransport

from ..fake_devices import FakeDevices

torch.set_num_threads(1)
KEYS = Keys.make()


@dataclass
class Ends:
    """The transports that set and get; ``path`` is the path under test."""

    source: StateTransport
    destination: StateTransport
    path: PathName

    async def set(self, key: str, tensors: dict[str, Any], version: int) -> StateHandle:
        return await self.source.set(key, tensors, version=version, offer=[self.path])


@asynccontextmanager
async def open_ends(path: PathName, directory: Path) -> AsyncIterator[Ends]:
    def devices() -> FakeDevices | None:  # one object per process, as the transports play processes
        return FakeDevices(directory, {"GPU-a": 1 << 28}) if path == "cuda_ipc" else None

    bulk = Bulk("127.0.0.1", KEYS) if path == "tcp" else None
    async with (
        StateTransport(directory, devices(), bulk=bulk) as source,
        StateTransport(directory, devices(), bulk=bulk) as other,
    ):
        yield Ends(source, other, path)


PATHS: list[PathName] = ["shm", "cuda_ipc", "tcp"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> PathName:
    chosen: PathName = request.param
    return chosen


@pytest.fixture
async def ends(path: PathName, tmp_path: Path) -> AsyncIterator[Ends]:
    async with open_ends(path, tmp_path) as opened:
        yield opened


def random_tensor(shape: tuple[int, ...], dtype: str, strided: bool, seed: int) -> torch.Tensor:
    """Any bit pattern, so NaNs too; ``strided`` gives every second element of a larger tensor, transposed."""
    generator = torch.Generator().manual_seed(seed)
    full = (*(2 * size for size in reversed(shape)),) if strided else shape
    target = getattr(torch, dtype)
    count = DTYPE_BYTES[dtype] * torch.Size(full).numel()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(target).view(full)
    if strided:
        tensor = tensor[tuple(slice(None, None, 2) for _ in full)].permute(tuple(reversed(range(len(full)))))
    return tensor


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(flat.view(torch.uint8).tolist())


tensors = st.builds(
    random_tensor,
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.booleans(),
    st.integers(0, 2**32),
)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40)
@given(state=st.dictionaries(st.text(max_size=8), tensors, max_size=5), fresh=st.booleans())
def test_every_bit_arrives(path: PathName, state: dict[str, torch.Tensor], fresh: bool) -> None:
    async def round_trip(directory: Path) -> None:
        async with open_ends(path, directory) as ends:
            handle = await ends.set("solver/weights", state, 3)
            into = None if fresh else {name: torch.empty_like(tensor) for name, tensor in state.items()}
            got = await ends.destination.get(handle, into=into)
            assert ([s.path for s in handle.sources], handle.version) == ([path], 3)
            assert handle.key == "solver/weights"
            assert list(got) == list(state)
            for name, tensor in state.items():
                assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype)
                assert bits(got[name]) == bits(tensor)
                assert into is None or got[name] is into[name]

    with TemporaryDirectory() as directory:
        asyncio.run(round_trip(Path(directory)))


arrays = st.builds(
    lambda tensor: tensor.numpy(),
    st.builds(
        random_tensor,
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.sampled_from([name for name in sorted(DTYPE_BYTES) if name in np.sctypeDict]),
        st.booleans(),
        st.integers(0, 2**32),
    ),
)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40)
@given(
    state=st.dictionaries(st.text(max_size=8), arrays, min_size=1, max_size=5),
    set_tensors=st.booleans(),
    get_tensors=st.booleans(),
)
def test_arrays_of_numpy_arrive_also_as_tensors(
    path: PathName, state: dict[str, np.ndarray[Any, Any]], set_tensors: bool, get_tensors: bool
) -> None:
    async def round_trip(directory: Path) -> None:
        async with open_ends(path, directory) as ends:
            given_tensors = {name: torch.from_numpy(array) for name, array in state.items()}
            handle = await ends.set("solver/weights", given_tensors if set_tensors else state, 3)
            into: dict[str, Any] = {name: np.empty_like(array) for name, array in state.items()}
            if get_tensors:
                into = {name: torch.from_numpy(array) for name, array in into.items()}
            got = await ends.destination.get(handle, into=into)
            for name, array in state.items():
                assert got[name] is into[name]
                assert np.asarray(got[name]).tobytes() == array.tobytes()

    with TemporaryDirectory() as directory:
        asyncio.run(round_trip(Path(directory)))


async def test_large_arrays_of_every_stride_arrive(ends: Ends) -> None:
    matrix = np.arange(3_000_000, dtype=np.float32).reshape(1500, 2000)
    state: dict[str, np.ndarray[Any, Any]] = {"a": matrix, "small": np.ones(3), "transposed": matrix.T}
    handle = await ends.set("large", state, 0)
    into = {name: np.zeros_like(array) for name, array in state.items()}
    await ends.destination.get(handle, into=into)
    for name, array in state.items():
        assert np.array_equal(into[name], array), name


@pytest.mark.parametrize(
    "state",
    [
        {"text": np.array(["a"])},
        {"objects": np.array([None])},
        {"big-endian": np.ones(3, ">i4")},
        {"array": np.ones(3), "tensor": torch.ones(3)},
    ],
    ids=lambda state: "-".join(state),
)
async def test_an_array_that_can_not_travel_is_refused(ends: Ends, state: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="can't travel|either tensors"):
        await ends.set("solver", state, 0)


async def test_an_array_takes_no_dtype_that_numpy_lacks(ends: Ends) -> None:
    handle = await ends.set("solver", {"a": torch.ones(3, dtype=torch.bfloat16)}, 0)
    with pytest.raises(StateMismatch, match=r"a: bfloat16\[3\] does not go into float32\[3\]"):
        await ends.destination.get(handle, into={"a": np.zeros(3, np.float32)})


async def test_large_tensors_of_every_stride_arrive(ends: Ends) -> None:
    matrix = torch.arange(3_000_000, dtype=torch.float32).view(1500, 2000)
    state = {"a": matrix, "small": torch.ones(3), "transposed": matrix.t(), "b": matrix.to(torch.bfloat16)}
    handle = await ends.set("large", state, 0)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    await ends.destination.get(handle, into=into)
    for name, tensor in state.items():
        assert torch.equal(into[name], tensor), name


async def test_parameters_and_inference_tensors_can_be_written(ends: Ends) -> None:
    layer = torch.nn.Linear(3, 2)
    handle = await ends.set("layer", dict(layer.named_parameters()), 0)
    other = torch.nn.Linear(3, 2)
    await ends.destination.get(handle, into=dict(other.named_parameters()))
    assert torch.equal(other.weight, layer.weight)
    assert other.weight.requires_grad and other.weight.is_leaf
    with torch.inference_mode():
        frozen = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    await ends.destination.get(handle, into=frozen)
    assert torch.equal(frozen["bias"], layer.bias)


async def test_every_difference_is_reported_and_nothing_written(ends: Ends) -> None:
    state = {"same": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2), "gone": torch.ones(2)}
    handle = await ends.set("key", state, 0)
    into = {
        "same": torch.zeros(2),
        "shape": torch.zeros(1, 2),
        "dtype": torch.zeros(2, dtype=torch.int32),
        "oversampled": torch.zeros(2),
    }
    with pytest.raises(StateMismatch) as raised:
        await ends.destination.get(handle, into=into)
    assert [problem.split(":")[0] for problem in raised.value.problems] == [
        "shape",
        "dtype",
        "gone",
        "oversampled",
    ]
    assert "float32[2] does not go into float32[1, 2]" in str(raised.value)
    assert all(not tensor.any() for tensor in into.values())
    with pytest.raises(StateMismatch, match="more: not in the state"):
        await ends.destination.get(handle, into={**state, "more": torch.zeros(1)})


async def test_the_two_newest_versions_are_readable_and_older_ones_stale(ends: Ends) -> None:
    handles = [
        await ends.set("key", {"w": torch.full((5,), float(version))}, version) for version in range(4)
    ]
    for version in (2, 3):
        got = await ends.destination.get(handles[version])
        assert torch.equal(got["w"], torch.full((5,), float(version)))
    for version in (0, 1):
        with pytest.raises(StaleHandle) as raised:
            await ends.destination.get(handles[version])
        assert (raised.value.key, raised.value.version) == ("key", version)
        assert raised.value.newest in (2, 3)


async def test_the_same_version_set_again_is_another_state(ends: Ends) -> None:
    handles = [await ends.set("key", {"w": torch.tensor(float(number))}, 7) for number in range(3)]
    assert (await ends.destination.get(handles[2]))["w"] == 2
    with pytest.raises(StaleHandle):
        await ends.destination.get(handles[0])


async def test_a_layout_may_change_between_versions(ends: Ends) -> None:
    first = await ends.set("key", {"a": torch.ones(3), "b": torch.ones(2)}, 0)
    shrunk = await ends.set("key", {"b": torch.full((1,), 2.0)}, 1)
    assert (await ends.destination.get(first))["a"].tolist() == [1, 1, 1]
    assert (await ends.destination.get(shrunk))["b"].tolist() == [2]
    grown = await ends.set("key", {"b": torch.full((9999,), 3.0)}, 2)
    assert (await ends.destination.get(grown))["b"].sum() == 3 * 9999


async def test_keys_do_not_disturb_each_other(ends: Ends) -> None:
    keys = ["a/b", "a b", "a_b", "é", ""]
    handles = [await ends.set(key, {"w": torch.tensor(number)}, number) for number, key in enumerate(keys)]
    for number, handle in enumerate(handles):
        assert (await ends.destination.get(handle))["w"] == number


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse()])
async def test_tensors_without_plain_bytes_are_refused_by_name(ends: Ends, tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="odd one"):
        await ends.set("key", {"fine": torch.ones(1), "odd one": tensor}, 0)


async def test_a_negative_version_is_refused(ends: Ends) -> None:
    with pytest.raises(ValueError, match="version -1"):
        await ends.set("key", {}, -1)


async def test_nothing_works_after_close(ends: Ends) -> None:
    handle = await ends.set("key", {"w": torch.ones(1)}, 0)
    await ends.source.close()
    await ends.destination.close()
    with pytest.raises(TransportClosed):
        await ends.set("key", {"w": torch.ones(1)}, 1)
    with pytest.raises(TransportClosed):
        await ends.destination.get(handle)


async def test_a_handle_never_set_is_stale(ends: Ends) -> None:
    handle = await ends.set("key", {"w": torch.ones(1)}, 0)
    (source,) = handle.sources
    stale = replace(handle, sources=(replace(source, generation=source.generation + 2),))
    with pytest.raises(StaleHandle):
        await ends.destination.get(stale)


@pytest.mark.parametrize("into", [False, True])
async def test_tensors_are_got_by_name_and_by_rows(ends: Ends, into: bool) -> None:
    matrix = torch.arange(900_000, dtype=torch.float32).view(900, 1000)  # several chunks
    state = {"before": torch.ones(7), "matrix": matrix, "bits": torch.arange(9, dtype=torch.uint8)}
    handle = await ends.set("key", state, 0)
    wanted = {"matrix": matrix[301:899], "bits": torch.arange(3, 5, dtype=torch.uint8)}
    got = await ends.destination.get(
        handle,
        names=["bits", "matrix"],
        rows={"matrix": (301, 899), "bits": (3, 5)},
        into={name: torch.zeros_like(tensor) for name, tensor in wanted.items()} if into else None,
    )
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
    none = await ends.destination.get(handle, rows={"matrix": (5, 5)})
    assert none["matrix"].shape == (0, 1000) and torch.equal(none["before"], state["before"])


async def test_a_part_that_the_state_lacks_is_refused_before_anything_is_written(ends: Ends) -> None:
    handle = await ends.set("key", {"w": torch.ones(3)}, 0)
    into = {"w": torch.zeros(3), "missing": torch.zeros(3)}
    with pytest.raises(StateMismatch, match="missing: not in the state; w: no rows 1 to 5"):
        await ends.destination.get(handle, names=["w", "missing"], rows={"w": (1, 5)}, into=into)
    with pytest.raises(StateMismatch, match="does not go into"):
        await ends.destination.get(handle, rows={"w": (1, 2)}, into={"w": into["w"]})
    assert not into["w"].any()


async def test_a_forced_path_is_taken_or_refused(ends: Ends) -> None:
    handle = await ends.set("key", {"w": torch.ones(3)}, 0)
    assert (await ends.destination.get(handle, path=ends.path))["w"].tolist() == [1, 1, 1]
    assert ends.destination.statistics().chosen["key"].path == ends.path
    for other in set(PATHS) - {ends.path}:
        with pytest.raises(NoPath, match=f"path '{other}': not offered"):
            await ends.destination.get(handle, path=other)


async def test_a_dropped_key_is_stale_and_can_be_set_again(ends: Ends) -> None:
    handle = await ends.set("key", {"w": torch.ones(3)}, 0)
    other = await ends.set("other", {"w": torch.ones(3)}, 0)
    await ends.source.drop("key")
    with pytest.raises(StaleHandle):
        await ends.destination.get(handle)
    await ends.destination.get(other)
    again = await ends.set("key", {"w": torch.zeros(3)}, 0)
    assert not (await ends.destination.get(again))["w"].any()
