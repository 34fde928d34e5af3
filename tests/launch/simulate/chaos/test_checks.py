"""Each check finds its problem in an outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from flexmarl.core.errors import VirtualTimeExceeded
from flexmarl.launch.errors import LeftBehind
from flexmarl.launch.simulate.chaos.checks import CHECKS, problems_of
from flexmarl.launch.simulate.chaos.outcome import Outcome
from flexmarl.launch.simulate.chaos.saved_policies import SavedPolicy


def policy(trained: Mapping[int, Sequence[str]], digest: int = 1) -> SavedPolicy:
    return SavedPolicy(len(trained), digest, trained)


WHOLE = policy({0: ["1:q0_0_0", "1:q0_0_1"], 1: ["2:q1_0_0", "2:q1_0_1"]})
CLEAN = Outcome(steps=2, staleness=0, error=None, saved={"p": WHOLE}, expected={"p": WHOLE})


def with_trained(trained: Mapping[int, Sequence[str]], digest: int = 1) -> Outcome:
    return replace(CLEAN, saved={"p": policy(trained, digest)})


def stalled(cause: str) -> dict[str, object]:
    return {"event": "run_stalled", "step": 1, "seconds": 30.0, "causes": [cause]}


HANGS = replace(
    CLEAN, error=VirtualTimeExceeded(3600.0, 3601.0, []), events=[stalled("store: room for samples")]
)
SILENT = replace(CLEAN, events=[stalled("no actor names a wait; `flexmarl logs RUN` may have more")])
CASES = {
    "ends": (HANGS, "store: room for samples"),
    "names its waits": (SILENT, "named nothing"),
    "leaves nothing": (replace(CLEAN, error=LeftBehind(["poll"], [], [])), "poll"),
    "trains once": (
        replace(
            with_trained(twice := {0: WHOLE.trained[0], 1: [*WHOLE.trained[1], "2:q1_0_1"]}),
            expected={"p": policy(twice)},
        ),
        "more than once: 2:q1_0_1",
    ),
    "trains all": (with_trained({0: WHOLE.trained[0], 1: ["2:q1_0_0", "2:q1_0_2"]}), "not trained 2:q1_0_1"),
    "has all versions": (with_trained({0: WHOLE.trained[1], 1: WHOLE.trained[0]}), "other steps"),
    "has equal sums": (with_trained(WHOLE.trained, digest=2), "other sums"),
    "loses no write": (replace(CLEAN, lost_writes=("1:q0_0_0 of agent a",)), "1:q0_0_0 of agent a"),
    "commits before checkpoints": (
        replace(CLEAN, early_checkpoints=("version 2 of policy p before the commit of 2",)),
        "too early: version 2 of policy p",
    ),
    "keeps checkpoints": (
        replace(CLEAN, events=[{"event": "checkpoint_saved", "step": step} for step in (1, 2, 2)]),
        "step 2 was saved after step 2",
    ),
}


def test_a_clean_outcome_has_no_problem() -> None:
    assert problems_of(CLEAN) == []
    named = [stalled("trainer: slots"), {"event": "checkpoint_saved", "step": 1}]
    assert problems_of(replace(CLEAN, events=named)) == []


def test_every_check_has_a_case() -> None:
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("check", CASES)
def test_a_check_finds_its_problem_and_no_other_does(check: str) -> None:
    outcome, text = CASES[check]
    (problem,) = problems_of(outcome)
    assert problem.check == check and text in problem.text


def test_the_newest_checkpoint_is_there_and_whole() -> None:
    damaged = replace(CLEAN, saved={}, damage="p/simulated_policy.json: the file is missing")
    assert [problem.text for problem in problems_of(damaged)] == [damaged.damage]
    (problem,) = problems_of(replace(CLEAN, saved={}))
    assert problem.check == "keeps checkpoints" and "without a checkpoint" in problem.text


def test_stale_samples_are_trained_in_any_order_within_their_staleness() -> None:
    mixed = {0: [*WHOLE.trained[1]], 1: [*WHOLE.trained[0]]}
    assert problems_of(replace(with_trained(mixed, digest=2), staleness=1)) == []
    late = {0: ["1:q0_0_0"], 1: ["2:q1_0_0"], 2: ["1:q0_0_1"]}
    (problem,) = problems_of(replace(with_trained(late), steps=3, staleness=1, expected={"p": policy(late)}))
    assert problem.check == "has all versions" and "1:q0_0_1" in problem.text


def test_behind_a_link_that_stays_cut_a_run_may_end_with_its_name() -> None:
    error = ValueError(
        "policy p has had no instance: rollout-1 can't reach p-0: the link between their hosts is cut"
    )
    ended = replace(CLEAN, error=error, saved={}, stays_cut=True)
    assert problems_of(ended) == []
    assert [problem.check for problem in problems_of(replace(ended, stays_cut=False))] == ["ends"]
    assert [problem.check for problem in problems_of(replace(ended, error=ValueError("other")))] == ["ends"]


def test_a_run_that_failed_is_compared_as_far_as_it_came() -> None:
    outcome = replace(CLEAN, error=ValueError("broken"), saved={"p": policy({0: WHOLE.trained[0]}, digest=7)})
    (problem,) = problems_of(outcome)
    assert problem.text == "it failed: ValueError: broken"
