"""The sentence about the states of a slot in a plan."""

import pytest

from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.hosts.placement.auto_ranks import with_chosen_ranks
from flexmarl.launch.hosts.placement.plan import STATES
from flexmarl.launch.hosts.placement.run_placement import place_shapes
from flexmarl.launch.hosts.placement.slot_states import with_states

from .hosts import GIB, host, shape

SHAPES = {PolicyName("sorter"): shape(8 * 10**9), PolicyName("checker"): shape(4 * 10**9)}
POOL = "pool={name: shared, slots: 2}"
ON_GPUS = ("agent_defaults.model.device=cuda", POOL, "agent_defaults.trainer.ranks=2")


def notes(gpu_bytes: int, *settings: str, gpus: int = 8, known: bool = True) -> list[str]:
    here = [host("a", gpus, gpu_bytes=gpu_bytes, memory=999 * GIB, shared_memory=999 * GIB)]
    shapes = SHAPES if known else {}
    config = with_chosen_ranks(resolve("sort-digits", [*ON_GPUS, *settings]), lambda: here, shapes)
    return [note for note in place_shapes(config, here, shapes).plan.notes if note.startswith(STATES)]


@pytest.mark.parametrize(
    ("gpu_gib", "settings", "words"),
    [
        (140, (), "2: the next policy's state fits beside the present one, 100.9 of 140.0 GiB"),
        (100, (), "1: 2 states need 100.9 GiB of each GPU, and 95% of 100.0 GiB may be used"),
        (140, ("pool.states_per_slot=1",), "1: 2 states would fit, 100.9 of 140.0 GiB"),
    ],
)
def test_a_plan_says_for_how_many_states_a_slot_has_memory_and_why(
    gpu_gib: int, settings: tuple[str, ...], words: str
) -> None:
    assert notes(gpu_gib * GIB, *settings) == [f"pool.states_per_slot={words}"]


def test_an_instance_on_the_same_gpu_takes_its_part_of_the_room() -> None:
    (note,) = notes(115 * GIB, "agent_defaults.engine.name=vllm", gpus=3)
    assert note.endswith("2 states need 100.9 GiB of each GPU, and 95% of 100.5 GiB may be used")


def test_on_cpus_and_for_models_of_unknown_size_the_sentence_says_that() -> None:
    (on_cpus,) = notes(80 * GIB, "agent_defaults.model.device=cpu")
    assert (
        on_cpus == "pool.states_per_slot=2: nothing but the host's memory limits the states of slots on CPUs"
    )
    (unknown,) = notes(80 * GIB, known=False)
    assert unknown == "pool.states_per_slot=2: the sizes of the states are unknown"


def test_there_is_no_sentence_where_no_second_state_can_be() -> None:
    assert notes(140 * GIB, "agents.checker.train=false") == []
    static = ("pool={name: static}", "agent_defaults.trainer.ranks=1", "agent_defaults.model.device=cpu")
    assert notes(140 * GIB, *static) == []


def test_a_pool_without_slots_has_no_states() -> None:
    static = resolve("sort-digits", [])
    assert with_states(static, 1) is static
