"""The place of a process among those that torchrun has started."""

import re

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.torchrun.place import Place


def torchrun(rank: int, **changed: str) -> dict[str, str]:
    """The variables of one of two processes on each of two hosts."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2),
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu01",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "first",
    } | changed


def test_local_rank_0_of_the_first_host_is_the_head_that_of_another_a_node_and_the_rest_waits() -> None:
    places = [Place.of(torchrun(rank)) for rank in range(4)]
    assert [place.role for place in places] == ["head", "waits", "node", "waits"]
    assert {(place.hosts, place.locals, place.job) for place in places} == {(2, 2, "first")}
    assert places[0].master == "gpu01"


def test_the_processes_of_one_host_and_start_have_a_name_in_common() -> None:
    gatherings = [Place.of(torchrun(rank)).gathering for rank in range(4)]
    assert gatherings[0] == gatherings[1] != gatherings[2] == gatherings[3]
    assert Place.of(torchrun(0, MASTER_PORT="29501")).gathering not in gatherings


def test_a_torchrun_without_an_id_gives_the_job_no_name() -> None:
    assert Place.of(torchrun(0, TORCHELASTIC_RUN_ID="none")).job is None


@pytest.mark.parametrize("name", sorted(torchrun(0).keys() - {"TORCHELASTIC_RUN_ID"}))
def test_a_missing_variable_of_torchrun_is_named(name: str) -> None:
    given = torchrun(0)
    del given[name]
    with pytest.raises(ConfigError, match=f"^environment variable {name} is missing: start it by torchrun"):
        Place.of(given)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"RANK": "x"}, "RANK=x: must be a number"),
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4 contradict each other"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2 contradict each other"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK=2, GROUP_WORLD_SIZE=2 contradict each other"),
        ({"RANK": "1"}, "RANK=1, GROUP_RANK=0, LOCAL_RANK=0 contradict each other"),
    ],
)
def test_invalid_variables_of_torchrun_are_refused_by_name(changed: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Place.of(torchrun(0, **changed))
