"""Training states on the hosts of their gangs, in virtual time: where they lie, and what the loss of a host costs."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.messages import LenderLife
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.trainer.pool.host_memory import HostMemory
from flexmarl.actors.trainer.pool.lender import LENDER, HostLender
from flexmarl.actors.trainer.pool.pool_config import SharedPoolConfig
from flexmarl.actors.trainer.pool.rank_memory import Part, Piece, RankMemory
from flexmarl.actors.trainer.pool.shared_pool import SharedPool
from flexmarl.actors.trainer.pool.state_hosts import StateHost, StateHosts
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.core.actor import endpoint
from flexmarl.core.errors import FlexmarlError, is_loss
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.state import StateTransport

from ..pools import JUDGE, SOLVER, Fate, House, house, simulated_policy
from .test_shared_pool import ELASTIC, GANGS, POLICIES, trained
from .test_shared_pool import run as run_on_head


def run(
    folder: Path,
    config: SharedPoolConfig,
    fate: Fate | None = None,
    policies: dict[PolicyName, PolicySetup] = POLICIES,
    work: Callable[[House], Awaitable[Any]] = trained,
) -> Any:
    """The results of ``work`` with each slot on a host that lends memory."""

    async def main() -> Any:
        async with house(folder, policies, config, fate, lends=True) as home:
            async with asyncio.timeout(10_000):
                return await work(home)

    return virtual_time.run(main())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyName, Any]:
    return run_on_head(tmp_path_factory.mktemp("static"), None)


def memory_of(home: House) -> HostMemory:
    pool = home.actor._pool
    assert isinstance(pool, SharedPool)
    return pool._memory


def places(home: House, policy: PolicyName) -> list[dict[str, str]]:
    """The name of the host of each part of a state, by rank."""
    return [{part: piece.host.name for part, piece in rank.pieces()} for rank in memory_of(home)[policy]]


def seconds(home: House, policy: PolicyName) -> list[dict[str, str]]:
    return [
        {part: copy.piece.host.name for part, copy in rank._seconds.items()}
        for rank in memory_of(home)[policy]
    ]


@pytest.mark.parametrize("policies", [POLICIES, GANGS, ELASTIC], ids=["single", "gangs", "elastic"])
def test_policies_learn_the_same_whichever_host_their_states_lie_on(
    tmp_path: Path, undisturbed: dict[PolicyName, Any], policies: dict[PolicyName, PolicySetup]
) -> None:
    fate = Fate()
    assert run(tmp_path, SharedPoolConfig(slots=3), fate, policies) == undisturbed
    assert fate.calls.count("forget_copies") == 0, "no state crosses to the trainer's host"


def test_a_rank_lies_on_the_host_of_its_slot_and_has_a_second_copy_on_another(tmp_path: Path) -> None:
    async def work(home: House) -> None:
        await home.trainer.publish(SOLVER)
        await home.put(SOLVER, 1, 3)
        await home.step(SOLVER, 1, [2, 1])
        await home.saved(SOLVER)
        await asyncio.sleep(1.0)
        assert places(home, SOLVER) == [{"rest": "host-0"}, {"rest": "host-1"}]
        of_ranks = seconds(home, SOLVER)
        assert [list(parts) for parts in of_ranks] == [["rest"], ["rest"]]
        assert of_ranks[0]["rest"] != "host-0" and of_ranks[1]["rest"] != "host-1"
        for rank, name in zip(memory_of(home)[SOLVER], ("host-0", "host-1"), strict=True):
            assert rank.host_bytes() == next(
                rank.host_bytes(host) for host in memory_of(home)._hosts.all if host.name == name
            )

    run(tmp_path, SharedPoolConfig(slots=2), policies={SOLVER: GANGS[SOLVER]}, work=work)


@pytest.mark.parametrize("policies", [POLICIES, GANGS], ids=["single", "gangs"])
def test_each_sample_counts_once_whenever_a_host_is_lost(
    tmp_path: Path, undisturbed: dict[PolicyName, Any], policies: dict[PolicyName, PolicySetup]
) -> None:
    """One run for every fifth call, of gangs for every 17th: the host of the slot that gets it is lost in it. Without a
    second copy, as before the first is whole, the run ends with a loss: it begins again from its checkpoint."""
    config, calls = SharedPoolConfig(slots=4), Fate()
    run(tmp_path / "whole", config, calls, policies)
    lost: list[str] = []
    numbers = range(3, len(calls.calls) + 1, 5 if policies is POLICIES else 17)
    for number in numbers:
        fate = Fate(dies_at=number, takes_host=True)
        try:
            found = run(tmp_path / str(number), config, fate, policies)
        except (FlexmarlError, ExceptionGroup) as group:
            error = group.exceptions[0] if isinstance(group, ExceptionGroup) else group
            assert is_loss(error) and "the only whole state of policy" in str(error)
            lost.append(fate.calls[number - 1])
        else:
            assert found == undisturbed, f"it was lost in call {number}, {fate.calls[number - 1]}"
    assert len(lost) <= len(numbers) // 2, "a second copy is made beside the next computations"


TWO_RANKS = {
    SOLVER: simulated_policy("solver", ranks=2, min_ranks=1, token_s=1.0, optimizer_s=3.0),
    JUDGE: simulated_policy("judge", ranks=2, min_ranks=1, token_s=2.0),
}


async def suspend_in_mid_step(home: House) -> None:
    """The solver waits with a gradient in memory, a rank on each host: the judge has all slots."""
    for policy in (SOLVER, JUDGE):
        await home.trainer.publish(policy)
        await home.put(policy, 1, 3)
    for policy in (SOLVER, JUDGE):
        await home.trainer.train(policy, Version(0), 2)
    await asyncio.sleep(5.0)
    parts = ("rest", "step")
    assert places(home, SOLVER) == [dict.fromkeys(parts, "host-0"), dict.fromkeys(parts, "host-1")]


async def end_step(home: House) -> tuple[list[Any], list[float]]:
    """The losses and saved states of both policies, and the micro-batches that were trained again."""
    for policy in (SOLVER, JUDGE):
        await home.trainer.train(policy, Version(0), 1)
    stepped = [(await home.trainer.optimizer_step(policy, Step(1))).stats for policy in (SOLVER, JUDGE)]
    saved = [await home.saved(policy) for policy in (SOLVER, JUDGE)]
    learned = [*(stats.figures["loss"] for stats in stepped), *saved]
    return learned, [stats.figures["repeated_micro_batches"] for stats in stepped]


@pytest.mark.parametrize("held", ["", "step", "rest"])
def test_a_policy_that_is_suspended_in_mid_step_when_its_host_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """``held``: the part that has no second copy yet. Without the step's its micro-batch is trained again; without the
    rest's the run ends with a loss."""
    copy = RankMemory.copy_again

    async def copy_some(
        self: RankMemory, part: Part, piece: Piece, handle: StateHandle, host: StateHost
    ) -> None:
        if part == held:
            await asyncio.Event().wait()
        await copy(self, part, piece, handle, host)

    async def whole(home: House) -> Any:
        await suspend_in_mid_step(home)
        return await end_step(home)

    async def lost(home: House) -> Any:
        await suspend_in_mid_step(home)
        await home.hosts[0].lose()
        return await end_step(home)

    config = SharedPoolConfig(slots=2, states_per_slot=1)
    learned, repeated = run(tmp_path / "whole", config, policies=TWO_RANKS, work=whole)
    assert repeated == [0.0, 0.0]
    monkeypatch.setattr(RankMemory, "copy_again", copy_some)
    if held == "rest":
        with pytest.raises(
            FlexmarlError, match="host host-0 is lost .* the only whole state of policy"
        ) as error:
            run(tmp_path / "lost", config, policies=TWO_RANKS, work=lost)
        assert is_loss(error.value)
    else:
        found, repeated = run(tmp_path / "lost", config, policies=TWO_RANKS, work=lost)
        assert found == learned
        assert repeated == [float(held == "step"), 1.0], "the judge's gradient was on the slot that was lost"


def test_a_copy_from_a_host_that_is_lost_ends_and_the_policy_is_bound_with_the_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot reads the state when its host is lost, and gets neither bytes nor an error."""
    get = StateTransport.get
    hold: list[asyncio.Event] = []

    async def hang_once(self: StateTransport, handle: StateHandle, **options: Any) -> Any:
        if hold and handle.key == "solver/rest":
            hold.pop().set()
            await asyncio.Event().wait()
        return await get(self, handle, **options)

    async def work(home: House) -> Any:
        await suspend_in_mid_step(home)
        hold.append(reads := asyncio.Event())
        ending = asyncio.create_task(end_step(home))
        await reads.wait()
        await home.hosts[0].lose()
        return await ending

    async def whole(home: House) -> Any:
        await suspend_in_mid_step(home)
        return await end_step(home)

    config = SharedPoolConfig(slots=2, states_per_slot=1)
    learned, _ = run(tmp_path / "whole", config, policies=TWO_RANKS, work=whole)
    monkeypatch.setattr(StateTransport, "get", hang_once)
    assert run(tmp_path / "lost", config, policies=TWO_RANKS, work=work)[0] == learned


def test_a_second_copy_that_is_made_while_the_policy_is_divided_over_other_ranks_finds_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the ranks before is freed: the copy of the first rank ends, and the second rank is not copied."""
    copy, copied = RankMemory.copy_again, list[Part]()
    begun, proceed = asyncio.Event(), asyncio.Event()

    async def copy_slowly(
        self: RankMemory, part: Part, piece: Piece, handle: StateHandle, host: StateHost
    ) -> None:
        copied.append(part)
        begun.set()
        await proceed.wait()
        await copy(self, part, piece, handle, host)

    async def work(home: House) -> None:
        await suspend_in_mid_step(home)
        memory = memory_of(home)
        for rank in memory[SOLVER]:
            for host in memory._hosts.all:
                rank.drop_seconds(host)
        monkeypatch.setattr(RankMemory, "copy_again", copy_slowly)
        copying = asyncio.create_task(memory.copy_again(SOLVER))
        await begun.wait()
        for rank in memory[SOLVER]:
            await rank.free()
        proceed.set()
        await copying
        assert copied in (["rest", "step"], ["rest"]) and seconds(home, SOLVER) == [{}, {}]

    run(tmp_path, SharedPoolConfig(slots=2, states_per_slot=1), policies=TWO_RANKS, work=work)


class SilentLender(HostLender):
    """Answers nothing."""

    @endpoint
    async def enlist(self, encrypted: bool) -> AsyncGenerator[LenderLife]:
        await asyncio.Event().wait()
        yield LenderLife("never")


class LameLender(HostLender):
    """Is enlisted, and answers nothing from then on."""

    @endpoint
    async def ping(self) -> None:
        await asyncio.Event().wait()


@asynccontextmanager
async def hosts_with(
    private: Path, kind: type[HostLender]
) -> AsyncIterator[tuple[StateHosts, str, list[str]]]:
    """Hosts of a trainer, the address of a node whose lender is of ``kind``, and the reasons of losses."""
    private.mkdir(mode=0o700)
    network, losses, tasks = MemoryNetwork(), list[str](), list[asyncio.Task[None]]()
    async with (
        ActorSystem("node", private, wire=network.wire("node")) as node,
        ActorSystem("trainer", private, wire=network.wire("trainer")) as trainer,
        StateTransport(private) as transport,
    ):
        await node.add(kind("far", private), LENDER)
        yield (
            StateHosts(
                transport, trainer, lambda work, name: tasks.append(asyncio.create_task(work)), encrypted=True,
                lost=lambda host, reason: losses.append(f"{host.name}: {reason}"),
            ),
            node.address,
            losses,
        )  # fmt: skip
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_lender_that_is_silent_is_named_and_the_heads_memory_is_taken_after_a_minute(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with hosts_with(tmp_path / "run", SilentLender) as (hosts, address, _):
            at = asyncio.create_task(hosts.at(address))
            await asyncio.sleep(50.0)
            assert [(wait.text, wait.seconds) for wait in hosts.waits()] == [
                (f"the memory of the host at {address}", 50.0)
            ]
            assert await at is hosts.head

    virtual_time.run(main())


def test_a_lender_that_answers_no_more_is_named_and_its_host_is_lost_after_a_minute(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts_with(tmp_path / "run", LameLender) as (hosts, address, losses):
            host = await hosts.at(address)
            assert await hosts.at(address) is host and hosts.all == [hosts.head, host]
            checking = asyncio.create_task(hosts.check(host))
            await asyncio.sleep(50.0)
            assert [wait.text for wait in hosts.waits()] == ["an answer of the memory of host far"]
            await checking
            assert losses == ["far: no answer after 60 s"]
            assert host.is_lost and hosts.all == [hosts.head]
            assert await hosts.at(address) is not host, "the next life of its lender"

    virtual_time.run(main())
