"""A state that one number of ranks has left in the host's memory, read by another number of ranks."""

import asyncio
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from flexmarl.actors.messages import BaseState, HostState, StateBytes
from flexmarl.actors.trainer.backends.policy_backend import TrainingStep
from flexmarl.actors.trainer.backends.torch_policy.gang_rank import ALONE, GangRank
from flexmarl.actors.trainer.pool.resharding import reads_of_rank
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.state import StateTransport
from scripts.bench.memory_peaks import peak_bytes

from ..backends.torch_policy.gang_cases import SETUPS, error, same_stats
from ..backends.torch_policy.policies import make_samples
from ..backends.torch_policy.ranks import (
    NAME,
    STEP,
    Call,
    Ranks,
    RankState,
    Trained,
    array,
    called,
    double_precision,
    factory_of,
    published,
    state_of,
    train,
)


def resumed_from_other_ranks(
    gang: GangRank, kind: str, ranks: list[tuple[HostState, StateBytes]], folder: Path, calls: Sequence[Call]
) -> tuple[Trained, int, int]:
    """Reads the state of other ``ranks`` from the host's memory, and trains.

    Returns also the most bytes allocated while it was read, and those of this rank's part of it.
    """
    with double_precision():
        factory = factory_of(SETUPS[kind])
        policy = factory.host(NAME, SETUPS[kind], gang)
        state = ranks[0][0]
        gradient = {} if state.step is None else policy.gradients()
        own = {**policy.base_state(), **gradient}

        async def read() -> None:
            async with StateTransport(folder) as transport:
                for part in reads_of_rank(own, policy.parts(), ranks):
                    await transport.get(part.handle, names=part.into.keys(), rows=part.rows, into=part.into)

        peak = peak_bytes(lambda: asyncio.run(read()))
        policy.load_state(TrainingStep(gradient, state.data))
        results = called(policy, calls)
        weights = {name: array(tensor.double()) for name, tensor in published(policy).items()}
        return (
            Trained(results, {}, weights, state_of(policy)),
            peak,
            sum(each.nbytes for each in own.values()),
        )


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *zip(SETUPS, cycle([(2, 1), (1, 2)]), strict=False),
        *zip(SETUPS, cycle([(2, 4), (4, 2)]), strict=False),
    ],
    ids=str,
)
async def test_a_suspended_state_is_resumed_on_another_number_of_ranks_from_the_hosts_memory(
    ranks: Ranks, kind: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    samples = make_samples(1)
    before: list[Call] = [("accumulate", samples), STEP, ("accumulate", make_samples(2, version=1)[:2])]
    after: list[Call] = [("accumulate", make_samples(2, version=1)[2:]), STEP]
    expected = train(ALONE, SETUPS[kind], [*before, *after])
    left: list[Trained] = ranks.run(sizes[0], train, SETUPS[kind], before)
    async with StateTransport(tmp_path) as transport:
        states = [await in_host_memory(transport, rank, each.state) for rank, each in enumerate(left)]
        found = ranks.run(sizes[1], resumed_from_other_ranks, kind, states, tmp_path, after)
    assert error(found[0][0].weights, expected.weights) < 1e-6
    same_stats(found[0][0].results[-1], expected.results[-1], 1e-6)
    for _, peak, own_bytes in found:
        assert peak < own_bytes / 4, "rows are read into their places"


async def in_host_memory(
    transport: StateTransport, rank: int, state: RankState
) -> tuple[HostState, StateBytes]:
    """A rank's state as a slot worker leaves it."""

    async def put(part: str, tensors: dict[str, NDArray[Any]]) -> StateHandle:
        return await transport.set(f"{part}-{rank}", tensors, version=1)

    step = {name: each for name, each in state.tensors.items() if "gradient/" in name}
    base = {name: each for name, each in state.tensors.items() if name not in step}
    published = {name.partition("/")[2]: each for name, each in base.items() if name.startswith("model/")}
    rows = {name: (part.start, part.stop) for name, part in state.parts.items()}
    is_alone = all(part.is_whole for part in state.parts.values())
    if is_alone:  # the published weights are the policy's own
        base = {name: each for name, each in base.items() if not name.startswith("model/")}
    live = {name: f"model/{name}" for name in published} if is_alone else {}
    handles = BaseState(await put("weights", published), is_alone, await put("rest", base), state.data)
    layout = StateBytes(weights=0, rest=0, step=0, base=0, on_slot=0, rows=rows, live=live)
    return HostState(handles, await put("step", step) if step else None, state.data), layout
