"""The needs of a run's actors: each instance has GPUs of its own, unless the config names one for all."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.hosts.placement.actor_needs import needs_of
from flexmarl.launch.hosts.placement.plan import DoesNotFit, Need
from flexmarl.launch.hosts.placement.run_placement import place_run
from flexmarl.launch.hosts.placement.training_bytes import Cards

from .hosts import GIB, host, shape

SORTER, CHECKER = PolicyName("sorter"), PolicyName("checker")
BILLION = 10**9
SHAPES = {SORTER: shape(BILLION), CHECKER: shape(BILLION // 2)}
CARDS = Cards(80 * GIB, 80 * GIB)
TWO = "agents.sorter.engine={name: vllm, tensor_parallel: 2}"


def config(*overrides: str) -> RunConfig:
    """Two agents with a policy each."""
    return resolve("sort-digits", list(overrides))


def on_cuda(*overrides: str) -> RunConfig:
    return config("agent_defaults.model.device=cuda", *overrides)


def needs(config: RunConfig, which: Callable[[Need], bool]) -> dict[str, Need]:
    return {need.actor: need for need in needs_of(config) if which(need)}


def dealt(config: RunConfig) -> dict[str, int]:
    return {actor: need.gpus for actor, need in needs(config, lambda need: need.actor[-1].isdigit()).items()}


def test_each_instance_has_a_gpu_of_its_own() -> None:
    found = dealt(on_cuda("agents.sorter.instances=2"))
    assert found == {"sorter-0": 1, "sorter-1": 1, "checker-0": 1, "rollout-0": 0}


def test_the_needs_are_named_as_the_actors_are() -> None:
    pool = "pool={name: shared, slots: 2}"
    names = [need.actor for need in needs_of(config(pool, "rollout.workers=2", "agents.sorter.instances=2"))]
    assert names == [
        "store", "router", "orchestrator", "trainer", "slot-0", "slot-1", "sorter-0", "sorter-1", "checker-0",
        "rollout-0", "rollout-1",
    ]  # fmt: skip
    on_head = [need.actor for need in needs_of(config(pool)) if need.on_head]
    assert on_head == ["store", "router", "orchestrator", "trainer", "slot-0", "slot-1", "rollout-0"]


def test_reward_services_are_placed_beside_the_workers_in_turn() -> None:
    services = ("rollout.workers=2", "rewards.services=3", "hosts.spread=true")
    found = needs(config(*services), lambda need: need.actor.startswith("rewards-"))
    assert {actor: need.beside for actor, need in found.items()} == {
        "rewards-0": "rollout-0", "rewards-1": "rollout-1", "rewards-2": "rollout-0",
    }  # fmt: skip
    hosts = [host("head", cores=4), host("node", cores=4)]
    plan = place_run(config(*services), hosts).plan.actors
    assert plan["rollout-0"].node == plan["rewards-0"].node == plan["rewards-2"].node == "head"
    assert plan["rollout-1"].node == plan["rewards-1"].node == "node"


def test_instances_share_a_gpu_if_the_config_names_one() -> None:
    found = config("agent_defaults.model.device='cuda:1'", "agents.sorter.instances=2")
    named = needs(found, lambda need: bool(need.named))
    assert {actor: need.named for actor, need in named.items()} == dict.fromkeys(
        ["trainer", "sorter-0", "sorter-1", "checker-0"], (1,)
    )
    assert all(need.gpus == 0 and need.on_head for need in named.values())


def test_a_trainer_of_policies_with_and_without_names_computes_on_the_first_gpu_too() -> None:
    found = on_cuda("agents.checker.model.device='cuda:1'")
    assert needs(found, lambda need: need.purpose == "training")["trainer"].named == (0, 1)


def test_on_cpus_there_are_no_gpus() -> None:
    assert not needs(config(), lambda need: bool(need.gpus or need.named))


def test_vllm_has_a_gpu_for_each_part_of_a_layer_and_memory_for_its_cache() -> None:
    wide = on_cuda(TWO, "agents.sorter.instances=2")
    assert dealt(wide) == {"sorter-0": 2, "sorter-1": 2, "checker-0": 1, "rollout-0": 0}
    by_name = {need.actor: need for need in needs_of(wide, SHAPES, CARDS)}
    assert dict(by_name["sorter-0"].parts)["weights"] == BILLION  # half of it, in bfloat16
    assert dict(by_name["sorter-0"].parts)["keys and values"] == 4 * GIB
    assert dict(by_name["trainer"].parts)["weights"] == 4 * BILLION
    assert dict(by_name["trainer"].parts)["state of checker"] == 8 * BILLION
    memory = {actor: need.memory_bytes for actor, need in by_name.items() if need.memory_bytes}
    assert memory == {"sorter-0": 2 * BILLION, "sorter-1": 2 * BILLION}, (
        "new weights arrive there, for processes"
    )


def test_a_slot_has_its_part_of_a_policy_s_weights_and_of_the_base_of_an_adapter() -> None:
    pool = ("pool={name: shared, slots: 2}", "agents.sorter.trainer={ranks: 2}")
    for adapter, part in (
        ((), ("weights", 2 * BILLION)),
        (("agents.sorter.lora={}",), ("frozen", BILLION)),
    ):
        only = {SORTER: SHAPES[SORTER]}
        found = {need.actor: need for need in needs_of(on_cuda(*pool, *adapter), only, CARDS)}
        assert all(part in found[name].parts for name in ("slot-0", "slot-1"))


def test_a_slot_has_the_state_that_is_loaded_beside_the_one_that_computes() -> None:
    def of_slot(*settings: str) -> Need:
        pool = ("pool={name: shared, slots: 1}", *settings)
        return next(need for need in needs_of(on_cuda(*pool), SHAPES, CARDS) if need.actor == "slot-0")

    alone, beside = of_slot("pool.states_per_slot=1"), of_slot("pool.states_per_slot=2")
    # 16 bytes for each parameter of the smaller model.
    assert dict(beside.parts)["states beside it"] == 8 * BILLION
    assert beside.gpu_bytes == alone.gpu_bytes + 8 * BILLION
    assert of_slot("pool.states_per_slot=9") == beside, "no more than there are"


def test_a_slot_keeps_the_bases_of_all_adapters() -> None:
    def of_slot(*settings: str) -> Need:
        pool = ("pool={name: shared, slots: 1, states_per_slot: 1}", *settings)
        return next(need for need in needs_of(on_cuda(*pool), SHAPES, CARDS) if need.actor == "slot-0")

    adapters = "agent_defaults.lora={rank: 2}"
    other = dict(of_slot(adapters, "agents.checker.model.config.num_hidden_layers=7").parts)
    assert other["states beside it"] == BILLION, "in bfloat16"
    assert "states beside it" not in dict(of_slot(adapters).parts), "it is the same base"
    full_beside = dict(of_slot("agents.checker.lora={rank: 2}").parts)
    assert full_beside["states beside it"] == BILLION


def test_policies_that_share_instances_need_gpus_for_these_once() -> None:
    adapters = ("agent_defaults.lora={rank: 2}", "agent_defaults.engine={name: vllm}")
    shared = on_cuda(*adapters, "agents.checker.instances=2")
    assert dealt(shared) == {"sorter-0": 1, "sorter-1": 1, "rollout-0": 0}
    own = on_cuda(*adapters, "agents.checker.engine.max_batch=8")
    assert dealt(own) == {"sorter-0": 1, "checker-0": 1, "rollout-0": 0}


def test_on_cpus_the_memory_is_the_host_s() -> None:
    by_name = {need.actor: need for need in needs_of(config(TWO), SHAPES)}
    found = {actor: need.memory_bytes for actor, need in by_name.items() if need.memory_bytes}
    assert found == {
        "trainer": 24 * BILLION,
        "sorter-0": 8 * BILLION + 4 * GIB,
        "checker-0": 2 * BILLION,
    }
    assert not any(need.gpu_bytes for need in by_name.values())


def test_an_instance_that_may_move_has_the_gpus_for_every_policy() -> None:
    assert dealt(on_cuda(TWO, "balance.scope=intra+inter"))["checker-0"] == 2


def test_slots_of_one_policy_s_ranks_are_a_gang() -> None:
    pool = ("pool={name: shared, slots: 5}", "agents.sorter.trainer.ranks=2")
    slots = needs(on_cuda(*pool), lambda need: need.actor.startswith("slot")).values()
    assert [need.gang for need in slots] == [0, 0, 1, 1, None]
    assert {need.gpus for need in slots} == {1}
    assert needs(on_cuda(*pool), lambda need: need.actor == "trainer")["trainer"].gpus == 0
    on_cpu = needs(config(*pool), lambda need: need.actor.startswith("slot")).values()
    assert {(need.gpus, need.gang) for need in on_cpu} == {(0, None)}, "cores count more than the way"


def test_workers_and_slots_are_on_the_head_unless_they_may_be_spread() -> None:
    pool = ("pool={name: shared, slots: 2}", "rollout.workers=2")
    movable = ("rollout-1", "slot-0", "slot-1")
    for spread in (False, True):
        found = {need.actor: need.on_head for need in needs_of(config(*pool, f"hosts.spread={spread}"))}
        assert [found[name] for name in movable] == [not spread] * 3
        assert all(found[name] for name in ("store", "trainer", "router", "orchestrator", "rollout-0"))


def test_more_instances_than_gpus_are_refused_with_the_numbers_and_the_key() -> None:
    three = on_cuda("agents.sorter.instances=3")
    placed = place_run(three, [host("here", 4)]).own_gpus()
    assert placed == {
        "trainer": ("GPU-here-0",),
        "sorter-0": ("GPU-here-1",),
        "sorter-1": ("GPU-here-2",),
        "sorter-2": ("GPU-here-3",),
        "checker-0": ("GPU-here-0",),
    }
    with pytest.raises(DoesNotFit) as refused:
        place_run(three, [host("here", 3)])
    (problem,) = refused.value.problems
    assert problem.startswith(
        "the instances need 4 GPUs (policies.sorter.instances=3, policies.checker.instances=1), and there are 3: "
        "3 on here; take fewer instances, or model.device=cuda:0"
    )


def test_named_gpus_are_chosen_by_the_actors_themselves() -> None:
    named = config("agent_defaults.model.device='cuda:0'", "agents.sorter.instances=8")
    placed = place_run(named, [host("here", 1)])
    assert placed.own_gpus() == {} and placed.plan.actors["sorter-7"].gpus == (0,)


def test_gpus_of_others_are_taken_if_the_config_says_so() -> None:
    used = [host("here", 1, used=(0,))]
    one = ("agents.checker.model.device=cpu",)
    with pytest.raises(DoesNotFit, match="process 4711 python of ada"):
        place_run(on_cuda(*one), used)
    shared = place_run(on_cuda(*one, "hosts.share_gpus=true"), used)
    assert shared.own_gpus()["sorter-0"] == ("GPU-here-0",)


def test_chunks_of_logits_are_as_the_trainer_measures_them_on_a_card_that_others_use() -> None:
    alone, beside = (needs_of(on_cuda(), SHAPES, cards) for cards in (CARDS, Cards(50 * GIB, 80 * GIB)))
    assert [need.parts for need in alone] == [need.parts for need in beside]


def test_without_a_compiler_on_one_host_layers_keep_more_and_the_plan_says_so() -> None:
    sizes = ("agent_defaults.model.config.num_hidden_layers=4", "agent_defaults.trainer.compilation=true")
    complete = host("here", 3)
    placed = [
        place_run(on_cuda(*sizes), [one]) for one in (complete, replace(complete, compiler_note="no gcc"))
    ]
    compiled, plain = (dict(placement.plan.actors["trainer"].need.parts) for placement in placed)
    assert compiled["activations"] < plain["activations"] and compiled["logits"] < plain["logits"]
    note = "here compiles no layers, which takes more time and memory: no gcc"
    assert [note in placement.plan.notes for placement in placed] == [False, True]


def test_hosts_have_names_of_their_own_and_equal_versions() -> None:
    with pytest.raises(DoesNotFit, match="2 hosts have the name a: each needs one of its own"):
        place_run(config(), [host("a"), host("a")])
    older = host("b", python="3.10.1")
    with pytest.raises(DoesNotFit, match="Python must have one version on all hosts: 3.11 on a, 3.10 on b"):
        place_run(config(), [host("a"), older])
