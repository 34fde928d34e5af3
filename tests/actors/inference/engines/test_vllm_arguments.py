"""vLLM's arguments: its own check of the memory, the key of its compiled code, and options that pass through."""

from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.inference.inference_config import VllmEngineConfig
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import outline_of

from .vllm_engines import OPTIONS, made, model_of

pytestmark = pytest.mark.vllm

GB = 10**9


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vLLM's cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder))
    return folder


def config_of(folder: Path, model: ModelConfig | None = None, options: VllmEngineConfig = OPTIONS) -> Any:
    from flexmarl.actors.inference.engines.vllm_arguments import engine_arguments

    folder.mkdir(exist_ok=True)
    return engine_arguments(outline_of(model or model_of()), options, str(folder)).create_engine_config()


@pytest.mark.usefixtures("cache")
def test_vllms_own_check_of_the_memory_passes_on_a_device_with_other_actors(tmp_path: Path) -> None:
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    cache_config = config_of(tmp_path / "one").cache_config
    assert cache_config.kv_cache_memory_bytes == OPTIONS.kv_cache_bytes
    for free in (60 * GB, GB // 10):
        shared: Any = MemorySnapshot(free_memory=free, total_memory=80 * GB, device="cpu", auto_measure=False)
        assert request_memory(shared, cache_config) < 10**6
        with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
            request_memory(shared, CacheConfig())


def test_the_key_of_compiled_code_is_the_same_at_every_start_of_one_config(
    tmp_path: Path, cache: Path
) -> None:
    one, two = (config_of(tmp_path / name) for name in ("one", "two"))
    assert one.compute_hash() == two.compute_hash()
    assert config_of(tmp_path / "one", model_of(num_hidden_layers=1)).compute_hash() != one.compute_hash()
    files = sorted(str(path.relative_to(cache / "flexmarl")) for path in (cache / "flexmarl").rglob("*.*"))
    assert len(files) == 2 and all(name.endswith("/config.json") for name in files)


def test_without_a_cache_that_can_be_written_the_folder_of_the_engine_serves(
    tmp_path: Path, cache: Path
) -> None:
    cache.write_text("no folder")
    assert config_of(tmp_path / "one").model_config.model == str(tmp_path / "one")


def test_two_engines_of_one_config_have_the_same_key_and_leave_their_config_alone(cache: Path) -> None:
    keys = []
    for _ in range(2):
        engine = made(model_of())
        keys.append(engine._llm.vllm_config.compute_hash())
        engine.close()
    assert keys[0] == keys[1]
    assert {path.name for path in cache.iterdir()} <= {"flexmarl", "modelinfos"}
    assert [path.name for path in (cache / "flexmarl").rglob("*") if path.is_file()] == ["config.json"]


@pytest.mark.usefixtures("cache")
def test_options_reach_vllm_by_their_names(tmp_path: Path) -> None:
    options = VllmEngineConfig(
        max_batch=4,
        kv_cache_bytes=2**24,
        options={"max_num_batched_tokens": 1024, "scheduling_policy": "priority"},
    )
    scheduler = config_of(tmp_path / "one", options=options).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.policy) == (1024, "priority")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_the_choice_of_scheduling_reaches_vllm(is_asynchronous: bool, tmp_path: Path) -> None:
    from .vllm_scheduling import scheduled_asynchronously

    options = OPTIONS.model_copy(update={"async_scheduling": is_asynchronous})
    with scheduled_asynchronously():
        config = config_of(tmp_path / "one", options=options)
    assert config.scheduler_config.async_scheduling is is_asynchronous


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("records", [True, False])
def test_the_recording_of_experts_reaches_vllm(records: bool, tmp_path: Path) -> None:
    from flexmarl.actors.inference.engines.vllm_arguments import engine_arguments

    arguments = engine_arguments(outline_of(model_of()), OPTIONS, str(tmp_path), records_routes=records)
    assert arguments.enable_return_routed_experts == records
    if records:
        with pytest.raises(ValueError, match="AuxOutput Connector"):  # on a CPU: the config refuses it, too
            arguments.create_engine_config()


def test_the_names_that_are_read_from_the_source_are_vllms_own() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    from flexmarl.actors.inference.vllm_options import RESERVED, _installed_names

    assert _installed_names() == frozenset(field.name for field in fields(EngineArgs))
    assert set(RESERVED) <= (_installed_names() or set())
