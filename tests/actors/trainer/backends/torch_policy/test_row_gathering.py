"""The weights of a gang as they are published: the same bits for any number of ranks, and no rank has a whole copy."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flexmarl.actors.errors import WeightsNotGathered
from flexmarl.actors.messages import LoraConfig
from flexmarl.actors.trainer.backends.torch_policy import trained_models
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank
from flexmarl.actors.trainer.backends.torch_policy.row_gathering import gather_rows
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.transport.state import StateTransport, payload_bytes
from scripts.bench.memory_peaks import peak_bytes

from .ranks import Ranks, abort_gang, array, gang_setup, made_policy, published

# --------------------------------------------------------------------------- rows


def tensors(number: int = 1) -> dict[str, Tensor]:
    """Rows that ranks divide equally, unequally, and fewer than there are ranks."""
    numbers = torch.arange(7 * 5, dtype=torch.float32).view(7, 5) * number
    return {
        "matrix": numbers, "even": numbers[:4].clone(), "few": numbers[:2].clone(), "vector": numbers[:, 0].clone(),
        "cube": numbers.view(7, 5, 1), "integers": torch.arange(9) * number, "none": torch.zeros(0, 3),
    }  # fmt: skip


def gathered(gang: GangRank, most_bytes: int, dtype: torch.dtype | None) -> dict[str, NDArray[Any]]:
    """All tensors as they are gathered; the numbers of one that was not written are -1."""
    whole = {"position": torch.tensor(5), "scale": torch.tensor(0.3), "base": tensors(3)["matrix"]}
    divided: dict[str, Tensor] = tensors()
    if gang.size > 1:
        mesh = init_device_mesh("cpu", (gang.size,))
        divided = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors().items()}
    every: dict[str, Tensor] = {**divided, **whole}
    into = {
        name: torch.full(tensor.shape, -1, dtype=tensor.dtype).to(
            dtype if dtype and tensor.is_floating_point() else tensor.dtype
        )
        for name, tensor in every.items()
    }
    gather_rows(gang, every.items(), into if gang.rank == 0 else {}, dtype, most_bytes)
    return {name: array(tensor.double()) for name, tensor in into.items()}


@pytest.mark.parametrize("most_bytes", [1, 50, 64, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_row_arrives_in_ranges_of_any_size(ranks: Ranks, size: int, most_bytes: int) -> None:
    for dtype in (None, torch.bfloat16):
        first, *others = ranks.run(size, gathered, most_bytes, dtype)
        expected = {**tensors(), "position": torch.tensor(5), "scale": torch.tensor(0.3)}
        expected["base"] = tensors(3)["matrix"]
        for name, tensor in expected.items():
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            assert np.array_equal(first[name], array(tensor.double())), name
        assert all((each["matrix"] == -1).all() for each in others), "they only send"


# --------------------------------------------------------------------------- policies

SETUPS = {
    "whole": gang_setup({"name": "dapo"}, num_hidden_layers=2),
    "tied": gang_setup({"name": "dapo"}, tie_word_embeddings=True),
    "bfloat16": gang_setup({"name": "dapo"}, dtype="bfloat16"),
    "merged": gang_setup({"name": "dapo"}, lora=LoraConfig(rank=3, alpha=7), dtype="bfloat16"),
    "adapter": gang_setup({"name": "dapo"}, lora=LoraConfig(rank=3, alpha=7), publishes_adapter=True),
}


def filled_policy(gang: GangRank, kind: str) -> TorchPolicy:
    """Each weight has other numbers, also in the adapters, which begin without effect."""
    policy = made_policy(gang, SETUPS[kind], None)
    state, parts = policy.base_state(), policy.parts()
    for number, (name, tensor) in enumerate(state.items()):
        if tensor.dim():
            rows = torch.randn(parts[name].shape, generator=torch.Generator().manual_seed(number))
            tensor.copy_(rows[parts[name].start : parts[name].stop])
    return policy


def published_by(gang: GangRank, kind: str, most_bytes: int) -> dict[str, tuple[str, NDArray[Any]]]:
    """The dtype and the numbers of each weight."""
    policy = filled_policy(gang, kind)
    in_small_ranges = partial(gather_rows, most_bytes=most_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_models, "gather_rows", in_small_ranges)
        weights = published(policy)
    if gang is ALONE:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in policy.weights().items())
        assert weights.keys() == policy.weights().keys()
    return {name: (str(tensor.dtype), array(tensor.double())) for name, tensor in weights.items()}


@pytest.mark.parametrize("kind", SETUPS)
def test_the_published_bits_are_those_of_one_rank(ranks: Ranks, kind: str) -> None:
    (expected,) = ranks.run(1, published_by, kind, 1 << 20)
    assert ("lm_head.weight" in expected) == (kind not in ("tied", "adapter"))
    for size, most_bytes in ((2, 1 << 20), (4, 1 << 20), (4, 100)):
        found, *others = ranks.run(size, published_by, kind, most_bytes)
        assert not any(others)
        assert found.keys() == expected.keys()
        for name, (dtype, numbers) in expected.items():
            assert found[name][0] == dtype
            assert np.array_equal(found[name][1], numbers), name


@pytest.mark.parametrize("kind", ["whole", "adapter", "merged", "bfloat16"])
def test_live_weights_are_the_published_ones(kind: str) -> None:
    policy = filled_policy(ALONE, kind)
    live = policy.live_weights()
    assert bool(live) == (kind == "whole")
    assert all(policy.weights()[name].data_ptr() == tensor.data_ptr() for name, tensor in live.items())


def published_peak(gang: GangRank, most_bytes: int) -> tuple[int, int]:
    """The most bytes beside the memory that the weights are published in, and the bytes of all weights."""
    policy = made_policy(
        gang, gang_setup({"name": "dapo"}, num_hidden_layers=4, vocab_size=64, dtype="bfloat16"), None
    )
    into = {name: torch.empty_like(tensor, device="cpu") for name, tensor in policy.weights_outline().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_models, "gather_rows", partial(gather_rows, most_bytes=most_bytes))
        return peak_bytes(lambda: policy.gather_weights(into)), payload_bytes(into)


@pytest.mark.parametrize("size", [2, 4])
def test_no_rank_has_a_whole_copy_of_the_weights(ranks: Ranks, size: int) -> None:
    (first, whole), *others = ranks.run(size, published_peak, 4096)
    assert whole > 10 * 4096
    for peak in (first, *(peak for peak, _ in others)):
        assert peak <= 2 * 4096
    # A range as large as all of them is the whole copy that the figure would show.
    _, (sender, _), *_ = ranks.run(size, published_peak, 1 << 30)
    assert sender >= whole / size


# --------------------------------------------------------------------------- a rank that dies


def publish_and_lose(gang: GangRank, folder: Path) -> tuple[str, dict[str, NDArray[Any]]]:
    """Publishes twice; within the second time the last rank's process ends. Of the first rank: the error of it, and
    the first version as it is read then."""
    policy = filled_policy(gang, "bfloat16")

    def rows(dying: bool) -> Iterator[tuple[str, Tensor]]:
        for number, entry in enumerate(policy.models._engine_weights()):
            if dying and number == 3 and gang.rank == gang.size - 1:
                os._exit(1)
            yield entry

    async def gather(dying: bool, into: Mapping[str, Any]) -> None:
        gather_rows(gang, rows(dying), into, torch.bfloat16, most_bytes=64)

    async def publish() -> tuple[str, dict[str, NDArray[Any]]]:
        async with StateTransport(folder) as transport:
            outline = policy.weights_outline()
            handle = await transport.fill("solver", outline, partial(gather, False), version=1)
            with pytest.raises(WeightsNotGathered) as lost:
                await transport.fill("solver", outline, partial(gather, True), version=2)
            abort_gang()  # else rank 1 waits for its rows to be taken until the gang's deadline
            read = await transport.get(handle)
            return str(lost.value), {name: array(tensor.double()) for name, tensor in read.items()}

    if gang.rank == 0:
        return asyncio.run(publish())
    gather_rows(gang, rows(False), {}, torch.bfloat16, most_bytes=64)
    with pytest.raises(WeightsNotGathered, match="rank 0"):
        gather_rows(gang, rows(True), {}, torch.bfloat16, most_bytes=64)
    return "", {}


async def test_a_rank_that_dies_while_weights_are_gathered_leaves_the_older_version(private: Path) -> None:
    processes = Ranks(3)
    try:
        (problem, read), _, dead = await asyncio.to_thread(processes.run, 3, publish_and_lose, private)
        assert dead is None
        assert "rank 2 of the gang has not sent or received its rows of model." in problem
        expected = published(filled_policy(ALONE, "bfloat16"))
        assert read.keys() == expected.keys()
        assert all(np.array_equal(read[name], array(tensor.double())) for name, tensor in expected.items())
        assert not list(private.iterdir()), "memory of the ended transport"
    finally:
        await asyncio.to_thread(processes.close)
