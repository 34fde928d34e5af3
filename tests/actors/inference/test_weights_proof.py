"""The decision about an engine's weights, and the words for wrong tensors."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.inference.weights_proof import (
    Answer,
    are_proven,
    diagnosis,
    failure,
    group_of,
    least_difference,
    other_choices,
)
from flexmarl.actors.messages import LikelyTokens

EXPECTED = LikelyTokens((5, 6), (3, 1, 4), (-0.5, -1.0, -2.0))


@pytest.mark.parametrize(
    ("token", "logprob", "difference"),
    [
        (3, -0.5, 0.0),
        (3, -0.75, 0.25),
        (3, -0.25, 0.25),
        (1, -0.75, 0.25),  # rounding decided for the second
        # Its own log-probability, but then the trainer's first one must have become much less likely.
        (4, -2.0, 1.5),
        (9, -2.0, 1.5),
        (9, -0.5, 1.5),  # the trainer gives it -2.0 at most
    ],
)
def test_a_token_is_held_against_the_trainers(token: int, logprob: float, difference: float) -> None:
    assert least_difference(EXPECTED, token, logprob) == pytest.approx(difference)


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.5), st.floats(0.01, 4.0))
def test_no_rounding_is_exaggerated(seed: int, rounding: float, spread: float) -> None:
    numbers = np.random.default_rng(seed)
    trainer = numbers.normal(0.0, spread, 40)
    engine = trainer + numbers.uniform(-rounding, rounding, 40)
    likeliest = np.argsort(-trainer)[:8]
    expected = LikelyTokens((0,), tuple(map(int, likeliest)), tuple(trainer[likeliest]))
    token = int(engine.argmax())
    assert least_difference(expected, token, float(engine[token])) <= rounding + 1e-12


def answers(*differences: float) -> list[Answer]:
    return [Answer(difference) for difference in differences]


def test_the_bound_decides() -> None:
    assert are_proven([], 0.1) and are_proven(answers(0.1, 0.0), 0.1)
    assert not are_proven(answers(0.0, 0.11), 0.1)
    assert not are_proven(answers(math.nan), 0.1) and not are_proven(answers(math.inf), 0.1)


def test_other_experts_have_a_wider_bound_unless_the_engine_has_replayed_the_trainers() -> None:
    turned = Answer(0.29, (0.0, 0.01))
    assert are_proven([turned], 0.1)
    assert not are_proven([replace(turned, difference=0.31)], 0.1)
    assert not are_proven([replace(turned, replayed=True)], 0.1)
    assert not are_proven([replace(turned, other_choices=(0.0, 0.0))], 0.1)
    assert "is 0.1 (weights.probe_bound, times 3 for other experts)" in failure(7, [turned], 0.1, "")


def test_a_router_that_chooses_many_other_experts_is_named() -> None:
    every = [
        Answer(0.0, (0.0, 0.6, 0.1), replayed=True),
        Answer(0.0),
        Answer(0.0, (0.2, 0.0, 0.1), replayed=True),
    ]
    assert not are_proven(every, 0.1) and are_proven([every[2]], 0.1)
    assert "the router of layer 1 makes other choices than the trainer's in 30%" in failure(7, every, 0.1, "")


def test_choices_are_compared_in_any_order_but_in_layers_without_experts() -> None:
    expected = np.zeros((2, 3, 2), np.uint8)
    expected[:, 0], expected[:, 2] = (3, 5), ((1, 2), (2, 7))
    chosen = expected[..., ::-1].astype(np.int16)
    assert other_choices(expected, chosen) == (0.0, 0.0, 0.0)
    chosen[:, 1] = 9
    chosen[0, 0] = 3, 4
    assert other_choices(expected, chosen) == (0.25, 0.0, 0.0)
    assert other_choices(expected, chosen[:, :2]) == ()


def test_a_tensor_is_wrong_if_it_is_not_as_published() -> None:
    published, held = {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "c": 3}
    assert diagnosis(published, held, held) == diagnosis(published, held, published) == "wrong: b"
    assert diagnosis(published, published, published) == "all of its tensors are as they were published"


def test_an_engines_own_tensor_is_wrong_if_the_second_load_has_changed_it() -> None:
    first = {"qkv": 7, "up": 8}
    assert diagnosis({"q": 1}, first, {"qkv": 7, "up": 9}) == "wrong: up"
    assert "are unknown" in diagnosis({"q": 1}, first, first)
    assert "can't be asked" in diagnosis({"q": 1}, {}, {})


@pytest.mark.parametrize(
    ("tensor", "group"),
    [
        ("model.layers.11.mlp.up_proj.weight", "layer 11"),
        ("transformer.h.3.attn.weight", "layer 3"),
        ("model.embed_tokens.weight", "the embedding"),
        ("transformer.wte.weight", "the embedding"),
        ("lm_head.weight", "the head"),
        ("embed_out.weight", "the head"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_tensor_belongs_to_a_part_of_the_model(tensor: str, group: str) -> None:
    assert group_of(tensor) == group


def test_wrong_tensors_are_named_by_group() -> None:
    names = ["model.layers.2.a.weight", "model.layers.2.b.weight", "model.norm.weight", "lm_head.weight"]
    assert diagnosis(dict.fromkeys(names, 1), dict.fromkeys(names, 2), {}) == (
        "wrong: layer 2 (model.layers.2.a.weight and 1 more), model.norm.weight, the head (lm_head.weight)"
    )


def test_the_failure_names_version_difference_bound_and_setting() -> None:
    sentence = failure(7, answers(0.5, 1.25), 0.01, "wrong: layer 2")
    for part in ("version 7", "1.25", "0.01", "(weights.probe_bound)", "wrong: layer 2"):
        assert part in sentence
