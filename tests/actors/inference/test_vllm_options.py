"""vLLM's options by name: flexmarl's own are refused with the setting to use, unknown ones before the start."""

import pytest
from pydantic import ValidationError

from flexmarl.actors.inference import vllm_options
from flexmarl.actors.inference.inference_config import VllmEngineConfig
from flexmarl.actors.inference.vllm_options import field_names, installed_problem, unknown_problem

SOURCE = '''
class Other:
    a: int = 0

@dataclass
class EngineArgs:
    """Arguments."""

    quantization: str | None = None
    """Text."""
    speculative_config: dict[str, Any] | None = None

    def method(self) -> None:
        local: int = 0
'''


def test_the_names_are_those_of_the_class() -> None:
    assert field_names(SOURCE, "EngineArgs") == frozenset({"quantization", "speculative_config"})
    assert field_names(SOURCE, "Missing") is None


def test_options_of_vllm_are_taken_as_they_are() -> None:
    options = {
        "quantization": "fp8",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "compilation_config": {"cudagraph_capture_sizes": [1, 2]},
    }
    read = VllmEngineConfig.model_validate_json(VllmEngineConfig(options=options).model_dump_json())
    assert read.options == options


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("tensor_parallel_size", r"set engine\.tensor_parallel"),
        ("kv_cache_memory_bytes", r"set engine\.kv_cache_bytes"),
        ("gpu_memory_utilization", r"set engine\.kv_cache_bytes"),
        ("async_scheduling", r"set engine\.async_scheduling"),
        ("data_parallel_size", r"set `instances` for more"),
        ("max_lora_rank", r"set lora\.rank"),
        ("worker_extension_cls", r"flexmarl adds methods"),
    ],
)
def test_an_option_that_flexmarl_sets_itself_is_refused_with_the_setting(name: str, setting: str) -> None:
    with pytest.raises(ValidationError, match=rf"{name} can't be given here: .*{setting}"):
        VllmEngineConfig(options={name: 1})


def test_an_option_that_vllm_does_not_know_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"quantization", "speculative_config"}
    assert unknown_problem(["quantization"], known) is None
    assert unknown_problem(["quantisation"], known) == (
        "engine.options.quantisation: this vLLM has no such option; did you mean quantization?"
    )
    monkeypatch.setattr(vllm_options, "_installed_names", lambda: frozenset(known))
    assert (installed_problem({"xyz": 1}) or "").endswith("no such option: see `vllm serve --help=all`")
    assert installed_problem({"quantization": "fp8"}) is None and installed_problem({}) is None
    monkeypatch.setattr("flexmarl.actors.inference.inference_config.vllm_problem", lambda device: None)
    assert "did you mean quantization?" in (
        VllmEngineConfig(options={"quantisation": "fp8"}).unavailable("cuda") or ""
    )


def test_without_vllm_no_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_options, "_installed_names", lambda: None)
    assert installed_problem({"xyz": 1}) is None
