"""Shares of the agents of a policy in the sums of its optimizer step."""

import numpy as np
import pytest

from flexmarl.actors.messages import Sample
from flexmarl.actors.names import AgentName
from flexmarl.actors.trainer.backends.torch_policy.forward_batches import TrainedSample
from flexmarl.actors.trainer.backends.torch_policy.step_totals import StepTotals

from .test_torch_policy_roles import FIRST, SECOND, game, make_policy

THIRD = AgentName("third")


def row(agent: str, tokens: int, *advantages: float) -> TrainedSample:
    """One advantage for all ``tokens``, or one for each."""
    sample = Sample("1:q_0_0", agent, 1, 0, "1:q", 1.0, 0.0, (1,), tuple(range(tokens)), (-1.0,) * tokens)
    each = advantages[0] if len(advantages) == 1 else np.array(advantages, np.float32)
    return TrainedSample(sample, each)


def test_shares_are_of_tokens_and_of_the_sizes_of_advantages_over_micro_batches() -> None:
    totals, second = StepTotals(), StepTotals()
    totals.note_agents([row(FIRST, 2, -1.5), row(SECOND, 3, 0.5, -1.0, 0.5)], advantages=True)
    second.note_agents([row(FIRST, 5, 0.0), row(FIRST, 6, 0.5)], advantages=True)
    totals.add(second)
    assert totals.agent_shares([FIRST, SECOND, THIRD]) == {
        FIRST: {"token_share": 13 / 16, "advantage_share": 6 / 8},
        SECOND: {"token_share": 3 / 16, "advantage_share": 2 / 8},
        THIRD: {"token_share": 0.0, "advantage_share": 0.0},
    }


@pytest.mark.parametrize(("advantage", "noted"), [(0.0, True), (1.0, False), (float("inf"), True)])
def test_there_is_no_share_of_advantages_without_their_sum(advantage: float, noted: bool) -> None:
    totals = StepTotals()
    totals.note_agents([row(FIRST, 1, advantage), row(SECOND, 1, 0.0)], advantages=noted)
    assert totals.agent_shares([FIRST, SECOND]) == {
        FIRST: {"token_share": 0.5},
        SECOND: {"token_share": 0.5},
    }


def test_the_agent_of_a_policy_of_its_own_has_no_share() -> None:
    totals = StepTotals()
    totals.note_agents([row(FIRST, 1, 1.0)], advantages=True)
    assert totals.agent_shares([FIRST]) == {}
    assert StepTotals().agent_shares([FIRST, SECOND]) == {}


def test_a_step_reports_shares_also_if_the_policy_moved_within_it() -> None:
    policy, other = make_policy(), make_policy()
    policy.accumulate(game(1, 1.0)[:2])
    other.load_state(policy.step_state())
    other.accumulate(game(1, 1.0)[2:])
    shares = other.optimizer_step().by_agent
    assert shares == {
        FIRST: {"token_share": 2 / 3, "advantage_share": 2 / 3},
        SECOND: {"token_share": 1 / 3, "advantage_share": 1 / 3},
    }
    assert other.accumulate([]) is not None and other.optimizer_step().by_agent == {}
