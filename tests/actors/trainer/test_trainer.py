"""The trainer actor with a real store and a real policy: leases, commits, publishing, saving."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexmarl.actors.columns.store_client import ExperienceReader, ExperienceWriter, segment_directories
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import LeasedBatch, ModelConfig, Sample
from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.store.store import Store
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.padding import TokenRow
from flexmarl.actors.trainer.pool.sft_rows import sft_shares
from flexmarl.actors.trainer.trainer import Trainer
from flexmarl.actors.trainer.trainer_config import OptimizerConfig, SftConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup, TrainerSetup
from flexmarl.core.actor import endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.launch.config.config_reading import RECIPES
from flexmarl.launch.hosts import env
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S
from ..stores import store_setup
from .algorithm import advantage

torch.set_num_threads(1)
ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 14,
    "tie_word_embeddings": False, "max_position_embeddings": 32,
}  # fmt: skip
RECIPE = RecipeConfig(folder=str(RECIPES / "sort_digits"), data={"digits": 5, "eval_problems": 500}, seed=0)
SORTER = PolicyName("sorter")
POLICY = PolicySetup(
    model=ModelConfig(config=ARCHITECTURE, tokenizer=str(RECIPES / "sort_digits" / "tokenizer")),
    optimizer=OptimizerConfig(lr=1e-3),
    credit={AgentName("sorter"): CreditConfig()},
    sft=SftConfig(batches=2, batch_size=8),
)


def samples(version: int, rewards: tuple[float, ...]) -> list[Sample]:
    return [
        Sample(
            f"1:v{version}_0_{n}",
            "sorter",
            1,
            version,
            f"1:v{version}",
            reward,
            advantage(reward, rewards),
            (1, 2, 10),
            (3, 4, 12),
            (-2.0, -2.5, -3.0),
        )
        for n, reward in enumerate(rewards)
    ]


def folder_of(private: Path) -> Path:
    return private / "store"


async def store_in(system: ActorSystem, private: Path, name: str) -> ActorRef[Store]:
    folder_of(private).mkdir(mode=0o700, parents=True)
    return await system.add(Store(store_setup(["sorter"], folder_of(private))), name)


@pytest.fixture
async def store(system: ActorSystem, private: Path) -> ActorRef[Store]:
    return await store_in(system, private, "store")


async def put(store: ActorRef[Store], private: Path, samples: list[Sample]) -> None:
    writer = ExperienceWriter(store, "tests", segment_directories(private, folder_of(private)))
    await writer.put(samples)
    writer.close()


@pytest.fixture
async def trainer(system: ActorSystem, store: ActorRef[Store], private: Path) -> ActorRef[Trainer]:
    return await system.add(made(store, private, None), "trainer")


def made(store: ActorRef[Store], private: Path, resume_from: Path | None) -> Trainer:
    setup = TrainerSetup({SORTER: POLICY}, RECIPE, 10, store, folder_of(private), resume_from)
    return Trainer(setup)


async def test_host_memory_for_two_versions_exists_before_the_first_is_published(
    trainer: ActorRef[Trainer], store: ActorRef[Store], private: Path, system: ActorSystem
) -> None:
    def blocks() -> set[str]:
        return {path.name for path in private.glob("*.arena")}

    reserved = blocks()
    assert len(reserved) == 2
    await trainer.api.publish(SORTER)
    for version in range(3):
        await put(store, private, samples(version, (1.0, 0.0)))
        await trainer.api.train(SORTER, version, 2)
        await trainer.api.optimizer_step(SORTER, Step(version + 1))
    assert blocks() == reserved, "no other memory was made"


async def test_rows_are_leased_trained_and_committed_with_the_step(
    trainer: ActorRef[Trainer], store: ActorRef[Store], private: Path
) -> None:
    before = await trainer.api.publish(SORTER)
    assert before.version == 0
    await put(store, private, samples(0, (1.0, 0.0, 0.5, 0.5)))
    first = await trainer.api.train(SORTER, 0, 3)
    assert (first.samples, first.tokens, first.versions, first.nonzero_advantage) == (3, 9, {0: 3}, 2)
    statistics = (await store.api.table_statistics())["sorter"]
    assert (statistics.ready, statistics.leased, statistics.consumed) == (1, 3, 0)
    await trainer.api.train(SORTER, 0, 1)
    stepped = await trainer.api.optimizer_step(SORTER, Step(1))
    assert (stepped.published.version, stepped.stats.samples, stepped.stats.tokens) == (1, 4, 12)
    assert stepped.stats.figures["grad_norm"] > 0 and stepped.stats.figures["ratio_deviation"] > 0
    statistics = (await store.api.table_statistics())["sorter"]
    assert (statistics.ready, statistics.leased, statistics.consumed) == (0, 0, 4)
    async with StateTransport(private) as transport:
        old, new = await transport.get(before.handle), await transport.get(stepped.published.handle)
    assert any(not torch.equal(old[name], new[name]) for name in old)


class LateFirstAnswer(Store):
    """A store that answers its first lease after later ones, as one may whose journal is busy."""

    leases = 0

    @endpoint
    async def lease(self, policy: PolicyName, policy_version: int, count: int) -> LeasedBatch:
        self.leases += 1
        is_first = self.leases == 1
        batch = await super().lease(policy, policy_version, count)
        for _ in range(100 if is_first else 0):
            await asyncio.sleep(0)
        return batch


def read_first_rows_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the first lease come after those of later ones, as from another host."""
    read, leases = ExperienceReader.samples, []

    async def samples(reader: ExperienceReader, leased: LeasedBatch) -> list[Sample]:
        leases.append(leased)
        for _ in range(100 if len(leases) == 1 else 0):
            await asyncio.sleep(0)
        return await read(reader, leased)

    monkeypatch.setattr(ExperienceReader, "samples", samples)


@pytest.mark.parametrize("late", ["lease", "rows"])
async def test_micro_batches_are_trained_in_the_order_of_their_leases(
    system: ActorSystem, private: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    folder_of(private).mkdir(mode=0o700, parents=True)
    kind = LateFirstAnswer if late == "lease" else Store
    if late == "rows":
        read_first_rows_last(monkeypatch)
    store = await system.add(kind(store_setup(["sorter"], folder_of(private))), "late")
    trainer = await system.add(made(store, private, None), "trainer")
    trained: list[list[str]] = []
    accumulate = TorchPolicy.accumulate

    def note(policy: TorchPolicy, batch: Sequence[Sample]) -> Any:
        trained.append([sample.sample_id for sample in batch])
        return accumulate(policy, batch)

    monkeypatch.setattr(TorchPolicy, "accumulate", note)
    await trainer.api.publish(SORTER)
    await put(store, private, samples(0, (1.0, 0.0, 0.5, 0.5)))
    await asyncio.gather(trainer.api.train(SORTER, 0, 2), trainer.api.train(SORTER, 0, 2))
    assert trained == [["1:v0_0_0", "1:v0_0_1"], ["1:v0_0_2", "1:v0_0_3"]]


async def test_more_rows_than_there_are_is_refused_and_nothing_is_lost(
    trainer: ActorRef[Trainer], store: ActorRef[Store], private: Path
) -> None:
    await trainer.api.publish(SORTER)
    await put(store, private, samples(0, (1.0, 0.0)))
    with pytest.raises(Exception, match="3 rows of version 0 were asked for, 2 are ready"):
        await trainer.api.train(SORTER, 0, 3)
    assert (await trainer.api.train(SORTER, 0, 2)).samples == 2


async def test_a_stale_sample_is_refused(
    trainer: ActorRef[Trainer], store: ActorRef[Store], private: Path
) -> None:
    await trainer.api.publish(SORTER)
    await put(store, private, samples(7, (1.0, 0.0)))
    with pytest.raises(
        Exception, match="sample 1:v7_0_0 was generated by version 7 of policy sorter"
    ) as caught:
        await trainer.api.train(SORTER, 7, 2)
    assert "StaleSample" in str(caught.value)


async def test_a_saved_policy_loads_and_goes_on_bit_for_bit(
    trainer: ActorRef[Trainer], store: ActorRef[Store], private: Path, tmp_path: Path
) -> None:
    losses = [await trainer.api.sft(SORTER, n, 1) for n in range(3)]
    assert losses[-1] < losses[0]
    await trainer.api.publish(SORTER)
    await put(store, private, samples(0, (1.0, 0.0)))
    await trainer.api.train(SORTER, 0, 2)
    await trainer.api.optimizer_step(SORTER, Step(1))
    await trainer.api.save(SORTER, str(tmp_path / "step" / "sorter"))
    assert AutoTokenizer.from_pretrained(tmp_path / "step" / "sorter")("12=").input_ids == [1, 2, 10]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "step" / "sorter").config.model_type == "qwen3"

    other = private / "other"
    other.mkdir(mode=0o700)
    async with ActorSystem("other", other) as other_system:
        other_store = await store_in(other_system, other, "other_store")
        resumed = await other_system.add(made(other_store, other, tmp_path / "step"), "resumed")
        handles = []
        for one, rows_of, place in ((trainer, store, private), (resumed, other_store, other)):
            rows = [
                Sample(f"2:q_0_{n}", "sorter", 2, 1, "2:q", r, r - 1.0, (1, 10), (3, 12), (-2.0, -2.5))
                for n, r in enumerate((0.0, 2.0))
            ]
            await put(rows_of, place, rows)
            await one.api.train(SORTER, 1, 2)
            handles.append((await one.api.optimizer_step(SORTER, Step(1))).published.handle)
        async with StateTransport(private) as transport, StateTransport(other) as other_transport:
            here, there = await transport.get(handles[0]), await other_transport.get(handles[1])
    assert all(torch.equal(here[name], there[name]) for name in here)


async def test_everything_heavy_runs_on_the_worker_thread(
    trainer: ActorRef[Trainer], store: ActorRef[Store], private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    for name in ("weights", "sft_done", "accumulate", "optimizer_step"):
        method = getattr(TorchPolicy, name)

        def noted(*args: Any, name: str = name, method: Any = method) -> Any:
            seen.append((name, threading.current_thread().name))
            return method(*args)

        monkeypatch.setattr(TorchPolicy, name, noted)
    await trainer.api.publish(SORTER)
    await put(store, private, samples(0, (1.0, 0.0)))
    await trainer.api.train(SORTER, 0, 2)
    await trainer.api.optimizer_step(SORTER, Step(1))
    assert [name for name, _ in seen] == [
        "sft_done",
        "weights",
        "accumulate",
        "optimizer_step",
        "weights",
    ]
    assert {thread for _, thread in seen} == {"trainer_0"}


async def test_large_weights_have_time_to_be_published(
    trainer: ActorRef[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []
    publish = StateTransport.set

    async def noted(self: StateTransport, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any:
        timeouts.append(timeout_s)
        return await publish(self, *args, timeout_s=timeout_s, **kwargs)

    monkeypatch.setattr(StateTransport, "set", noted)
    await trainer.api.publish(SORTER)
    await trainer.api.optimizer_step(SORTER, Step(1))
    assert len(timeouts) == 2 and min(timeouts) >= 1800


async def test_stopping_does_not_wait_for_what_computes(
    system: ActorSystem,
    store: ActorRef[Store],
    private: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def long(*_: Any) -> None:
        begun.set()
        release.wait(PATIENCE_S)
        ended.set()

    monkeypatch.setattr(TorchPolicy, "save", long)
    actor = made(store, private, None)
    trainer = await system.add(actor, "trainer")
    saving = asyncio.create_task(trainer.api.save(SORTER, str(tmp_path)))
    await asyncio.to_thread(begun.wait)
    await actor.on_stop()
    assert not ended.is_set()
    release.set()
    await saving


async def test_the_users_number_of_threads_is_left_alone(
    system: ActorSystem, store: ActorRef[Store], private: Path
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        await system.add(made(store, private, None), "trainer")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_actor_processes_compute_with_one_thread_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    program = (
        "import threading, torch; threading.Thread(target=lambda: print(torch.get_num_threads())).start()"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=env.actor_environment(), check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "1"


# --------------------------------------------------------------------------- a policy of several agents

CHECKER = AgentName("checker")
SHARED = PolicyName("shared")


@pytest.fixture
async def shared(system: ActorSystem, private: Path) -> tuple[ActorRef[Trainer], ActorRef[Store]]:
    """A trainer with one policy for the sorter and the checker, and its store."""
    folder_of(private).mkdir(mode=0o700, parents=True)
    users = {AgentName("sorter"): SHARED, CHECKER: SHARED}
    made_store = Store(store_setup(users, folder_of(private), policies=users))
    store = await system.add(made_store, "store")
    policy = POLICY.model_copy(update={"credit": dict.fromkeys(users, CreditConfig())})
    setup = TrainerSetup({SHARED: policy}, RECIPE, 10, store, folder_of(private))
    return await system.add(Trainer(setup), "trainer"), store


def of_checker(sample: Sample) -> Sample:
    number = sample.sample_id.rsplit("_", 1)[1]
    return replace(sample, sample_id=f"{sample.group}_1_{number}", agent=CHECKER, temperature=0.5)


async def test_a_policys_micro_batches_mix_the_samples_of_its_agents(
    shared: tuple[ActorRef[Trainer], ActorRef[Store]], private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, store = shared
    seen: list[Sample] = []
    accumulate = TorchPolicy.accumulate

    def noted(policy: TorchPolicy, batch: Sequence[Sample]) -> Any:
        seen.extend(batch)
        return accumulate(policy, batch)

    monkeypatch.setattr(TorchPolicy, "accumulate", noted)
    await trainer.api.publish(SHARED)
    rows = samples(0, (1.0, 0.0))
    await put(store, private, [*rows, *map(of_checker, rows)])
    trained = await trainer.api.train(SHARED, 0, 4)
    assert (trained.samples, trained.versions) == (4, {0: 4})
    assert [(sample.agent, sample.temperature) for sample in seen] == [
        ("sorter", 1.0), ("sorter", 1.0), ("checker", 0.5), ("checker", 0.5),
    ]  # fmt: skip
    stepped = await trainer.api.optimizer_step(SHARED, Step(1))
    assert (stepped.published.version, stepped.stats.samples) == (1, 4)
    consumed = {agent: table.consumed for agent, table in (await store.api.table_statistics()).items()}
    assert consumed == {"sorter": 2, "checker": 2}, "one step and one version consume the rows of both tables"


async def test_a_policys_supervised_batches_have_examples_of_all_of_its_agents(
    shared: tuple[ActorRef[Trainer], ActorRef[Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = shared
    batches: list[list[int]] = []

    def noted(policy: TorchPolicy, examples: Sequence[TokenRow]) -> float:
        batches.append([len(prompt) for prompt, _ in examples])
        return 0.0

    monkeypatch.setattr(TorchPolicy, "sft", noted)
    await trainer.api.sft(SHARED, 0, 2)
    asked, drafted = len("31542="), len("31542?12354=")
    assert batches == [[asked] * 4 + [drafted] * 4] * 2


@pytest.mark.parametrize("agents", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_shares_of_supervised_batches_are_equal_in_the_long_run(agents: int, size: int) -> None:
    names = tuple(AgentName(f"agent{n}") for n in range(agents))
    shares = [sft_shares(names, size, batch) for batch in range(3 * agents)]
    assert {sum(share.values()) for share in shares} == {size}
    assert max(max(share.values()) - min(share.get(name, 0) for name in names) for share in shares) <= 1
    assert {sum(share.get(name, 0) for share in shares) for name in names} == {3 * size}
