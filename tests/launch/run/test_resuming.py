"""Resuming: the values that a checkpoint was made with are kept, and every other one is named."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.errors import CheckpointIncomplete, ConfigError
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator import checkpoint
from flexmarl.actors.orchestrator.checkpoint import RunState
from flexmarl.actors.orchestrator.queries.queries_state import QueriesState
from flexmarl.actors.trainer.pool.pool_config import SharedPoolConfig
from flexmarl.launch.config.config_reading import check, read_yaml, resolve, to_yaml, with_overrides
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.errors import ResumeRefused
from flexmarl.launch.hosts.host_description import HostDescription
from flexmarl.launch.hosts.placement.auto_ranks import with_chosen_ranks
from flexmarl.launch.run import resuming
from flexmarl.launch.run.prepared_run import changed_settings, resume_from_newest_checkpoint
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.simulated_disk import SimulatedDisk

from ..conftest import SIMULATED, TINY
from ..in_process import RunsHere

QUERIES = QueriesState(8, {"position": 8, "digests": ["abc"]}, {"level": 3}, "def")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "rewards").mkdir()
    (folder / "rewards" / "grading.py").write_text("BEST = 1.0\n")
    return folder


@pytest.fixture
def run(tmp_path: Path, recipe: Path) -> RunDirectory:
    """A run of 6 steps with a checkpoint after step 4."""
    config = resolve(str(recipe), [])
    run = RunDirectory.create(tmp_path / "run", to_yaml(config))
    resuming.record(run, config)
    run.store.mkdir()
    commit_step_4(run)
    return run


def commit_step_4(run: RunDirectory) -> None:
    folder = checkpoint.partial_folder(run.checkpoints, Step(4)) / "solver"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(100))
    versions = {PolicyName(name): Version(4) for name in ("solver", "checker")}
    checkpoint.commit(run.checkpoints, RunState(Step(4), versions, {}, QUERIES), keep=1)


def edit(run: RunDirectory, key: str, value: object) -> None:
    """A change of config.yaml by hand."""
    raw = read_yaml(run.config)
    *parents, last = key.split(".")
    section = raw
    for parent in parents:
        section = section[parent]
    section[last] = value
    run.config.write_text(yaml.safe_dump(raw))


def test_nothing_has_changed(run: RunDirectory) -> None:
    found = resuming.plan_resume(run, [], [])
    assert found.changes == {} and found.warnings == [] and found.step == 4 and not found.is_complete
    assert found.config == check(read_yaml(run.config), "")
    assert found.checkpoint is not None and found.checkpoint[1].queries == QUERIES


def test_a_run_recorded_without_renderers_keeps_the_chat_template(run: RunDirectory) -> None:
    raw = read_yaml(run.config)
    made_with = json.loads(run.made_with.read_text())
    for config in (raw, made_with["config"]):
        for policy in config["policies"].values():
            assert policy["model"].pop("renderer") == "auto"
    run.config.write_text(yaml.safe_dump(raw))
    run.made_with.write_text(json.dumps(made_with))
    start = resuming.plan_resume(run, [], [])
    assert {policy.model.renderer for policy in start.config.policies.values() if policy.model} == {
        "template"
    }
    assert start.changes == {}
    resuming.record(run, start.config)
    assert resuming.plan_resume(run, [], []).config == start.config


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("training.steps=9", {"training.steps": "6 -> 9"}),
        ("training.steps=6", {}),
        ("checkpoint={every: 3, keep: 1}", {"checkpoint.every": "2 -> 3", "checkpoint.keep": "2 -> 1"}),
        ("evaluation.every=2", {"evaluation.every": "0 -> 2"}),
        ("policies.solver.instances=2", {"policies.solver.instances": "1 -> 2"}),
        ("supervision.silence_s=60", {"supervision.silence_s": "300.0 -> 60.0"}),
        ("rollout.workers=2", {"rollout.workers": "1 -> 2"}),
        ("rollout.max_failed_share=0.5", {"rollout.max_failed_share": "0.25 -> 0.5"}),
        ("balance.threshold=2", {"balance.threshold": "5.0 -> 2.0"}),
        ("weights.path=shm", {"weights.path": "auto -> shm"}),
        ("policies.solver.optimizer.lr=0.5", {"policies.solver.optimizer.lr": "0.001 -> 0.5"}),
        (
            "policies.solver.optimizer.schedule=linear",
            {"policies.solver.optimizer.schedule": "constant -> linear"},
        ),
        (
            "policies.solver.optimizer.weight_decay=0.1",
            {"policies.solver.optimizer.weight_decay": "0.0 -> 0.1"},
        ),
        ("policies.solver.algorithm.clip_low=0.1", {"policies.solver.algorithm.clip_low": "0.2 -> 0.1"}),
    ],
)
def test_settings_that_may_change_are_taken_and_recorded(
    run: RunDirectory, override: str, change: dict[str, str]
) -> None:
    found = resuming.plan_resume(run, [override], [])
    assert found.changes == change
    resuming.record(run, found.config)
    again = resuming.plan_resume(run, [], [])
    assert again.changes == {} and again.config == found.config == check(read_yaml(run.config), "")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=8", "seed=8 was 7"),
        ("mode=sync", "mode='sync' was 'strict'"),
        ("policies.solver.algorithm.name=cispo", "policies.solver.algorithm.name='cispo' was "),
        ("training.micro_batch=4", "training.micro_batch=4 was 2"),
        ("data.shape=talk", "data.shape='talk' was '(absent)'"),
    ],
)
def test_settings_that_decide_what_is_learned_are_refused_by_name(
    run: RunDirectory, override: str, named: str
) -> None:
    before = run.config.read_bytes()
    with pytest.raises(ResumeRefused) as refused:
        resuming.plan_resume(run, [override], [])
    text = str(refused.value)
    assert f"{run.path} can't be resumed as it is" in text and named in text
    assert "start a new run" in text and "training.steps" in text
    assert run.config.read_bytes() == before


def test_a_config_that_was_edited_is_refused_by_name_with_the_way_to_take_it(run: RunDirectory) -> None:
    edit(run, "training.steps", 9)
    edit(run, "training.micro_batch", 4)
    with pytest.raises(ResumeRefused) as refused:
        resuming.plan_resume(run, [], [])
    steps, micro_batch = sorted(refused.value.problems, reverse=True)
    assert steps == (
        "training.steps=9 in config.yaml was 6 when the checkpoint was made: take it by flexmarl train --resume "
        f"{run.path} training.steps=9, or restore it"
    )
    assert (
        micro_batch == "training.micro_batch=4 in config.yaml was 2 when the checkpoint was made: restore it"
    )
    edit(run, "training.micro_batch", 2)
    assert resuming.plan_resume(run, ["training.steps=9"], []).changes == {"training.steps": "6 -> 9"}
    assert resuming.plan_resume(run, ["training.steps=8"], []).changes == {"training.steps": "6 -> 8"}


def test_a_key_that_does_not_exist_is_refused_in_the_words_of_a_new_run(run: RunDirectory) -> None:
    with pytest.raises(ConfigError) as refused:
        resuming.plan_resume(run, ["training.stepz=5"], [])
    head, problem = str(refused.value).splitlines()
    assert head == f"{run.made_with}, overrides included:" and problem.endswith("; do you mean steps?")


def test_fewer_steps_than_are_trained_are_refused(run: RunDirectory) -> None:
    with pytest.raises(ResumeRefused, match="training.steps=3: step 4 is trained already"):
        resuming.plan_resume(run, ["training.steps=3"], [])
    assert resuming.plan_resume(run, ["training.steps=4"], []).is_complete


def test_an_evaluation_alone_that_was_stopped_is_not_complete(run: RunDirectory) -> None:
    found = resuming.plan_resume(run, [], [])
    assert found.checkpoint is not None
    after_sft = replace(found.checkpoint[1], step=Step(0))
    evaluated = with_overrides(found.config, ["training.steps=0"], "test")
    tuned = replace(found, config=evaluated, checkpoint=(found.checkpoint[0], after_sft))
    assert not tuned.is_complete and tuned.place == "the supervised batches"


@pytest.mark.parametrize("name", ["workflow.py", "rewards/grading.py"])
@pytest.mark.parametrize(("content", "how"), [(b"# changed\n", "has changed"), (None, "is missing")])
def test_a_changed_file_of_the_recipe_is_refused_by_name_or_accepted(
    run: RunDirectory, recipe: Path, name: str, content: bytes | None, how: str
) -> None:
    if content is None:
        (recipe / name).unlink()
    else:
        (recipe / name).write_bytes(content)
    with pytest.raises(ResumeRefused, match=f"{name} of the recipe .* {how} .*--accept {name}"):
        resuming.plan_resume(run, [], [])
    found = resuming.plan_resume(run, [], [name])
    assert found.changes == {name: how}
    resuming.record(run, found.config)
    assert resuming.plan_resume(run, [], []).changes == {}, "accepted once"


def test_files_that_decide_nothing_may_change(run: RunDirectory, recipe: Path) -> None:
    (recipe / "notes.txt").write_text("x")
    (recipe / "config.yaml").write_text("another: recipe")
    (recipe / "new.py").write_text("x = 1")
    cache = recipe / "__pycache__"
    cache.mkdir()
    (cache / "x.py").write_text("x")
    assert resuming.plan_resume(run, [], []).changes == {}


def test_a_recipe_that_has_moved_is_found_by_its_new_place(run: RunDirectory, recipe: Path) -> None:
    new = recipe.with_name("elsewhere")
    recipe.rename(new)
    with pytest.raises(ConfigError, match=r"recipe's folder .* is missing: .* recipe=FOLDER"):
        resuming.plan_resume(run, [], [])
    found = resuming.plan_resume(run, [f"recipe={new}"], [])
    assert found.changes == {"recipe": f"{recipe} -> {new}"}
    models = [policy.real_model for policy in found.config.policies.values()]
    assert {model.tokenizer for model in models} == {str(new / "tokenizer")}, "it moved with the recipe"


def test_accepted_data_is_not_compared(run: RunDirectory) -> None:
    found = resuming.plan_resume(run, [], ["data"])
    assert found.checkpoint is not None and found.changes == {"data": "not compared"}
    assert found.checkpoint[1].queries == QueriesState(8, {"position": 8, "digests": []}, {"level": 3})


def test_before_the_first_checkpoint_everything_may_change(run: RunDirectory, recipe: Path) -> None:
    shutil.rmtree(run.checkpoints / "step_000004")
    (recipe / "workflow.py").write_text("# changed\n")
    found = resuming.plan_resume(run, ["seed=8"], [])
    assert found.config.seed == 8 and found.checkpoint is None


def test_what_is_missing_is_a_warning_that_names_it(run: RunDirectory) -> None:
    run.made_with.unlink()
    run.store.rmdir()
    made_with, store = resuming.plan_resume(run, [], []).warnings
    assert f"{run.made_with} is missing: " in made_with and "as they are now" in made_with
    assert f"{run.store} is missing: no sample of a saved step is lost" in store


def test_torn_weights_are_named_with_the_way_on_also_in_the_only_checkpoint(run: RunDirectory) -> None:
    folder = run.checkpoints / "step_000004"
    (folder / "solver" / "model.safetensors").write_bytes(bytes(60))
    with pytest.raises(CheckpointIncomplete) as torn:
        resuming.plan_resume(run, [], [])
    assert str(torn.value) == (
        f"checkpoint file {folder}/solver/model.safetensors: has 60 bytes, 100 were written; remove {folder} to start "
        "again from step 1"
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, bytes]:
    """A run, and the bytes of its record."""
    config = resolve(str(TINY), [])
    run = RunDirectory.create(tmp_path_factory.mktemp("runs") / "run", to_yaml(config))
    resuming.record(run, config)
    return run, run.made_with.read_bytes()


@given(cut=st.integers(0, 2000))
def test_a_damaged_record_is_named(recorded: tuple[RunDirectory, bytes], cut: int) -> None:
    run, whole = recorded
    assert json.loads(whole)["files"].keys() == {"workflow.py"}
    run.made_with.write_bytes(whole[: min(cut, len(whole) - 2)])
    with pytest.raises(CheckpointIncomplete, match=r"made_with.json: is damaged .*: remove it to continue"):
        resuming.plan_resume(run, [], [])


# --------------------------------------------------------------------------- real runs

SMALL = (
    *SIMULATED,
    "training={steps: 2, queries_per_step: 1, trajectories_per_query: 4, micro_batch: 4}",
    "checkpoint.every=2",
)


def test_a_finished_run_continues_with_more_steps(runs_here: RunsHere, recipe: Path) -> None:
    (recipe / "digits").write_text("123 456 789 987")
    name = "longer"
    run = runs_here.train(name, *SMALL, f"data.digits={recipe / 'digits'}", recipe=recipe)
    assert run.status == 0, run.text

    again = runs_here.resume(name)
    assert again.status == 0
    assert "is complete: all 2 steps are trained" in again.text

    path = run.directory / "metrics.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f'{first[:40]}\n{second}\n{{"no": "step"}}\n')
    more = runs_here.resume(name, "training.steps=4")
    assert more.status == 0, more.text
    assert f"{path}, line 1: damaged, was removed: {first[:40]!r}" in more.text
    assert f"{path}, line 3: damaged" in more.text
    assert "changed: training.steps 2 -> 4" in more.text
    assert [line["step"] for line in more.metrics] == [2, 3, 4]
    resumed = [event for event in more.events if event["event"] == "run_resumed"]
    assert [event["changes"] for event in resumed] == [{"training.steps": "2 -> 4"}]
    assert read_yaml(more.directory / "config.yaml")["training"]["steps"] == 4

    (recipe / "digits").write_text("321 456 789 987")  # the first of the run's queries
    refused = runs_here.resume(name, "training.steps=6")
    assert refused.status == 1
    assert "the data has changed since the checkpoint was made: train_query(0) now returns" in refused.text
    assert "--accept data" in refused.text

    with (recipe / "workflow.py").open("a") as file:
        file.write("# a remark\n")
    named = runs_here.resume(name, "--accept", "data")
    assert named.status == 2
    assert "workflow.py of the recipe" in named.text and "has changed" in named.text

    accepted = runs_here.resume(name, "--accept", "data", "--accept", "workflow.py")
    assert accepted.status == 0, accepted.text
    assert [line["step"] for line in accepted.metrics] == [2, 3, 4, 5, 6]


AUTO = ("pool={name: shared, slots: auto}", "trainer.ranks=auto")


def test_slots_that_a_resumed_run_leaves_to_the_plan_become_a_number(run: RunDirectory) -> None:
    pool = resuming.plan_resume(run, AUTO[:1], []).config.pool
    assert isinstance(pool, SharedPoolConfig) and (pool.slots, pool.states_per_slot) == (1, 2)


def test_numbers_that_a_resumed_run_leaves_to_the_plan_are_chosen_for_the_hosts_that_join_too(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def choose(config: RunConfig, hosts: Callable[[], Sequence[HostDescription]]) -> RunConfig:
        counts.append(len(hosts()))
        return with_chosen_ranks(config, hosts)

    monkeypatch.setattr(resuming, "with_chosen_ranks", choose)
    resume_from_newest_checkpoint(run, AUTO[:1], [], joining=2)
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    resuming.plan_resume(run, AUTO[:1], [], joining=2)
    assert counts == [3, 3]


def test_a_run_that_continues_keeps_the_numbers_that_its_plan_has_chosen(
    recipe: Path, tmp_path: Path
) -> None:
    config = with_chosen_ranks(resolve(str(recipe), AUTO), list)
    assert isinstance(config.pool, SharedPoolConfig) and config.pool.states_per_slot == 2
    begun = RunDirectory.create(tmp_path / "begun", to_yaml(config))
    assert changed_settings(begun, str(recipe), AUTO) == []
    assert changed_settings(begun, str(recipe), [*AUTO, "pool.states_per_slot=1"]) == [
        "pool.states_per_slot=1"
    ]
    assert changed_settings(begun, str(recipe), [*AUTO, "seed=5"]) == ["seed=5"]


@pytest.mark.parametrize("seed", range(12))
def test_a_checkpoint_can_be_resumed_after_a_loss_of_power(tmp_path: Path, recipe: Path, seed: int) -> None:
    """Files that were not forced to the disk are gone, or there in part."""
    config = resolve(str(recipe), [])
    disk = SimulatedDisk(tmp_path / "run", random.Random(seed))
    with disk.watched():
        run = RunDirectory.create(tmp_path / "run", to_yaml(config))
        resuming.record(run, with_overrides(config, ["training.steps=9"], "the test"))
        commit_step_4(run)
        disk.lose_power()
    disk.restore()
    start = resuming.plan_resume(run, [], [])
    assert start.step == 4 and start.config.training.steps == 9
