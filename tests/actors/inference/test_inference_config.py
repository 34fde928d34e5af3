"""The section ``engine``: its engine is chosen by name, and what engines can do is known without importing one."""

import subprocess
import sys
from typing import Any, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from flexmarl.actors.inference.inference_config import (
    EmbeddedEngineConfig,
    EngineConfig,
    EngineOptions,
    SimulatedEngineConfig,
    VllmEngineConfig,
)

ENGINE: TypeAdapter[Any] = TypeAdapter(EngineConfig)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({}, EmbeddedEngineConfig()),
        ({"max_batch": 8}, EmbeddedEngineConfig(max_batch=8)),
        ({"name": "embedded", "max_context": 9}, EmbeddedEngineConfig(max_context=9)),
        ({"name": "simulated", "token_s": 2.0}, SimulatedEngineConfig(token_s=2.0)),
        ({"name": "vllm", "enforce_eager": True}, VllmEngineConfig(enforce_eager=True)),
    ],
)
def test_the_name_chooses_the_class(written: dict[str, Any], read: EngineOptions) -> None:
    assert ENGINE.validate_python(written) == read
    assert ENGINE.validate_json(ENGINE.dump_json(read)) == read


@pytest.mark.parametrize(
    "written",
    [
        {"name": "vlm"},
        {"name": None},
        {"token_s": 1.0},
        {"name": "simulated", "x": 1},
        {"name": "vllm", "prefill_chunk": 512},
        {"enforce_eager": True},
    ],
)
def test_an_unknown_name_or_option_is_refused(written: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ENGINE.validate_python(written)


def test_every_engine_declares_what_it_can_do() -> None:
    union, *_ = get_args(EngineConfig)
    classes = [get_args(choice)[0] for choice in get_args(union)]
    assert {EmbeddedEngineConfig, SimulatedEngineConfig, VllmEngineConfig} <= {*classes} and get_origin(
        EngineConfig
    ) is not None
    for engine in classes:
        assert {type(getattr(engine, name)) for name in ("exact_draws", "resumable", "lora")} == {bool}


def test_no_engine_is_imported_with_the_settings() -> None:
    program = (
        "import sys, flexmarl.actors.inference.inference_config;"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_reproducible_options_generate_alone_and_keep_nothing() -> None:
    changed = EmbeddedEngineConfig(max_batch=8, prefill_chunk=64).reproducible()
    assert changed == EmbeddedEngineConfig(max_batch=1, prefill_chunk=64, prefix_reuse=False)
    assert SimulatedEngineConfig(max_batch=8).reproducible() == SimulatedEngineConfig(max_batch=1)


def test_vllm_runs_in_the_instances_process_and_compiles_nothing_on_a_cpu() -> None:
    on_cpu, on_gpu = (VllmEngineConfig().environment(device) for device in ("cpu", "cuda"))
    assert on_cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == on_gpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert on_cpu["TORCHDYNAMO_DISABLE"] == "1" and "TORCHDYNAMO_DISABLE" not in on_gpu
    assert VllmEngineConfig(enforce_eager=True).environment("cuda")["TORCHDYNAMO_DISABLE"] == "1"
    assert EmbeddedEngineConfig().environment("cpu") == {}
