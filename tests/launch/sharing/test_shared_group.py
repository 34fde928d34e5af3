"""Records of trajectories as lines of text for another run, and what that run's own tokenizer makes of them."""

import math
from pathlib import Path
from typing import Any

from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import (
    RecordedTrajectory,
    RecordedTurn,
    compress_record,
    pack_record,
    rows_of,
    turns_of,
)
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run.logged_lines import LogReader
from flexmarl.launch.run_folder.samples.sample_file import SampleFile
from flexmarl.launch.sharing.shared_group import group_lines, read_groups, task_of

from ..conftest import SIMULATED, TINY

ASYNC = ("mode=async", "agents.solver.algorithm.correction=decoupled")


def turn(number: int, prompt: tuple[Any, ...], text: str, agent: str = "solver", **keys: Any) -> RecordedTurn:
    plain = RecordedTurn(number, agent, prompt, text, 3, (1, 2), (-0.5, -0.25), 7, "stop", 1.0, 0.0)
    return plain._replace(**keys)


def trajectory(number: int, *turns: RecordedTurn, query: str = "q", **keys: Any) -> RecordedTrajectory:
    rewards = keys.pop("rewards", {"solver": float(number)})
    return RecordedTrajectory(3, False, Query(query, "12="), number, rewards, turns=turns, **keys)


def lines(*trajectories: RecordedTrajectory, agents: tuple[str, ...] = ("solver",)) -> list[dict[str, Any]]:
    record = pack_record(trajectories)
    return group_lines(rows_of(record.rows), turns_of(record.content), frozenset(agents))


def test_a_line_has_text_and_rewards_and_nothing_of_the_model() -> None:
    first, second = lines(*(trajectory(n, turn(0, ("12=",), "21", temperature=0.5)) for n in range(2)))
    assert first == {
        "turns": [
            {"agent": "solver", "prompt": ["12="], "answer": "21", "temperature": 0.5, "truncated": False}
        ],
        "reward": {"solver": 0.0},
    }
    assert second["reward"] == {"solver": 1.0}


def test_an_earlier_turn_in_a_prompt_is_written_out() -> None:
    talk = (turn(0, ("12=",), "21"), turn(1, (0, "?"), "3"), turn(2, ("0", 1, "="), "4"))
    line, _ = lines(trajectory(0, *talk), trajectory(1, *talk))
    assert [one["prompt"] for one in line["turns"]] == [
        ["12="],
        ["12=", "21", "?"],
        ["0", "12=", "21", "?", "3", "="],
    ]
    user = {"role": "user", "content": "12="}
    chat = (turn(0, (user,), "21"), turn(1, (0, {"role": "user", "content": "?"}), "3"))
    line, _ = lines(trajectory(0, *chat), trajectory(1, *chat))
    assert line["turns"][1]["prompt"] == [
        user, {"role": "assistant", "content": "21"}, {"role": "user", "content": "?"},
    ]  # fmt: skip


def test_only_groups_whose_rewards_can_be_compared_are_shared() -> None:
    plain = turn(0, ("12=",), "21")
    assert lines(trajectory(0, plain)) == [], "one alone"
    assert lines(trajectory(0, plain), trajectory(1, plain, failure="ValueError")) == []
    assert lines(trajectory(0, plain), trajectory(1, plain._replace(left_out=True))) == []
    assert lines(trajectory(0, plain), trajectory(1, plain, rewards={})) == [], "its turns have rewards"
    assert lines(trajectory(0, plain), trajectory(1, turn(1, (0, "?"), "3"))) == [], "a turn is not recorded"
    assert lines(trajectory(0, plain), trajectory(1, turn(0, ("\ud800",), "3"))) == [], "no text"
    both = (plain, turn(1, ("?",), "3", agent="judge"))
    (line, _) = lines(trajectory(0, *both), trajectory(1, *both))
    assert [one["agent"] for one in line["turns"]] == ["solver"], "the judge is not trained"


def test_the_groups_of_a_file_come_in_order_and_neither_replays_nor_those_of_others(tmp_path: Path) -> None:
    path = tmp_path / "samples.sqlite"
    file = SampleFile(path, 50, 1 << 30)

    def add(query: str) -> None:
        pair = [trajectory(n, turn(0, ("12=",), query), query=query) for n in range(2)]
        file.add([compress_record(pack_record(pair))])

    add("before")
    number, groups = read_groups(path, None, ["solver"])
    assert groups == [], "from now on"
    for query in ("one", "one~3", "shared-peer-1-ab", "two"):
        add(query)
    number, groups = read_groups(path, number, ["solver"])
    assert [group.lines[0]["turns"][0]["answer"] for group in groups] == ["one", "two"]
    assert [(group.step, group.newest) for group in groups] == [(3, 3)] * 2
    assert read_groups(path, number, ["solver"]) == (number, [])
    assert groups[0].name("peer") != groups[1].name("peer")
    again, _ = read_groups(path, 0, ["solver"])[1][1:]
    assert again.name("peer") == groups[0].name("peer"), "the same whenever it comes"
    assert read_groups(path, number + 100, ["solver"]) == (number, []), "the number of another run"
    file.close()


def test_another_model_has_the_text_with_its_own_tokens_and_unknown_log_probs() -> None:
    shared = lines(*(trajectory(n, turn(0, ("12=",), "21")) for n in range(2)))
    named = [line | {"query": "shared-peer-1"} for line in shared]
    bytes_of = resolve(str(TINY), [*SIMULATED, *ASYNC])
    real = resolve(str(TINY), ["agents={solver: {}}", "data.shape=alone", *ASYNC])
    (by_bytes,) = LogReader(bytes_of, needs_origin=False).groups(named)
    (by_words,) = LogReader(real, needs_origin=False).groups(named)
    assert by_bytes.turns[0].tokens == (*b"21", 0) and by_bytes.turns[0].text == "21"
    assert by_words.turns[0].text == "21" and by_words.turns[0].tokens != by_bytes.turns[0].tokens
    assert (
        len(by_words.turns[0].tokens) == 3
        and by_words.turns[0].prompt_tokens != by_bytes.turns[0].prompt_tokens
    )
    for group in (by_bytes, by_words):
        assert all(math.isnan(logprob) for one in group.turns for logprob in one.logprobs)
        assert group.oldest() == {}, "of no version of the run"
    cut = [line | {"turns": [line["turns"][0] | {"truncated": True}]} for line in named]
    assert LogReader(bytes_of, needs_origin=False).groups(cut)[0].turns[0].tokens == tuple(b"21"), (
        "it did not end"
    )


def test_a_task_is_the_text_of_its_workflow(tmp_path: Path) -> None:
    source = (TINY / "workflow.py").read_text()
    for name, text in (("same", source), ("other", source + "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "workflow.py").write_text(text)
    tiny = resolve(str(TINY), [*SIMULATED])
    same, other = (
        task_of(tiny.model_copy(update={"recipe": str(tmp_path / name)})) for name in ("same", "other")
    )
    assert task_of(tiny).digest == same.digest != other.digest
    assert str(same).startswith("same (workflow.py ")
