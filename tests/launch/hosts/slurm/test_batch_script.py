"""The batch script of a run, and the command that submits it."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.cli import registry as commands
from flexmarl.launch.errors import JobRefused
from flexmarl.launch.hosts.slurm.batch_script import Job, script, seconds_of

from ....patience import PATIENCE_S
from ...conftest import SIMULATED, TINY

JOB = Job(
    run=Path("/shared/all runs/first"),
    words=("/recipes/a", "training.steps=5", "data={shape: alone}"),
    command=("python", "-m", "flexmarl.launch.cli.main"),
    nodes=4,
    gpus_per_node=8,
    time="04:00:00",
    partition="gpu",
    more=("--account=lab",),
)


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def commands_of(text: str) -> str:
    return text.replace("\\\n    ", "")


def test_the_options_are_slurm_s(tmp_path: Path) -> None:
    assert options(script(JOB)) == [
        "--job-name=first",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--exclusive",
        "--time=04:00:00",
        "--partition=gpu",
        "--signal=B:USR1@120",
        "--requeue",
        "--no-kill",
        "--output='/shared/all runs/first.out'",
        "--open-mode=append",
        "--account=lab",
    ]
    assert "--cpus-per-task=16" in options(script(replace(JOB, cpus_per_node=16)))


def test_the_head_is_in_the_script_and_one_srun_starts_the_nodes() -> None:
    text = commands_of(script(JOB))
    assert (
        "python -m flexmarl.launch.cli.main train /recipes/a training.steps=5 'data={shape: alone}' "
        "--runs '/shared/all runs' --name first --continue --nodes 3 &\n" in text
    )
    (srun,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --relative=1" in srun
    assert srun.endswith('python -m flexmarl.launch.cli.main node --join "$run/address" &')


def test_one_node_needs_no_srun() -> None:
    text = script(replace(JOB, nodes=1))
    assert "srun" not in text and "--continue &\n" in text


@pytest.mark.parametrize("job", [JOB, replace(JOB, nodes=1)])
def test_bash_reads_it(job: Job) -> None:
    subprocess.run(["bash", "-n"], input=script(job), text=True, check=True)


def test_the_newest_checkpoint_is_a_complete_one(tmp_path: Path) -> None:
    for name in ("step_999999", "step_1000000", "step_1000001.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (newest,) = [line for line in script(JOB).splitlines() if line.startswith("newest()")]
    found = subprocess.run(
        ["bash", "-c", f'run="$1"\n{newest}\nnewest', "-", str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()).name == "step_1000000"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("04:00:00", 14400),
        ("2-00", 172800),
        ("2-03:30", 185400),
        ("1-00:00:05", 86405),
    ],
)
def test_a_time_limit_has_slurm_s_forms(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


@pytest.mark.parametrize("time", ["4h", "", "1:2:3:4", "-5", "1-", "infinite"])
def test_another_form_is_refused(time: str) -> None:
    with pytest.raises(ConfigError, match=r"--time .*: must be minutes, minutes:seconds"):
        replace(JOB, time=time)


def test_a_time_limit_without_room_for_the_last_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--time 2: is not longer than the 120 s .*--warn-s"):
        replace(JOB, time="2")


# --------------------------------------------------------------------------- flexmarl slurm


def slurm(runs: Path, *arguments: str) -> str:
    """The output. Raises the command's errors."""
    given = ["slurm", str(TINY), *SIMULATED, "--runs", str(runs), "--nodes", "2", *arguments]
    done = CliRunner().invoke(commands.cli, given, standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.output


def test_a_dry_run_prints_the_script_and_writes_nothing(tmp_path: Path) -> None:
    text = slurm(tmp_path / "runs", "--name", "first", "--time", "30", "--dry-run", "training.steps=3")
    assert f"run={tmp_path}/runs/first\n" in text and "training.steps=3 network.listen=auto" in text
    assert not (tmp_path / "runs").exists()
    given = slurm(tmp_path / "runs", "--name", "first", "--dry-run", "network.listen=10.0.0.1")
    assert "network.listen=auto" not in given


def test_head_and_nodes_run_in_an_image(tmp_path: Path) -> None:
    image = tmp_path / "flexmarl.sif"
    text = slurm(tmp_path / "runs", "--name", "first", "--dry-run", "--apptainer", str(image))
    for words in ("train", "node --join"):
        assert f"apptainer exec {image} flexmarl {words} " in text
    text = slurm(tmp_path / "runs", "--dry-run", "--apptainer", "flexmarl.sif", "--sbatch=--gres=gpu:2")
    assert f"apptainer exec --nv {Path.cwd() / 'flexmarl.sif'} flexmarl train " in text


def test_the_head_in_an_image_gets_its_words_and_its_status_is_the_jobs(tmp_path: Path) -> None:
    program = tmp_path / "apptainer"
    program.write_text('#!/bin/sh\necho "$@"; exit 3\n')
    program.chmod(0o755)
    image = tmp_path / "an image.sif"
    job = replace(JOB, run=tmp_path / "first", nodes=1, command=("apptainer", "exec", str(image), "flexmarl"))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script(job)], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (
        done.stdout.startswith(f"exec {image} flexmarl train ") and "--name first --continue" in done.stdout
    )
    assert done.returncode == 3


def test_without_slurm_the_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobRefused, match=r"there is no sbatch here: .*--dry-run prints the batch script"):
        slurm(tmp_path / "runs", "--name", "first")
    assert not (tmp_path / "runs").exists()


def test_a_refusal_of_slurm_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        JobRefused, match=r"sbatch refuses .*first\.sbatch: .*invalid partition specified: gpu"
    ):
        slurm(tmp_path / "runs", "--name", "first", "--partition", "gpu")


def test_a_config_with_gpus_needs_gpus_per_node(tmp_path: Path) -> None:
    cuda = (
        "sort-digits",
        "agent_defaults.model.device=cuda",
        "--nodes",
        "2",
        "--dry-run",
        "--runs",
        str(tmp_path),
    )
    runner = CliRunner()
    done = runner.invoke(commands.cli, ["slurm", *cuda], standalone_mode=False)
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("--gpus-per-node is missing: trainer needs a GPU (")
    for given in (["--gpus-per-node", "2"], ["--sbatch=--gres=gpu:2"]):
        done = runner.invoke(commands.cli, ["slurm", *cuda, *given], standalone_mode=False)
        assert done.exception is None and "#SBATCH --g" in done.output


def test_each_task_of_a_job_array_has_a_run_and_an_output_of_its_own(tmp_path: Path) -> None:
    job = Job(run=tmp_path / "arr", words=("r",), command=("flexmarl",), nodes=2, more=("--array=0-1",))
    text = script(job)
    assert f'run={tmp_path}/arr-"$SLURM_ARRAY_TASK_ID"' in text
    assert '--name "${run##*/}"' in text and f"--output={tmp_path}/arr-%a.out" in text


@pytest.mark.parametrize(
    ("option", "is_array"),
    [
        ("--array=0-1", True),
        ("--array", True),
        ("-a", True),
        ("-a=0-3", True),
        ("-a0-3", True),
        ("--array 0-3", True),
        ("-a 0-3", True),
        ("-account=team", False),
        ("--account=team", False),
        ("--acctg-freq=30", False),
    ],
)
def test_the_forms_of_the_option_of_a_job_array(tmp_path: Path, option: str, is_array: bool) -> None:
    job = Job(run=tmp_path / "arr", words=("r",), command=("flexmarl",), nodes=1, more=(option,))
    assert job.is_array == is_array
