"""The work behind a turn, learned from the times of turns in trajectories that have ended."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.names import AgentName
from flexmarl.actors.rollout.call_graph import CallGraph, TimedTurn, chains_behind

PLANNER, SOLVER, CHECKER = AgentName("planner"), AgentName("solver"), AgentName("checker")


def test_the_longest_chain_counts() -> None:
    graph = CallGraph()
    assert graph.downstream_tokens(PLANNER, 0) == 0.0
    turns = [
        TimedTurn(PLANNER, 0.0, 1.0, 10),
        TimedTurn(SOLVER, 1.0, 3.0, 20),
        TimedTurn(SOLVER, 1.5, 4.0, 30),
        TimedTurn(CHECKER, 3.0, 3.5, 500),
        TimedTurn(CHECKER, 4.0, 5.0, 7),
    ]
    graph.ended(turns)
    assert graph.downstream_tokens(PLANNER, 0) == 20 + 500 + 7, (
        "the second checker began after the first had ended"
    )
    assert graph.downstream_tokens(SOLVER, 0) == 507 and graph.downstream_tokens(SOLVER, 1) == 7
    assert graph.downstream_tokens(CHECKER, 1) == 0.0
    graph.ended(turns[:1])
    assert graph.downstream_tokens(PLANNER, 0) == 527 / 2


def test_later_turns_of_a_conversation_have_less_behind_them() -> None:
    graph = CallGraph()
    for _ in range(100):
        graph.ended([TimedTurn(SOLVER, float(n), n + 1.0, 10) for n in range(40)])
    assert [graph.downstream_tokens(SOLVER, n) for n in (0, 1, 30)] == [390, 380, 90]
    assert 0 <= graph.downstream_tokens(SOLVER, 99) < 90, "all late ones together"


times = st.integers(0, 12).map(float)
turn = st.builds(
    lambda began, length, tokens: TimedTurn(SOLVER, began, began + length, tokens),
    times,
    times,
    st.integers(0, 9),
)


@given(st.lists(turn, max_size=7))
def test_chains_are_those_of_all_sequences(turns: list[TimedTurn]) -> None:
    """Turns of no length that begin at the same time follow one another in their order."""
    order = sorted(range(len(turns)), key=lambda n: turns[n].began_s)

    def longest_after(position: int) -> int:
        ended_s = turns[order[position]].ended_s
        later = [p for p in range(position + 1, len(order)) if turns[order[p]].began_s >= ended_s]
        return max((turns[order[p]].tokens + longest_after(p) for p in later), default=0)

    wanted = [0] * len(turns)
    for position, number in enumerate(order):
        wanted[number] = longest_after(position)
    assert chains_behind(turns) == wanted
