"""Decode plans: positions, cells, masks and random numbers of several steps, computed at once."""

import numpy as np
import pytest
import torch

from flexmarl.actors.inference.engines.embedded.decode_plan import (
    PLAN_STEPS,
    ActiveSequence,
    DecodePlan,
)
from flexmarl.actors.inference.engines.embedded.slot_cache import SlotCache
from flexmarl.actors.inference.engines.embedded.token_sampling import stream_keys, uniforms
from flexmarl.actors.inference.engines.engine import EngineRequest

CPU = torch.device("cpu")


def sequence(prompt: int, new: int, seed: int = 0, resumed: int = 0) -> ActiveSequence:
    """A sequence that has its first new token."""
    request = EngineRequest("r", tuple(range(prompt)), seed, 1.0, new, resumed)
    return ActiveSequence(request, stream_keys([seed])[0], [7], [-0.5])


def plan_of(*rows: ActiveSequence) -> tuple[DecodePlan, SlotCache]:
    cache = SlotCache(8, 64, torch.float32, CPU)
    cache.prefill(0, len(rows), 8)
    return DecodePlan(rows, cache, torch.float32, CPU), cache


def run(plan: DecodePlan, tokens: list[list[int]]) -> None:
    for row in tokens:
        plan.record(torch.tensor(row).unsqueeze(1), row, [-float(token) for token in row])


def test_a_step_writes_behind_each_sequence_and_attends_up_to_there() -> None:
    plan, cache = plan_of(sequence(3, 10), sequence(6, 10))
    row_columns = cache.capacity_tokens // 8
    for number in range(2):
        step = plan.next_step
        positions = [3 + number, 6 + number]
        assert step.positions.squeeze(1).tolist() == positions
        assert step.cells.tolist() == [positions[0], row_columns + positions[1]]
        visible = (step.mask[:, 0, 0] == 0).sum(1)
        assert visible.tolist() == [position + 1 for position in positions]
        assert step.mask.shape[-1] % 8 == 0
        run(plan, [[1, 2]])


def test_random_numbers_continue_the_stream_of_each_seed() -> None:
    rows = sequence(3, 10, seed=1), sequence(6, 10, seed=2, resumed=4)
    plan, _ = plan_of(*rows)
    for number in range(3):
        expected = uniforms(stream_keys([1, 2]), np.array([1 + number, 5 + number]))
        np.testing.assert_array_equal(plan.next_step.points.squeeze(1).numpy(), expected)
        run(plan, [[1, 2]])


@pytest.mark.parametrize(("new", "steps"), [(2, 1), (5, 4), (1000, PLAN_STEPS)])
def test_a_plan_ends_before_a_sequence_has_too_many_tokens(new: int, steps: int) -> None:
    plan, _ = plan_of(sequence(3, new), sequence(3, 1000))
    for _ in range(steps):
        assert not plan.is_over
        run(plan, [[1, 2]])
    assert plan.is_over


def test_finishing_gives_each_sequence_its_tokens() -> None:
    rows = sequence(3, 10), sequence(6, 10)
    plan, _ = plan_of(*rows)
    assert plan.inputs.tolist() == [[7], [7]]
    run(plan, [[1, 2], [3, 4]])
    assert plan.inputs.tolist() == [[3], [4]] and rows[0].tokens == [7]
    plan.finish()
    assert [row.tokens for row in rows] == [[7, 1, 3], [7, 2, 4]]
    assert rows[1].logprobs == [-0.5, -2.0, -4.0]
    assert (rows[1].position, rows[1].stream_index, rows[1].steps_left) == (8, 3, 7)


def test_finishing_a_plan_without_steps_changes_nothing() -> None:
    row = sequence(3, 10)
    plan_of(row)[0].finish()
    assert row.tokens == [7]
