"""The sampling of one turn: the agent's, with the arguments of the turn in place of it, each checked by name."""

import math
from dataclasses import replace
from typing import Any

import pytest

from flexmarl.actors.messages import Truncation
from flexmarl.actors.rollout.rollout_config import SamplingConfig, TurnSampling
from flexmarl.actors.rollout.turn_options import (
    NO_OPTIONS,
    TurnOptions,
    turn_options,
    turn_sampling,
)

CONFIG = SamplingConfig(temperature=0.8, top_p=0.9, stop=("###",), max_new_tokens=32)


def sampling(evaluated_at: float | None = None, is_evaluation: bool = False, **options: Any) -> TurnSampling:
    chosen = TurnOptions(**options) if options else NO_OPTIONS
    return turn_sampling(CONFIG, chosen, evaluated_at, is_evaluation)


def test_without_arguments_it_is_the_agent_s() -> None:
    assert sampling() == TurnSampling(0.8, 32, Truncation(top_p=0.9), ("###",))
    assert turn_sampling(SamplingConfig(), NO_OPTIONS, None, False).truncation is None


def test_an_unknown_argument_names_the_others_and_the_one_that_was_meant() -> None:
    with pytest.raises(
        ValueError, match=r"no argument 'max_tokens'; it has: tools, .*; do you mean max_new_tokens\?"
    ):
        turn_options({"max_tokens": 5})
    with pytest.raises(ValueError, match=r"'n'; it has: tools, stop, .*, retokenize, on_text$"):
        turn_options({"n": 5})
    assert turn_options({"seed": 5}) == TurnOptions(seed=5)


def test_a_stop_string_may_be_one_in_the_config_too() -> None:
    assert SamplingConfig(stop="###") == SamplingConfig(stop=("###",))


def test_each_argument_replaces_the_agent_s() -> None:
    whole = sampling()
    assert sampling(temperature=1) == replace(whole, temperature=1)
    assert sampling(max_new_tokens=5) == replace(whole, max_new_tokens=5)
    assert sampling(top_p=1) == replace(whole, truncation=None)
    assert sampling(top_k=3, min_p=0.1) == replace(whole, truncation=Truncation(3, 0.9, 0.1))
    assert sampling(stop="a") == replace(whole, stop=("a",))
    assert sampling(stop=["a", "b"]) == replace(whole, stop=("a", "b"))
    assert sampling(stop=()) == replace(whole, stop=())
    assert sampling(seed=-7) == replace(whole, seed=-7)


def test_the_temperature_of_an_evaluation_precedes_all_others() -> None:
    assert sampling(0.0, True, temperature=0.5).temperature == 0.0
    assert sampling(None, True, temperature=0.0).temperature == 0.0
    assert sampling(None, True).temperature == 0.8


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"temperature": -0.5}, "temperature is -0.5, needs at least 0"),
        ({"temperature": math.nan}, "temperature is nan, needs a finite number"),
        ({"temperature": "1"}, "temperature is '1', needs a finite number"),
        ({"temperature": 0.0}, "temperature is 0 in a training step"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, needs an integer of at least 1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0, needs an integer of at least 1"),
        ({"max_new_tokens": 33}, "max_new_tokens is 33, more than the agent's sampling.max_new_tokens of 32"),
        ({"top_k": -1}, "top_k is -1, needs an integer of at least 0"),
        ({"top_k": True}, "top_k is True, needs an integer of at least 0"),
        ({"top_p": 0.0}, "top_p is 0.0, needs more than 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01, needs"),
        ({"min_p": 1.0}, "min_p is 1.0, needs at least 0 and less than 1"),
        ({"stop": ""}, "stop has '', needs strings that are not empty"),
        ({"stop": ["a", 3]}, "stop has 3, needs strings"),
        ({"seed": 2**64}, "seed is 18446744073709551616, needs an integer of 64 bits"),
        ({"seed": 1.0}, "seed is 1.0, needs an integer"),
    ],
)
def test_an_invalid_argument_is_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("(", r"\(")):
        sampling(**options)


@pytest.mark.parametrize(
    "values", [{"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 1.0}, {"top_k": -1}, {"stop": [""]}]
)
def test_an_invalid_value_in_the_config_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        SamplingConfig(**values)
