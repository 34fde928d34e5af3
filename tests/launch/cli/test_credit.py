"""``flexmarl credit``: evaluations of teams, each once, and the values of their agents."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.names import PolicyName
from flexmarl.launch.cli.main import main
from flexmarl.launch.config.evaluation_config import evaluation_config
from flexmarl.launch.credit.coalition_config import coalition_config, players
from flexmarl.launch.credit.credit_run import CreditRun
from flexmarl.launch.run.preflight import preflight

from ..conftest import NO_FINDINGS
from ..in_process import Finished, RunsHere

SETTINGS = ("training.steps=1", "checkpoint.every=1", "evaluation.every=0")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunsHere:
    return RunsHere(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def trained(runs: RunsHere) -> Iterator[Finished]:
    run = runs.train("trained", *SETTINGS, "agent_defaults.sft.batches=3")
    assert run.status == 0, run.text
    yield run


def test_every_team_is_evaluated_once_and_the_values_add_up(
    runs: RunsHere, trained: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    first = runs.credit(trained.directory, "--json")
    assert first.status == 0, first.text
    folder = runs.runs / "trained-credit"
    teams = {"none", "solver", "checker", "solver+checker"}
    assert {path.name for path in folder.iterdir()} == {"credit.json", *teams}
    result = json.loads(first.text.splitlines()[-1])
    worth = {tuple(team["agents"]): team["worth"] for team in result["worth"]}
    gain = worth["checker", "solver"] - worth[()]
    assert sum(agent["value"] for agent in result["values"].values()) == pytest.approx(gain)
    assert result["queries"] > 0 and result["left_out"] == 0

    times = {team: (folder / team / "events.jsonl").stat().st_mtime_ns for team in teams}
    again = runs.credit(trained.directory)
    assert again.status == 0 and "with all trained agents" in again.text
    assert times == {team: (folder / team / "events.jsonl").stat().st_mtime_ns for team in teams}


def test_an_evaluation_that_was_not_complete_begins_again(
    runs: RunsHere, trained: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The checks before a start, each in a process that imports torch, have tests of their own.
    monkeypatch.setattr(preflight, "_findings", lambda *_: NO_FINDINGS)
    credit_run, folder = CreditRun(trained.directory, None, (), None), runs.runs / "partly"
    [none, *_] = credit_run.prepare([("solver", "checker")], folder)
    with credit_run.evaluation(none, folder) as prepared:
        assert prepared is not None  # and is not run: as after a kill
    (folder / "none" / "mark").touch()
    with credit_run.evaluation(none, folder) as prepared:
        assert prepared is not None and not (folder / "none" / "mark").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--metric", "beauty"), "--metric beauty: no query has this figure"),
        (("seed=8",), "evaluations of another run or of other settings: choose another --name"),
        (("--without", "nowhere", "--name", "x"), "there is no such run: write RUN_DIR"),
        (("--without", "{trained}", "--name", "x"), "has the same weights"),
        (("--without", "{trained}/7", "--name", "x"), "no checkpoint of step 7"),
        (("--name", "trained"), "was not made by flexmarl credit"),
    ],
)
def test_bad_input_is_refused(
    runs: RunsHere, trained: Finished, words: tuple[str, ...], message: str
) -> None:
    if not (runs.runs / "trained-credit").exists():
        assert runs.credit(trained.directory).status == 0
    answer = runs.credit(trained.directory, *(word.format(trained=trained.directory) for word in words))
    assert answer.status == 2 and message in answer.text


def test_a_run_without_a_checkpoint_of_its_begin_needs_other_weights(runs: RunsHere) -> None:
    run = runs.train("late", *SETTINGS)
    assert not (run.directory / "checkpoints/step_000000").exists()
    with pytest.raises(ConfigError, match="no checkpoint of step 0.*--without names the weights"):
        CreditRun(run.directory, None, (), None)


def test_agents_that_share_a_policy_are_divided(runs: RunsHere) -> None:
    """One in the team, and one not: the second has a policy of its own, with the weights before."""
    run = runs.train("sharing", *SETTINGS, "agents.checker.policy=solver", "agent_defaults.sft.batches=3")
    assert run.status == 0, run.text
    after = evaluation_config(run.directory, None, [], None)
    before = evaluation_config(run.directory, None, [], None, weights=run.directory / "0")
    assert players(after, before) == ["solver", "checker"]
    both = coalition_config(after, before, ["solver", "checker"])
    assert {*both.policies} == {"solver"}
    one = coalition_config(after, before, ["checker"])
    assert {name: agent.policy for name, agent in one.agents.items()} == {
        "solver": "solver_before",
        "checker": "solver",
    }
    assert one.policies[PolicyName("solver_before")].init_from == Path(
        run.directory / "checkpoints/step_000000/solver"
    )
    none = coalition_config(after, before, [])
    assert {*none.policies} == {"solver_before"}


def test_its_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["credit", "--help"]) == 0
    assert "flexmarl credit runs/first" in capsys.readouterr().out
