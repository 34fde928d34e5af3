"""The candidates of a plan: all of them fit the devices, and each is there once."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.names import PolicyName
from flexmarl.launch.simulate.planning.candidates import Candidate, PolicyRoom, Space, candidates

A, B = PolicyName("a"), PolicyName("b")
SMALL = PolicyRoom((1, 2, 4), (1, 2, 4, 8), load_s=10.0, turns=64)
LARGE = PolicyRoom((4, 8), (8, 16), load_s=30.0, turns=64)
SPACE = Space(32, {A: SMALL, B: LARGE}, micro_batch=16, samples=64, balances=("intra", "intra+inter", "off"))


@given(devices=st.integers(1, 64), load_s=st.floats(0.0, 100.0), turns=st.integers(1, 64))
def test_they_fit_the_devices_and_have_an_instance_of_each_policy(
    devices: int, load_s: float, turns: int
) -> None:
    small = replace(SMALL, load_s=load_s, turns=turns)
    everything = list(candidates(replace(SPACE, devices=devices, policies={A: small, B: LARGE})))
    assert len(set(everything)) == len(everything)
    for candidate in everything:
        assert candidate.devices <= devices
        assert dict(candidate.instances).keys() == {A, B} and min(dict(candidate.instances).values()) >= 1
        assert dict(candidate.instances)[A] <= turns
        assert max(dict(candidate.ranks).values()) <= candidate.slots <= sum(dict(candidate.ranks).values())


def test_devices_are_divided_by_the_loads() -> None:
    equal = replace(SMALL, load_s=30.0)
    for loads, counts in (((10.0, 30.0), {A: 1, B: 3}), ((30.0, 30.0), {A: 2, B: 2})):
        rooms = {name: replace(equal, load_s=load) for name, load in zip((A, B), loads, strict=True)}
        space = Space(6, rooms, 8, 64, ("intra",))
        chosen = next(
            candidate
            for candidate in candidates(space)
            if candidate.slots == 2 and dict(candidate.tensor_parallel)[A] == 1
        )
        assert dict(chosen.instances) == counts


def test_an_instance_that_may_move_has_the_devices_of_the_widest() -> None:
    chosen = Candidate(((A, 3), (B, 1)), ((A, 1), (B, 4)), ((A, 8), (B, 8)), 8, 16, "intra")
    assert chosen.devices == 8 + 3 + 4 and replace(chosen, balance="intra+inter").devices == 8 + 16


def test_too_few_devices_have_no_candidates_and_the_least_have_some() -> None:
    assert not list(candidates(replace(SPACE, devices=12)))
    least = list(candidates(replace(SPACE, devices=13)))
    assert {candidate.devices for candidate in least} == {13}


def test_a_frozen_policy_has_instances_alone() -> None:
    rooms = {A: SMALL, B: replace(LARGE, ranks=())}
    assert all(
        dict(candidate.ranks).keys() == {A} for candidate in candidates(replace(SPACE, policies=rooms))
    )
