"""The environment's settings."""

from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.hosts import env


def test_the_runtime_directories_are_in_shared_memory_or_in_the_folder_that_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLEXMARL_RUNTIME_BASE", raising=False)
    assert env.runtime_base() == Path("/dev/shm")
    monkeypatch.setenv("FLEXMARL_RUNTIME_BASE", str(tmp_path))
    assert env.runtime_base() == tmp_path


def test_without_shared_memory_they_are_in_the_folder_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLEXMARL_RUNTIME_BASE", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert env.runtime_base() == tmp_path


def test_a_folder_that_is_missing_is_refused_with_the_variable_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLEXMARL_RUNTIME_BASE", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="FLEXMARL_RUNTIME_BASE=.*nowhere: there is no such folder"):
        env.runtime_base()


def test_tracebacks_are_whole_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("sort-digits", [])
    monkeypatch.delenv("FLEXMARL_TRACEBACK", raising=False)
    assert not config.recipe_config().whole_tracebacks
    monkeypatch.setenv("FLEXMARL_TRACEBACK", "full")
    assert config.recipe_config().whole_tracebacks


def test_a_process_s_cuda_devices_are_named_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert env.visible_devices() is None
    assert env.cuda_devices(["GPU-d1"]) == {"CUDA_VISIBLE_DEVICES": "GPU-d1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-d1,6")
    assert env.visible_devices() == "4,GPU-d1,6"
    assert env.cuda_devices(["GPU-d6", "GPU-d1"]) == {"CUDA_VISIBLE_DEVICES": "GPU-d6,GPU-d1"}


def test_actors_are_no_ranks_of_the_torchrun_that_has_started_their_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    )
    for name in (*ranks, "LOCAL_MODELS", "MASTER_KEY"):
        monkeypatch.setenv(name, "1")
    assert set(ranks) <= set(env.actor_environment()), "they may be a recipe's own"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    found = env.actor_environment()
    assert not {*ranks, "TORCHELASTIC_RUN_ID"} & set(found)
    assert {"LOCAL_MODELS", "MASTER_KEY"} <= set(found)
    assert {*ranks, "TORCHELASTIC_RUN_ID"} <= set(env.torchrun_variables())


def test_settings_of_threads_and_memory_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert [env.actor_environment()[name] for name in names] == ["1", "268435456", "33554432"]
    for name in names:
        monkeypatch.setenv(name, "3")
    assert [env.actor_environment()[name] for name in names] == ["3", "3", "3"]
