"""The cost of length, against the formula of the paper."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.names import AgentName
from flexmarl.actors.rollout.overlong import overlong_punishment, punish_overlong
from flexmarl.actors.rollout.rollout_config import SamplingConfig
from flexmarl.actors.workflow import Rewards

SOLVER, JUDGE, SILENT = map(AgentName, ("solver", "judge", "silent"))


@given(st.integers(0, 40), st.integers(1, 30), st.data())
def test_it_is_equation_13_of_dapo(tokens: int, longest: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(1, longest))
    if tokens <= longest - cache:
        expected = 0.0
    elif tokens <= longest:
        expected = ((longest - cache) - tokens) / cache
    else:
        expected = -1.0
    assert overlong_punishment(tokens, longest, cache) == expected


def test_without_a_buffer_length_costs_nothing() -> None:
    assert overlong_punishment(20, 20, 0) == 0.0


def test_an_agent_pays_for_its_longest_turn_and_for_no_others() -> None:
    sampling = {
        SOLVER: SamplingConfig(max_new_tokens=10, overlong_buffer=4),
        JUDGE: SamplingConfig(max_new_tokens=10),
        SILENT: SamplingConfig(max_new_tokens=10, overlong_buffer=10),
    }
    found = punish_overlong(
        Rewards(solver=1.0, judge=0.5, silent=2.0, metrics={"accuracy": 1.0}),
        {SOLVER: 9, JUDGE: 10},
        sampling,
    )
    assert found.by_agent == {"solver": 0.25, "judge": 0.5, "silent": 2.0}
    assert found.metrics == {"accuracy": 1.0}
