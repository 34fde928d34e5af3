"""``scripts/bench/run slots overlong``: its figures by hand, and arms that shorten answers as they are to."""

import math

import pytest
import torch

from scripts.bench import slot_overlong
from scripts.bench.slot_overlong import ARMS, Options, learn, measure, show

from ...bench_tables import drawn

BRIEF = Options(rounds=1, steps=4)


def test_every_arm_plays_and_a_result_depends_on_the_seed_alone() -> None:
    result = measure(BRIEF, lambda part: None)
    for arm in ARMS:
        assert result[f"{arm}_answers"] == 4 * 8 * 8
        assert 1 < result[f"{arm}_length"] < 16
    assert len({result[f"{arm}_success"] for arm in ARMS}) == 3
    assert "at the target" in drawn(show, result)
    assert measure(BRIEF, lambda part: None) == result


def test_the_figures_of_a_policy_that_draws_all_tokens_alike() -> None:
    """A token of 21 ends an answer, and another one is hidden. An answer is right if the hidden one comes before an
    end, and cut off if none of 16 tokens ends it."""
    right, length, truncated = slot_overlong._Learner("plain", BRIEF, 0).figures()
    stays = 20 / 21
    assert truncated == pytest.approx(stays**16)
    assert length == pytest.approx(math.fsum(stays**place for place in range(16)))
    assert right == pytest.approx(math.fsum((19 / 21) ** place / 21 for place in range(16)))


def test_an_answer_ends_with_its_first_end() -> None:
    assert slot_overlong._cut([3, 20, 4, 20]) == [3, 20]
    assert slot_overlong._cut([3, 4]) == [3, 4]


def test_answers_that_are_cut_off_are_left_out_by_the_filter_alone() -> None:
    learners = {arm: slot_overlong._Learner(arm, BRIEF, 0) for arm in ARMS}
    groups = {arm: [learner._group() for _ in range(8)] for arm, learner in learners.items()}
    lengths = {arm: torch.cat([group.lengths for group in of_arm]) for arm, of_arm in groups.items()}
    assert len(lengths["plain"]) == len(lengths["buffer"]) == 64 > len(lengths["filter"])
    rewards = torch.cat([group.rewards for group in groups["buffer"]])
    plain = torch.cat([group.rewards for group in groups["plain"]])
    assert torch.equal((rewards < plain), lengths["plain"] > 8), (
        "the same draws, and a cost from the ninth token on"
    )


def test_the_punishment_shortens_answers_that_are_right_as_often() -> None:
    options = Options(steps=80)
    plain, buffer = learn("plain", options, 0), learn("buffer", options, 0)
    assert buffer.last_length < 0.7 * plain.last_length and buffer.last_truncated < 0.2 * plain.last_truncated
    assert buffer.success > plain.success - 0.05
