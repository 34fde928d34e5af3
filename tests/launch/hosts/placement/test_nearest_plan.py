"""The nearest settings with which a run fits: they are tried on the whole run, and so they help."""

from collections.abc import Sequence

import pytest

from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import resolve, with_overrides
from flexmarl.launch.hosts.host_description import HostDescription
from flexmarl.launch.hosts.placement import nearest_plan
from flexmarl.launch.hosts.placement.auto_ranks import with_chosen_ranks
from flexmarl.launch.hosts.placement.nearest_plan import nearest_settings, with_nearest
from flexmarl.launch.hosts.placement.plan import DoesNotFit
from flexmarl.launch.hosts.placement.run_placement import place_shapes
from flexmarl.launch.run.prepared_run import resolve_given

from .hosts import GIB, host, shape

BILLION = 10**9
SHAPES = {PolicyName("sorter"): shape(8 * BILLION), PolicyName("checker"): shape(4 * BILLION)}
SHARED = "pool={name: shared, slots: auto}"
AUTO = ("agent_defaults.model.device=cuda", SHARED, "agent_defaults.trainer.ranks=auto")
TWO = (AUTO[0], "pool={name: shared, slots: 2}", "agent_defaults.trainer.ranks=2")
ENGINES = "agent_defaults.engine={name: vllm, kv_cache_bytes: 42949672960}"
CHECKPOINTS = "policies.sorter.trainer.activation_checkpointing=true"


def cards(count: int, gib: int, name: str = "a") -> HostDescription:
    return host(name, count, gpu_bytes=gib * GIB, memory=999 * GIB, shared_memory=999 * GIB)


@pytest.mark.parametrize(
    ("settings", "hosts", "nearest"),
    [
        ([*TWO, "pool.states_per_slot=2"], [cards(8, 80)], ["pool.states_per_slot=auto"]),
        (
            [*TWO, "agent_defaults.trainer.min_ranks=1"],
            [cards(8, 80)],
            ["policies.sorter.trainer.min_ranks=2"],
        ),
        ([*TWO], [cards(8, 60)], ["pool.slots=4", "policies.sorter.trainer.ranks=4"]),
        ([*AUTO, "pool={name: static}"], [cards(8, 90)], ["pool={name: shared, slots: 2}"]),
        (
            [*AUTO, "agent_defaults.trainer.tokens_per_forward=262144"],
            [cards(4, 80)],
            [CHECKPOINTS],
        ),
        (
            [*AUTO, "agent_defaults.trainer.tokens_per_forward=1048576"],
            [cards(4, 80)],
            [CHECKPOINTS, "policies.sorter.trainer.tokens_per_forward=524288"],
        ),
        (
            [*AUTO],
            [cards(1, 80), cards(2, 80, "b")],
            ["hosts.spread=true", "network.bulk=trusted"],
        ),
        (
            [*AUTO, "agent_defaults.trainer.tokens_per_forward=65536"],
            [cards(2, 80)],
            ["policies.sorter.lora={rank: 16}"],
        ),
        ([*AUTO, ENGINES], [cards(3, 90)], ["policies.checker.engine.kv_cache_bytes=21474836480"]),
    ],
    ids=[
        "states",
        "fewest ranks",
        "more slots",
        "a pool",
        "checkpointing",
        "fewer tokens",
        "hosts",
        "an adapter",
        "instances",
    ],
)
def test_settings_that_help_are_those_of_the_whole_run(
    settings: Sequence[str], hosts: Sequence[HostDescription], nearest: Sequence[str]
) -> None:
    config = resolve("sort-digits", list(settings))
    with pytest.raises(DoesNotFit):
        place_shapes(with_chosen_ranks(config, lambda: hosts, SHAPES), hosts, SHAPES)
    changes = nearest_settings(config, hosts, SHAPES)
    assert set(nearest) <= set(changes), changes
    changed = with_overrides(config, changes, "the changed config")
    place_shapes(with_chosen_ranks(changed, lambda: hosts, SHAPES), hosts, SHAPES)


def test_settings_of_single_agents_are_named_where_they_can_be_written() -> None:
    """Not those of all agents: the search has tried no other policy's."""
    config, keys = resolve_given("sort-digits", [*AUTO, "agent_defaults.trainer.tokens_per_forward=262144"])
    hosts = [cards(4, 80)]
    refusal = with_nearest(
        DoesNotFit(["policies.sorter.trainer.tokens_per_forward=262144"]), config, hosts, SHAPES, keys
    )
    first, nearest = refusal.problems
    assert first == "agent_defaults.trainer.tokens_per_forward=262144"
    assert nearest.startswith("the run fits with agents.sorter.trainer.activation_checkpointing=true")
    written = nearest.removeprefix("the run fits with ").split(", ")
    changed, _ = resolve_given(
        "sort-digits", [*AUTO, "agent_defaults.trainer.tokens_per_forward=262144", *written]
    )
    place_shapes(with_chosen_ranks(changed, lambda: hosts, SHAPES), hosts, SHAPES)


def test_nothing_is_named_if_nothing_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("sort-digits", list(AUTO))
    assert nearest_settings(config, [cards(1, 8)], SHAPES) == []
    assert nearest_settings(config, [host("a")], SHAPES) == [], "there is no GPU"
    monkeypatch.setattr(nearest_plan, "_MOST_TRIED", 0)
    assert nearest_settings(config, [cards(1, 80), cards(3, 80, "b")], SHAPES) == [], "a search has an end"
