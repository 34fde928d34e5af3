"""A plan as a table, within the comments of YAML."""

from dataclasses import replace

from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.hosts.placement.plan_table import plan_as_comment
from flexmarl.launch.hosts.placement.run_placement import like_this_host, place_run

from .hosts import GIB, host


def test_each_actor_has_a_row_with_its_gpus_and_memory() -> None:
    config = resolve(
        "sort-digits",
        [
            "agents.sorter.engine={name: vllm, tensor_parallel: 2}",
            "agents.checker.model.device=cpu",
            "agents.sorter.model.device=cuda",
        ],
    )
    text = plan_as_comment(place_run(config, [host("first", 2), host("second", 1, note="one is hidden")]))
    assert all(line.startswith("#") for line in text.splitlines())
    rows = [line.removeprefix("# ").split() for line in text.splitlines() if line != "#"]
    assert rows[0] == ["actor", "node", "GPUs", "cores", "host", "memory", "on", "each", "GPU"]
    by_actor = {row[0]: row[1:] for row in rows[1:]}
    assert by_actor["store"] == ["first", "1", "?"]
    assert by_actor["sorter-0"] == ["first", "0-1", "1", "0.0", "GiB", "7.0", "GiB"]
    assert by_actor["trainer"][:3] == ["first", "0", "1"]
    assert max(map(len, text.splitlines())) <= 100
    assert "# sorter, on each GPU: 7.0 of 80.0 GiB: weights 0.0, keys and values 4.0, " in text
    assert "# second: 16 cores, 128.0 GiB of memory, 1 GPUs (one is hidden), 1 x H100\n" in text
    assert "# training and generation share GPU 0 of first: there are too few for each alone\n" in text


def test_a_memory_of_the_host_that_is_known() -> None:
    config = resolve("sort-digits", ["agents.sorter.engine.name=vllm"])
    text = plan_as_comment(place_run(config, [host("first")]))
    (row,) = (line for line in text.splitlines() if line.startswith("# sorter-0"))
    assert row.split()[2:] == ["first", "1", "4.0", "GiB"]


def test_a_plan_for_hosts_that_are_not_there_yet() -> None:
    hosts = like_this_host(2)
    assert [made_up.name for made_up in hosts[1:]] == ["node-1", "node-2"]
    config = resolve("sort-digits", ["agents.sorter.instances=64"])
    assert {placed.node for placed in place_run(config, hosts).plan.actors.values()} == {
        made_up.name for made_up in hosts
    }


def test_memory_for_states_is_named_by_its_folder() -> None:
    """``FLEXMARL_RUNTIME_BASE`` chooses it."""
    sizes = ["agent_defaults.model.device=cuda", "pool={name: shared, slots: 1}"]
    here = replace(host("here", 3), shared_memory="/mnt/states", shared_memory_bytes=9 * GIB)
    text = plan_as_comment(place_run(resolve("sort-digits", sizes), [here]))
    assert "# in /mnt/states of here: " in text and "/dev/shm" not in text


def test_equal_actors_on_one_host_have_one_row() -> None:
    pool = (
        "agents.sorter.model.device=cuda",
        "pool={name: shared, slots: 4}",
        "agents.sorter.trainer.ranks=4",
    )
    shared = ("pool.host_memory_gib=1", "rollout.workers=2", "agents.sorter.instances=2")
    config = resolve("sort-digits", ["agents.checker.model.device=cpu", *pool, *shared])
    text = plan_as_comment(place_run(config, [host("first", 6, used=(1,)), host("second", 2)]))
    rows = {line.removeprefix("# ").partition("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["slot-0 to slot-3"][4:8] == ["first", "0,", "2-4", "1"]
    assert "rollout-0 to rollout-1" in rows and "store" in rows
    assert rows["sorter-0 to sorter-1"][4:7] == ["second", "0-1", "1"]
