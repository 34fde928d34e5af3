"""A trainer whose policies share slots, in virtual time: turns, suspensions, and slot workers that die."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexmarl.actors.errors import StateTooLarge
from flexmarl.actors.messages import Sample
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.trainer.backends.policy_backend import MicroBatchStats
from flexmarl.actors.trainer.backends.simulated_policy import SimulatedPolicy
from flexmarl.actors.trainer.pool import slot
from flexmarl.actors.trainer.pool.lender import Lending
from flexmarl.actors.trainer.pool.pool_config import SharedPoolConfig
from flexmarl.actors.trainer.pool.pool_slots import HostedGang
from flexmarl.actors.trainer.pool.rank_memory import RankMemory
from flexmarl.actors.trainer.pool.state_hosts import StateHost
from flexmarl.actors.trainer.pool.state_moves import StateMoves
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.core.errors import FlexmarlError, RemoteError
from flexmarl.core.testing import virtual_time
from flexmarl.transport.handle import LentMemory, StateHandle

from ..pools import JUDGE, SOLVER, Fate, House, house, simulated_policy

POLICIES = {
    SOLVER: simulated_policy("solver", token_s=1.0, optimizer_s=3.0),
    JUDGE: simulated_policy("judge", token_s=2.0, micro_batch_s=1.0),
}
GANGS = {
    SOLVER: simulated_policy("solver", ranks=2, token_s=1.0, optimizer_s=3.0),
    JUDGE: simulated_policy("judge", ranks=3, token_s=2.0),
}
ELASTIC = {
    SOLVER: simulated_policy("solver", ranks=3, min_ranks=1, token_s=1.0, optimizer_s=3.0),
    JUDGE: simulated_policy("judge", ranks=2, token_s=2.0),
}
REPLICAS = {
    SOLVER: simulated_policy("solver", ranks=4, replicas=2, min_ranks=2, token_s=1.0, optimizer_s=3.0),
    JUDGE: simulated_policy("judge", ranks=2, replicas=2, token_s=2.0),
}
STEPS = 2


async def trained(home: House) -> dict[PolicyName, Any]:
    """Both policies' losses and saved states after ``STEPS`` steps of several micro-batches each."""
    losses: dict[PolicyName, list[float]] = {policy: [] for policy in POLICIES}
    for policy in POLICIES:
        losses[policy].append(await home.trainer.sft(policy, 0, 1))
    for policy in POLICIES:
        await home.trainer.publish(policy)

    async def all_steps(policy: PolicyName) -> None:
        for step in range(1, STEPS + 1):
            await home.put(policy, step, 3)
            losses[policy].append(await home.step(policy, step, [2, 1]))

    async with asyncio.TaskGroup() as group:
        for policy in POLICIES:
            group.create_task(all_steps(policy))
    return {policy: (losses[policy], await home.saved(policy)) for policy in POLICIES}


def run(
    folder: Path,
    config: SharedPoolConfig | None,
    fate: Fate | None = None,
    events: list[dict[str, Any]] | None = None,
    policies: dict[PolicyName, PolicySetup] = POLICIES,
) -> dict[PolicyName, Any]:
    """``events``: gets those of the run."""

    async def main() -> dict[PolicyName, Any]:
        async with house(folder, policies, config, fate) as home:
            async with asyncio.timeout(10_000):
                found = await trained(home)
            if events is not None:
                events.extend(home.listener.events)
            return found

    return virtual_time.run(main())


def numbers_of(calls: Sequence[str], most: int, *, before: bool) -> list[int]:
    """Numbers of at most ``most`` calls of each name, spread over the run: from the first on, or from the last."""
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(calls, 1):
        numbers.setdefault(name, []).append(number)
    picks: set[int] = set()
    for of_name in numbers.values():
        in_order = of_name if before else of_name[::-1]
        picks.update(in_order[place * len(in_order) // most] for place in range(most))
    return sorted(picks)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyName, Any]:
    return run(tmp_path_factory.mktemp("static"), None)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("states", [1, 2])
def test_policies_that_take_turns_learn_the_same(
    tmp_path: Path, undisturbed: dict[PolicyName, Any], slots: int, states: int
) -> None:
    fate = Fate()
    assert run(tmp_path, SharedPoolConfig(slots=slots, states_per_slot=states), fate) == undisturbed
    assert ("suspend" in fate.calls) == (slots == 1)


def test_states_are_copied_to_memory_on_the_side_of_their_slot_s_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: dict[str, set[int | None]] = {}
    lend = Lending.lend

    async def record(self: Lending, key: str, size_bytes: int, side: int | None = None) -> LentMemory:
        piece = await lend(self, key, size_bytes, side)
        lent.setdefault(key.rpartition("-")[2], set()).add(piece.side)
        return piece

    monkeypatch.setattr(Lending, "lend", record)
    monkeypatch.setitem(vars(slot), "find_side", lambda _devices: 1)
    run(tmp_path, SharedPoolConfig(slots=1))
    assert lent == {"weights": {None}, "rest": {1}, "step": {1}}


def test_a_slot_that_is_lost_twice_while_the_rest_of_its_gang_is_dropped(tmp_path: Path) -> None:
    policies = {SOLVER: simulated_policy("solver", ranks=3, token_s=1.0)}

    async def main() -> float:
        async with house(tmp_path, policies, SharedPoolConfig(slots=3)) as home:
            await home.trainer.publish(SOLVER)
            await home.put(SOLVER, 1, 3)
            stepping = asyncio.create_task(home.step(SOLVER, 1, [2, 1]))
            await asyncio.sleep(1.0)
            async with home.slots[2]._moving[SOLVER]:  # the drop there takes its time
                for slot in (0, 1, 1):
                    home.slots[slot].die()
                    await asyncio.sleep(1.0)
            async with asyncio.timeout(1000):
                return await stepping

    assert virtual_time.run(main()) > 0


def test_a_prefetched_gang_that_loses_a_slot_while_it_is_dropped(tmp_path: Path) -> None:
    slow, fast, late = PolicyName("slow"), PolicyName("fast"), PolicyName("late")
    seconds = {slow: 1.5, fast: 1.0, late: 1.0}
    policies = {name: simulated_policy(name, ranks=2, token_s=token_s) for name, token_s in seconds.items()}

    async def main() -> list[float]:
        fate = Fate()
        async with house(tmp_path, policies, SharedPoolConfig(slots=4), fate) as home:
            for policy in policies:
                await home.trainer.publish(policy)
                await home.put(policy, 1, 3)
            stepping = []
            for policy, batches in ((slow, [3]), (fast, [1, 1, 1]), (late, [3])):
                stepping.append(asyncio.create_task(home.step(policy, 1, batches)))
                await asyncio.sleep(0.1)
            prefetched = [slot for slot in home.slots if late in slot._prefetched]
            assert len(prefetched) == 2, "beside the one that is expected to end first"
            fate.calls.clear()
            async with prefetched[1]._moving[late]:  # the drop there takes its time
                while fate.calls.count("drop") < 2:  # the other one has ended earlier
                    await asyncio.sleep(0.1)
                prefetched[0].die()
                await asyncio.sleep(1.0)
            async with asyncio.timeout(10_000):
                return await asyncio.gather(*stepping)

    assert all(loss > 0 for loss in virtual_time.run(main()))


def test_states_beyond_the_memory_go_to_the_disk_and_come_back(
    tmp_path: Path, undisturbed: dict[PolicyName, Any]
) -> None:
    events: list[dict[str, Any]] = []
    config = SharedPoolConfig(slots=1, states_per_slot=1, host_memory_gib=1e-9)
    assert run(tmp_path, config, events=events) == undisturbed
    paths = {event["path"] for event in events if event["event"] == "policy_resumed"}
    assert "disk, shm" in paths
    assert not (tmp_path / "suspended").exists()


def test_what_moves_is_reported_with_its_reason(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    run(tmp_path, SharedPoolConfig(slots=1, states_per_slot=1), events=events)
    suspended = [event for event in events if event["event"] == "policy_suspended"]
    assert suspended and {event["slots"] for event in suspended} == {"slot-0"}
    assert all("no computation is ready" in event["reason"] for event in suspended)
    assert {(event["size_bytes"], event["path"]) for event in suspended} <= {(8, "shm"), (0, "none")}
    resumed = [event for event in events if event["event"] == "policy_resumed"]
    assert {event["size_bytes"] for event in resumed} <= {16, 24}, "version and digest, and the gradient"


def test_a_policy_that_does_not_fit_a_slot_is_refused(tmp_path: Path) -> None:
    config = SharedPoolConfig(slots=1, slot_memory_gib=1e-9)
    with pytest.raises(StateTooLarge, match="takes 24 bytes on a slot, which has 1 .* 16 of weights .* 8 of"):
        run(tmp_path, config)


def test_the_base_of_an_adapter_counts_as_memory_of_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedPolicy, "frozen_state", lambda _: {"base": np.zeros(100, np.uint8)})
    config = SharedPoolConfig(slots=1, slot_memory_gib=100 / 2**30)
    text = "takes 124 bytes on a slot, which has 100 .* 16 of weights .* 8 of gradient, 100 of the base of"
    with pytest.raises(StateTooLarge, match=text):
        run(tmp_path, config)


def test_a_policy_that_does_not_fit_its_fewest_slots_is_refused(tmp_path: Path) -> None:
    """``min_ranks`` of 1: on one slot it has three times the state of its three ranks."""
    config = SharedPoolConfig(slots=3, slot_memory_gib=48 / 2**30)
    with pytest.raises(StateTooLarge, match="takes 72 bytes on a slot, which has 48 .* 48 of weights"):
        run(tmp_path, config, policies=ELASTIC)
    fixed = {**ELASTIC, SOLVER: GANGS[SOLVER]}
    with pytest.raises(StateTooLarge, match=r"takes 24 bytes on a slot \(divided over 2\), which has 23 "):
        run(tmp_path / "fixed", SharedPoolConfig(slots=3, slot_memory_gib=23 / 2**30), policies=fixed)


def test_a_slot_worker_with_another_torch_is_refused(tmp_path: Path) -> None:
    """It was restarted after another version had been installed."""
    fate = Fate(dies_at=9, torch=("2.9.0", "2.10.1"))
    with pytest.raises(FlexmarlError, match=r"one version of torch: slot-0 has .*, slot-1 has .*Install one"):
        run(tmp_path, SharedPoolConfig(slots=2), fate)


@pytest.mark.parametrize("before", [True, False], ids=["before it acts", "before its answer"])
@pytest.mark.parametrize(("slots", "most"), [(1, 3), (2, 1)])
def test_each_sample_counts_once_whenever_a_slot_worker_dies(
    tmp_path: Path, undisturbed: dict[PolicyName, Any], slots: int, most: int, before: bool
) -> None:
    """One run for each of some calls of every name: the slot worker that gets the call dies in it."""
    config = SharedPoolConfig(slots=slots)
    calls = Fate()
    run(tmp_path / "whole", config, calls)
    for number in numbers_of(calls.calls, most, before=before):
        fate = Fate(dies_at=number, before=before)
        found = run(tmp_path / str(number), config, fate)
        assert found == undisturbed, f"it died in call {number}, {fate.calls[number - 1]}"
        assert len(fate.killed) == 1


def test_a_fetch_from_a_host_that_is_cut_off_ends_before_the_policy_is_bound_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[PolicyName, Any]
) -> None:
    """It gets neither bytes nor an error; and it would write where the next state is set."""
    ends: list[str] = []
    take = RankMemory.take

    async def main() -> dict[PolicyName, Any]:
        async with house(tmp_path, POLICIES, SharedPoolConfig(slots=1)) as home:

            async def hang_once(self: RankMemory, handle: StateHandle, lent: LentMemory) -> StateHandle:
                ends.append("begins")
                if len(ends) == 5:
                    home.slots[0].die()
                    try:
                        await asyncio.Event().wait()
                    finally:
                        await asyncio.sleep(30.0)
                        ends.append("stopped")
                return await take(self, handle, lent)

            monkeypatch.setattr(RankMemory, "take", hang_once)
            async with asyncio.timeout(10_000):
                return await trained(home)

    assert virtual_time.run(main()) == undisturbed
    assert ends.index("stopped") <= 6, "only the other part of the same state is fetched beside it"
    assert ends.count("stopped") == 1


@pytest.mark.parametrize("dies", [False, True], ids=["whole", "lost"])
def test_weights_are_published_and_the_next_step_begins_while_the_state_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """If the slot is lost meanwhile, the step and the micro-batch behind it are computed again."""
    take = RankMemory.take
    hold = True

    async def learned(home: House) -> tuple[list[float], dict[str, Any]]:
        copied = asyncio.Event()

        async def take_late(self: RankMemory, handle: StateHandle, lent: LentMemory) -> StateHandle:
            if hold and handle.version == 1 and handle.key.endswith("/rest"):
                await copied.wait()
            return await take(self, handle, lent)

        monkeypatch.setattr(RankMemory, "take", take_late)
        await home.trainer.publish(SOLVER)
        await home.put(SOLVER, 1, 3)
        await home.put(SOLVER, 2, 3)
        await home.trainer.train(SOLVER, Version(0), 3)
        stepped = await home.trainer.optimizer_step(SOLVER, Step(1))
        assert stepped.published.version == 1
        await home.trainer.train(SOLVER, Version(1), 2)
        rows = (await home.store.table_statistics())[SOLVER]
        saving = asyncio.create_task(home.trainer.save(SOLVER, str(home.folder / "early")))
        await asyncio.sleep(100.0)
        assert saving.done() != hold
        if hold:
            assert (rows.leased, rows.consumed) == (5, 0), "they are committed when the state is whole"
            waits = [(wait.text, wait.actor) for wait in home.actor.waits()]
            assert waits == [("the copy of the state of solver to the host's memory", "slot-0")], (
                "a checkpoint has the samples too, and the store is not asked to commit them before"
            )
        if dies and hold:
            home.slots[0].die()
            await asyncio.sleep(10.0)
        copied.set()
        await saving
        await home.trainer.train(SOLVER, Version(1), 1)
        second = await home.trainer.optimizer_step(SOLVER, Step(2))
        saved = await home.saved(SOLVER)
        rows = (await home.store.table_statistics())[SOLVER]
        assert (rows.leased, rows.consumed) == (0, 6)
        return [one.stats.figures["loss"] for one in (stepped, second)], saved

    async def main(config: SharedPoolConfig | None) -> tuple[list[float], dict[str, Any]]:
        async with house(tmp_path / str(config is None), {SOLVER: POLICIES[SOLVER]}, config) as home:
            async with asyncio.timeout(10_000):
                return await learned(home)

    shared = virtual_time.run(main(SharedPoolConfig(slots=1)))
    hold = False
    assert shared == virtual_time.run(main(None))


def test_a_policy_that_waits_for_its_turn_names_the_one_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, copied = RankMemory.take, asyncio.Event()

    async def take_late(self: RankMemory, handle: StateHandle, lent: LentMemory) -> StateHandle:
        if handle.version == 1 and handle.key.endswith("/rest"):
            await copied.wait()
        return await take(self, handle, lent)

    async def main() -> set[str]:
        async with asyncio.timeout(10_000), house(tmp_path, POLICIES, SharedPoolConfig(slots=2)) as home:
            monkeypatch.setattr(RankMemory, "take", take_late)
            for policy in (SOLVER, JUDGE):
                await home.trainer.publish(policy)
                await home.put(policy, 1, 1)
            for policy in (SOLVER, JUDGE):
                await home.trainer.train(policy, Version(0), 1)
                await home.trainer.optimizer_step(policy, Step(1))
            await asyncio.sleep(10.0)
            waits = {wait.text for wait in home.actor.waits()}
            copied.set()
            for policy in (SOLVER, JUDGE):
                await home.saved(policy)
            return waits

    assert virtual_time.run(main()) == {
        "the copy of the state of solver to the host's memory",
        "memory of the host for a newer state of judge, behind solver",
    }


def test_a_fetch_that_does_not_stop_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = RankMemory.take
    stopped, released = asyncio.Event(), asyncio.Event()
    waits: list[str] = []

    async def main() -> None:
        async with house(tmp_path, POLICIES, SharedPoolConfig(slots=1)) as home:

            async def hang(self: RankMemory, handle: StateHandle, lent: LentMemory) -> StateHandle:
                if handle.version == 0:
                    return await take(self, handle, lent)
                home.slots[0].die()
                try:
                    await asyncio.Event().wait()
                finally:
                    stopped.set()
                    await released.wait()
                raise AssertionError("it is cancelled")

            async def note_waits() -> None:
                await stopped.wait()
                while not waits:
                    await asyncio.sleep(1.0)
                    waits.extend(wait.text for wait in home.actor.waits() if "fetch" in wait.text)

            monkeypatch.setattr(RankMemory, "take", hang)
            await home.put(SOLVER, 1, 3)
            noting = asyncio.create_task(note_waits())
            try:
                async with asyncio.timeout(10_000):
                    await home.trainer.publish(SOLVER)
                    with pytest.raises(
                        FlexmarlError, match="fetch of a state of policy solver.* after 120 s.*Resume"
                    ):
                        await home.step(SOLVER, 1, [2, 1])
                        await home.trainer.save(SOLVER, str(tmp_path / "saved"))
            finally:
                released.set()
                await noting

    virtual_time.run(main())
    assert waits == ["the end of a fetch of solver from a slot that was lost"]


def test_gangs_that_take_turns_learn_the_same(tmp_path: Path, undisturbed: dict[PolicyName, Any]) -> None:
    fate = Fate()
    assert run(tmp_path, SharedPoolConfig(slots=3), fate, policies=GANGS) == undisturbed
    assert fate.calls.count("suspend") > 3


def test_the_state_of_replicas_is_in_the_hosts_memory_once_and_on_all_slots(
    tmp_path: Path, undisturbed: dict[PolicyName, Any]
) -> None:
    events: list[dict[str, Any]] = []
    policies = {
        **REPLICAS,
        SOLVER: simulated_policy("solver", ranks=4, replicas=2, token_s=1.0, optimizer_s=3.0),
    }
    fate = Fate()
    assert run(tmp_path, SharedPoolConfig(slots=4), fate, events, policies) == undisturbed
    assert "reshard" not in fate.calls and fate.calls.count("suspend") > 3

    def moved(name: str, policy: PolicyName) -> set[int]:
        return {one["size_bytes"] for one in events if (one["event"], one["policy"]) == (name, policy)}

    # Each rank has version and digest, and a gradient of 8 bytes: see ``SimulatedPolicy``.
    assert moved("policy_suspended", SOLVER) <= {0, 2 * 8} and moved("policy_suspended", JUDGE) <= {0, 8}
    assert moved("policy_resumed", SOLVER) <= {4 * 16, 4 * 24}
    assert moved("policy_resumed", JUDGE) <= {2 * 16, 2 * 24}


def test_a_gang_with_other_numbers_of_replicas_has_its_state_as_it_lies(
    tmp_path: Path, undisturbed: dict[PolicyName, Any]
) -> None:
    events: list[dict[str, Any]] = []
    fate = Fate()
    assert run(tmp_path, SharedPoolConfig(slots=4), fate, events, REPLICAS) == undisturbed
    resumed = [event for event in events if event["event"] == "policy_resumed" and event["policy"] == SOLVER]
    places = {len(event["slots"].split(", ")) for event in resumed}
    assert {2, 4} <= places, "one replica, and two"
    assert not any("divided over 2 slots, before over 2" in event["reason"] for event in resumed)


def test_a_policy_resumed_on_fewer_slots_learns_the_same(
    tmp_path: Path, undisturbed: dict[PolicyName, Any]
) -> None:
    events: list[dict[str, Any]] = []
    fate = Fate()
    assert run(tmp_path, SharedPoolConfig(slots=3), fate, events, ELASTIC) == undisturbed
    assert "reshard" in fate.calls
    resumed = [event for event in events if event["event"] == "policy_resumed"]
    places = {len(event["slots"].split(", ")) for event in resumed if event["policy"] == SOLVER}
    assert len(places) > 1, "it had other numbers of ranks"
    assert any("its state is divided over 1 slots, before over 3" in event["reason"] for event in resumed)


def test_a_policy_on_fewer_slots_moves_to_more_between_two_micro_batches_of_a_step(tmp_path: Path) -> None:
    async def learned(home: House) -> dict[str, Any]:
        """The judge has one micro-batch, and two slots for it; the solver has six."""
        for policy, samples in ((JUDGE, 1), (SOLVER, 6)):
            await home.trainer.publish(policy)
            await home.put(policy, 1, samples)

        async def train(policy: PolicyName, micro_batches: int) -> None:
            for _ in range(micro_batches):
                await home.trainer.train(policy, Version(0), 1)

        async with asyncio.TaskGroup() as group:
            group.create_task(train(JUDGE, 1))
            group.create_task(train(SOLVER, 6))
        await home.trainer.optimizer_step(SOLVER, Step(1))
        return await home.saved(SOLVER)

    found: dict[str, Any] = {}
    events: list[dict[str, Any]] = []

    async def main() -> None:
        for name, config in (("static", None), ("shared", SharedPoolConfig(slots=3))):
            async with house(tmp_path / name, ELASTIC, config) as home:
                found[name] = await learned(home)
                events[:] = home.listener.events

    virtual_time.run(main())
    assert found["shared"] == found["static"], "each sample has counted once"
    left = [one["reason"] for one in events if one["event"] == "policy_suspended" and one["policy"] == SOLVER]
    assert any("2 more slots are without work" in reason for reason in left), left


@pytest.mark.parametrize("before", [True, False], ids=["before it acts", "before its answer"])
def test_a_policy_that_changes_its_ranks_keeps_a_whole_state_whenever_a_slot_worker_dies(
    tmp_path: Path, undisturbed: dict[PolicyName, Any], before: bool
) -> None:
    config, calls = SharedPoolConfig(slots=3), Fate()
    run(tmp_path / "whole", config, calls, policies=ELASTIC)
    moving = [number for number, name in enumerate(calls.calls, 1) if name in ("reshard", "set_rest")]
    for number in moving[:: 3 if before else 4]:
        fate = Fate(dies_at=number, before=before)
        found = run(tmp_path / str(number), config, fate, policies=ELASTIC)
        assert found == undisturbed, f"it died in call {number}, {fate.calls[number - 1]}"
        assert fate.killed


def test_a_gradient_that_changes_its_ranks_is_trained_again_if_a_slot_is_lost_while_its_old_memory_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the host has only the base part by then, and the end of the move is still to come."""
    free, lost = RankMemory.free, list[RankMemory]()
    homes: list[House] = []

    async def free_late(self: RankMemory) -> None:
        if homes and not lost and self.state is not None and self.state.step is not None:
            lost.append(self)
            for slot in homes[0].slots:
                slot.die()
            await asyncio.sleep(1.0)
        await free(self)

    async def step(home: House) -> list[Any]:
        """The judge has a slot until the solver's first samples are trained on the two others."""
        for policy, samples in ((JUDGE, 1), (SOLVER, 6)):
            await home.trainer.publish(policy)
            await home.put(policy, 1, samples)
        async with asyncio.TaskGroup() as group:
            group.create_task(home.trainer.train(JUDGE, Version(0), 1))
            for _ in range(6):
                group.create_task(home.trainer.train(SOLVER, Version(0), 1))
        stepped = await home.trainer.optimizer_step(SOLVER, Step(1))
        return [stepped.stats.samples, await home.saved(SOLVER)]

    async def main() -> list[Any]:
        learned = []
        for name, config in (("static", None), ("shared", SharedPoolConfig(slots=3))):
            async with house(tmp_path / name, ELASTIC, config) as home:
                homes[:] = [home] if config else []
                learned.append(await step(home))
        return learned

    monkeypatch.setattr(RankMemory, "free", free_late)
    undisturbed, found = virtual_time.run(main())
    assert lost and found == undisturbed, "each sample has counted once"


@pytest.mark.parametrize("config", [None, SharedPoolConfig(slots=1)], ids=["static", "shared"])
def test_an_optimizer_step_without_a_part_of_its_samples_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: SharedPoolConfig | None
) -> None:
    accumulate = SimulatedPolicy.accumulate

    def forget_before(self: SimulatedPolicy, batch: Sequence[Sample]) -> MicroBatchStats:
        self._forget_gradient()
        return accumulate(self, batch)

    async def main() -> None:
        async with house(tmp_path, POLICIES, config) as home:
            await home.trainer.publish(SOLVER)
            await home.put(SOLVER, 1, 3)
            with pytest.raises(
                RemoteError,
                match="ProtocolViolation: optimizer step 1 of solver has 1 samples, and 3 were trained for it",
            ):
                await home.step(SOLVER, 1, [2, 1])

    monkeypatch.setattr(SimulatedPolicy, "accumulate", forget_before)
    virtual_time.run(main())


def test_a_newer_rest_is_lent_memory_in_its_policys_turn_also_if_the_ranks_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[PolicyName, Any]
) -> None:
    """The host's memory is planned for the newer rest of one policy at a time."""
    turns: list[PolicyName] = []
    lent: list[tuple[list[PolicyName], str]] = []
    turn, for_rest = StateMoves._turn, RankMemory.for_rest

    @asynccontextmanager
    async def noted_turn(self: StateMoves, policy: PolicyName, gang: HostedGang) -> AsyncIterator[None]:
        async with turn(self, policy, gang):
            turns.append(policy)
            try:
                yield
            finally:
                turns.remove(policy)

    async def noted_rest(self: RankMemory, host: StateHost, side: int | None) -> LentMemory:
        lent.append(([*turns], self._key.partition("-")[0]))
        return await for_rest(self, host, side)

    monkeypatch.setattr(StateMoves, "_turn", noted_turn)
    monkeypatch.setattr(RankMemory, "for_rest", noted_rest)
    fate = Fate()
    assert run(tmp_path, SharedPoolConfig(slots=3), fate, policies=ELASTIC) == undisturbed
    assert "reshard" in fate.calls
    assert all(having == [policy] for having, policy in lent)


def test_the_state_of_the_next_gang_is_loaded_while_another_computes(tmp_path: Path) -> None:
    fate = Fate()
    policies = {policy: simulated_policy(policy, ranks=2, token_s=1.0) for policy in (SOLVER, JUDGE)}

    async def main() -> None:
        async with house(tmp_path, policies, SharedPoolConfig(slots=2), fate) as home:
            for policy in policies:
                await home.trainer.publish(policy)
                await home.put(policy, 1, 4)
            await home.trainer.train(JUDGE, Version(0), 1)
            del fate.calls[:]
            async with asyncio.TaskGroup() as group:
                computing = group.create_task(home.trainer.train(SOLVER, Version(0), 1))
                while "accumulate" not in fate.calls:
                    await asyncio.sleep(0.1)
                del fate.calls[:], fate.ends[:]
                group.create_task(home.trainer.train(JUDGE, Version(0), 1))
                while fate.ends.count("prefetch") < 2:
                    await asyncio.sleep(0.1)
                assert not computing.done()

    virtual_time.run(main())
    assert fate.calls.count("prefetch") == 2, "one for each rank"
    assert fate.ends.index("prefetch") < fate.ends.index("accumulate")


@pytest.mark.parametrize("before", [True, False], ids=["before it acts", "before its answer"])
@pytest.mark.parametrize(
    ("policies", "slots", "most"), [(GANGS, 3, 2), (REPLICAS, 4, 1)], ids=["gangs", "replicas"]
)
def test_each_sample_counts_once_whenever_a_rank_of_a_gang_dies(
    tmp_path: Path,
    undisturbed: dict[PolicyName, Any],
    policies: dict[PolicyName, PolicySetup],
    slots: int,
    most: int,
    before: bool,
) -> None:
    """Some calls of every name, at any rank; the others of its gang are dropped."""
    config, calls = SharedPoolConfig(slots=slots), Fate()
    run(tmp_path / "whole", config, calls, policies=policies)
    for number in numbers_of(calls.calls, most, before=before):
        fate = Fate(dies_at=number, before=before)
        found = run(tmp_path / str(number), config, fate, policies=policies)
        assert found == undisturbed, f"it died in call {number}, {fate.calls[number - 1]}"
        assert fate.killed, "and so do ranks that compute for longer than the pool waits for them"
