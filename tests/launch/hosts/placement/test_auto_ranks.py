"""Ranks and slots that are left to the plan: the fewest with which a policy fits, from the sizes of its model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis.strategies import booleans, integers

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.pool.pool_config import SharedPoolConfig
from flexmarl.actors.trainer.pool.slot_choice import AllocatorConfig
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.hosts.host_description import HostDescription
from flexmarl.launch.hosts.placement import auto_ranks
from flexmarl.launch.hosts.placement.auto_ranks import (
    is_left_to_the_plan,
    with_chosen_ranks,
    with_least_ranks,
)
from flexmarl.launch.hosts.placement.plan import DoesNotFit
from flexmarl.launch.hosts.placement.run_placement import place_run, place_shapes
from flexmarl.launch.hosts.placement.slot_states import USED_SHARE, with_states

from .hosts import GIB, host, shape

SORTER, CHECKER = PolicyName("sorter"), PolicyName("checker")
BILLION = 10**9
AUTO_POOL = "pool={name: shared, slots: auto}"
ON_GPUS = ("agent_defaults.model.device=cuda", AUTO_POOL, "agent_defaults.trainer.ranks=auto")


@pytest.fixture(autouse=True)
def large_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 and 4 billion parameters: 128 and 64 GB of state."""
    shapes = {SORTER: shape(8 * BILLION), CHECKER: shape(4 * BILLION)}
    monkeypatch.setattr(auto_ranks, "known_shapes", lambda config, all_models: shapes)


def chosen(hosts: Sequence[HostDescription], *settings: str) -> tuple[int, int, int]:
    """Ranks of the two policies, and slots."""
    return numbers(with_chosen_ranks(resolve("sort-digits", list(settings)), lambda: hosts))


def numbers(config: RunConfig) -> tuple[int, int, int]:
    assert isinstance(config.pool, SharedPoolConfig)
    ranks = [config.policies[name].trainer.most_ranks for name in (SORTER, CHECKER)]
    return ranks[0], ranks[1], config.pool.slot_count


def test_a_policy_gets_the_fewest_ranks_that_fit_and_the_pool_slots_for_the_largest() -> None:
    assert chosen([host("a", 8)], *ON_GPUS) == (2, 1, 2)
    assert chosen([host("a", 8, gpu_bytes=40 * GIB)], *ON_GPUS) == (5, 3, 5)


def test_each_replica_gets_the_fewest_ranks_that_fit() -> None:
    """16 bytes a parameter, 128 GB in each replica, as in a policy without others: see ``rank_bytes``."""
    more = "agents.sorter.trainer.replicas=2"
    assert chosen([host("a", 8)], *ON_GPUS, more) == (4, 1, 4)
    assert chosen([host("a", 8)], *ON_GPUS, more, "agents.sorter.trainer.min_ranks=5") == (6, 1, 6)
    small = host("a", 10, gpu_bytes=40 * GIB)
    assert chosen([small], *ON_GPUS, more) == (10, 3, 10)


def test_a_number_that_is_written_stays() -> None:
    assert chosen([host("a", 8)], *ON_GPUS, "agents.checker.trainer.ranks=3") == (2, 3, 3)
    assert chosen([host("a", 8)], *ON_GPUS, "pool.slots=3") == (2, 1, 3)
    assert chosen([host("a", 8)], *ON_GPUS, "agents.checker.trainer.min_ranks=2") == (2, 2, 2)


def test_on_cpus_a_policy_has_one_rank_and_no_host_is_read() -> None:
    config = resolve("sort-digits", ["agent_defaults.trainer.ranks=auto", AUTO_POOL])
    assert numbers(with_chosen_ranks(config, lambda: pytest.fail("a host is read"))) == (1, 1, 1)
    assert numbers(with_least_ranks(config)) == (1, 1, 1)


def test_without_anything_to_choose_the_config_is_the_same() -> None:
    config = resolve("sort-digits", [])
    assert with_chosen_ranks(config, lambda: pytest.fail("a host is read")) is config


def test_ranks_that_share_their_gpus_with_instances_are_more() -> None:
    """On three GPUs an instance is beside a slot: its weights, keys and values take 22 of 80 GiB."""
    vllm = "agent_defaults.engine.name=vllm"

    def ranks(gpus: int, *settings: str) -> int:
        return chosen([host("a", gpus, shared_memory=999 * GIB)], *ON_GPUS, vllm, *settings)[0]

    assert [ranks(gpus) for gpus in (8, 3)] == [2, 3]
    assert ranks(8, "pool.states_per_slot=2") == 4, "the other policy's state is loaded beside it"


def test_ranks_on_several_hosts_need_leave() -> None:
    hosts = [host("a", 2, gpu_bytes=40 * GIB), host("b", 4, gpu_bytes=40 * GIB)]
    assert chosen(hosts, *ON_GPUS, "agents.checker.train=false")[0] == 2, "the placement refuses it"
    leave = ("hosts.spread=true", "network.bulk=trusted", "agent_defaults.engine.max_context=128")
    assert chosen(hosts, *ON_GPUS, *leave) == (5, 3, 5)


def test_what_never_fits_is_refused_by_the_placement_with_the_numbers() -> None:
    hosts = [host("a", 2, gpu_bytes=24 * GIB)]
    config = with_chosen_ranks(resolve("sort-digits", list(ON_GPUS)), lambda: hosts)
    assert numbers(config) == (2, 2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "flexmarl.launch.hosts.placement.run_placement.known_shapes",
            lambda config, all_models: {SORTER: shape(8 * BILLION)},
        )
        with pytest.raises(DoesNotFit, match=r"pool.slots=2: \d+\.\d GiB are needed on each GPU \(weights"):
            place_run(config, hosts)


def test_the_fewest_ranks_of_a_policy_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 billion parameters: 2 ranks of 80 GiB are enough, and one is not."""
    monkeypatch.setattr(
        "flexmarl.launch.hosts.placement.run_placement.known_shapes",
        lambda config, all_models: {SORTER: shape(8 * BILLION)},
    )
    settings = ["agent_defaults.model.device=cuda", "pool={name: shared, slots: 4}", "pool.host_memory_gib=1"]

    def place(fewest: int) -> None:
        ranks = f"agents.sorter.trainer={{ranks: 4, min_ranks: {fewest}}}"
        place_run(resolve("sort-digits", [*settings, ranks]), [host("a", 8, shared_memory=99 * GIB)])

    place(2)
    with pytest.raises(DoesNotFit, match=r"pool.slots=4: 1\d\d\.\d GiB "):
        place(1)


def test_a_model_of_unknown_size_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_ranks, "known_shapes", lambda config, all_models: {})
    hub = "agents.sorter.model={path: some/model, device: cuda, config: null}"
    command = "`hf download some/model config.json` puts it there, or write it by hand as model.config"
    with pytest.raises(
        ConfigError, match="policies.sorter.trainer.ranks=auto: policies.sorter.model.path"
    ) as no:
        chosen([host("a", 8)], *ON_GPUS, hub)
    assert command in str(no.value) and "or write a number of ranks" in str(no.value)


def test_a_run_keeps_the_numbers_with_which_it_has_begun() -> None:
    assert is_left_to_the_plan("policies.sorter.trainer.ranks", "auto")
    assert is_left_to_the_plan("pool.slots", "auto")
    assert is_left_to_the_plan("pool.states_per_slot", "auto")
    assert not is_left_to_the_plan("pool.states_per_slot", 1)
    assert not is_left_to_the_plan("weights.path", "auto") and not is_left_to_the_plan("pool.slots", 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([AUTO_POOL, "agent_defaults.trainer.ranks=many"], "trainer.ranks='many': a number is wanted, or auto"),
        ([AUTO_POOL, "agent_defaults.trainer.ranks=0"], "trainer.ranks=0: Input should be greater than or equal to 1"),
        (["pool={name: shared, slots: Auto}"], "pool.slots='Auto': a number is wanted, or auto"),
        (
            ["agent_defaults.trainer={name: simulated, ranks: auto}", "agent_defaults.engine.name=simulated"],
            "ranks=auto: a simulated trainer has no memory to plan: write a number",
        ),
    ],
)  # fmt: skip
def test_other_words_are_refused(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("sort-digits", settings)
    assert message in str(refused.value)


FIXED = (
    "agent_defaults.model.device=cuda",
    "pool={name: shared, slots: 2}",
    "agent_defaults.trainer.ranks=2",
)
"""Two ranks of 8 and 4 billion parameters: 60 GiB and 30 GiB of state on each GPU, and what comes on top."""


def states(gpu_bytes: int, *settings: str, gpus: int = 8) -> int:
    """The states of a slot."""
    here = host("a", gpus, gpu_bytes=gpu_bytes, shared_memory=999 * GIB)
    config = with_chosen_ranks(resolve("sort-digits", [*FIXED, *settings]), lambda: [here])
    assert isinstance(config.pool, SharedPoolConfig) and isinstance(config.pool.states_per_slot, int)
    return config.pool.states_per_slot


def test_a_slot_has_two_states_where_they_fit_and_else_one() -> None:
    assert [states(size * GIB) for size in (40, 80, 100, 140)] == [1, 1, 1, 2]
    assert [states(size * GIB, "pool.states_per_slot=2") for size in (40, 80)] == [2, 2], "a number is obeyed"
    assert states(140 * GIB, "pool.states_per_slot=1") == 1
    assert states(40 * GIB, "agents.checker.train=false") == 2, "there is no second state"


def test_a_second_state_leaves_instances_that_share_the_gpu_their_room() -> None:
    """A slot with two states takes 101 GiB, and an instance 14 or more: four actors share three GPUs."""
    vllm = "agent_defaults.engine.name=vllm"
    assert [states(115 * GIB, vllm, gpus=gpus) for gpus in (4, 3)] == [2, 1]


def test_no_policy_gets_more_ranks_for_a_second_state() -> None:
    def both(gpu_bytes: int, *settings: str) -> tuple[tuple[int, int, int], int]:
        here = host("a", 8, gpu_bytes=gpu_bytes, shared_memory=999 * GIB)
        config = with_chosen_ranks(resolve("sort-digits", [*ON_GPUS, *settings]), lambda: [here])
        assert isinstance(config.pool, SharedPoolConfig)
        return numbers(config), config.pool.state_count

    assert both(80 * GIB) == ((2, 1, 2), 1)
    assert both(170 * GIB) == ((1, 1, 1), 1)
    assert both(240 * GIB) == ((1, 1, 1), 2)
    assert both(80 * GIB, "pool.states_per_slot=2")[0][0] > 2, "a number is obeyed, and needs its ranks"


@settings_of_hypothesis(max_examples=25, deadline=None)
@given(
    gpu_gib=integers(20, 300),
    gpus=integers(1, 6),
    billions=integers(1, 12),
    vllm=booleans(),
    ranks=integers(1, 4),
)
def test_the_chosen_states_are_the_most_that_have_a_plan(
    gpu_gib: int, gpus: int, billions: int, vllm: bool, ranks: int
) -> None:
    here = [host("a", gpus, gpu_bytes=gpu_gib * GIB, shared_memory=999 * GIB)]
    shapes = {SORTER: shape(billions * BILLION), CHECKER: shape(3 * BILLION)}
    settings = [FIXED[0], f"pool={{name: shared, slots: {ranks}}}", f"agent_defaults.trainer.ranks={ranks}"]
    settings += ["agent_defaults.engine.name=vllm"] * vllm
    config = resolve("sort-digits", settings)
    chosen_config = with_chosen_ranks(config, lambda: here, shapes)
    assert isinstance(chosen_config.pool, SharedPoolConfig)

    def fits(count: int) -> bool:
        try:
            place_shapes(with_states(config, count), here, shapes)
        except DoesNotFit:
            return False
        return True

    if chosen_config.pool.states_per_slot == 2:
        assert fits(2)
    elif fits(2):
        plan = place_shapes(with_states(config, 2), here, shapes).plan
        assert max(placed.need.gpu_bytes for placed in plan.actors.values()) > USED_SHARE * gpu_gib * GIB
    assert chosen_config == with_chosen_ranks(chosen_config, lambda: here, shapes), (
        "a resumed run has the same"
    )


def test_states_are_two_where_nothing_is_planned_and_no_host_is_read() -> None:
    config = with_chosen_ranks(
        resolve("sort-digits", ["pool={name: shared, slots: 1}"]), lambda: pytest.fail("a host is read")
    )
    assert isinstance(config.pool, SharedPoolConfig) and config.pool.states_per_slot == 2
    assert AllocatorConfig().state_count == 2 and AllocatorConfig(states_per_slot=1).state_count == 1


def test_a_number_that_leaves_an_instance_on_the_same_gpu_no_room_is_refused_with_the_setting() -> None:
    here = [host("a", 3, gpu_bytes=115 * GIB, shared_memory=999 * GIB)]
    shapes = {SORTER: shape(8 * BILLION), CHECKER: shape(4 * BILLION)}
    config = resolve("sort-digits", [*FIXED, "agent_defaults.engine.name=vllm"])
    place_shapes(with_states(config, 1), here, shapes)
    with pytest.raises(DoesNotFit, match=r"no way was found .*, pool.states_per_slot=1 \(auto takes it if"):
        place_shapes(with_states(config, 2), here, shapes)
