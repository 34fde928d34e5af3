"""The engine that the page adds: two files of the package, and the contract of step engines holds."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flexmarl.actors.inference import inference_config
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.inference.engines.step_engine import StepEngine
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model

from ..checkouts import changed_files, new_files
from ..contracts import test_step_engine as contract

PAGE = Path(__file__).parents[2] / "launch" / "docs" / "add-an-engine.md"
ENGINE = "actors/inference/engines/plain_engine.py"
# One that counts the requests which a batch of two computes side by side.
OF_A_BATCH = {"test_statistics_count"}
CONTRACT = [
    test
    for name, test in vars(contract).items()
    if name.startswith("test_")
    and name not in OF_A_BATCH
    and [*inspect.signature(test).parameters] == ["engine"]
]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepEngine]:
    torch.set_num_threads(1)
    module = ModuleType("plain_engine")
    module.__package__ = "flexmarl.actors.inference.engines"
    # The class that the page's change adds; the engine itself does not use it.
    monkeypatch.setattr(inference_config, "PlainEngineConfig", inference_config.EngineOptions, raising=False)
    exec(compile(new_files(PAGE)[ENGINE], str(PAGE), "exec"), vars(module))
    model = empty_model(ModelConfig(config=contract.LLAMA, tokenizer="none"))
    engine: StepEngine = module.PlainEngine(model, [])
    generator = torch.Generator().manual_seed(1)
    for tensor in engine.weights().values():
        tensor.normal_(0.0, 0.5, generator=generator)
    engine.weights_loaded(engine.weights())
    yield engine


def test_its_file_and_its_class_are_all() -> None:
    assert changed_files(PAGE) == {ENGINE, "actors/inference/inference_config.py"}


def test_the_contract_has_tests() -> None:
    assert len(CONTRACT) >= 6


@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__)
def test_the_contract_holds(test: Callable[[StepEngine], None], engine: StepEngine) -> None:
    test(engine)


def test_the_same_seed_gives_the_same_tokens_also_behind_an_interruption(engine: StepEngine) -> None:
    def generated(*prompt: int, resumed: int = 0) -> tuple[int, ...]:
        engine.add(EngineRequest("a", prompt, 5, 1.0, 8 - resumed, resumed_tokens=resumed))
        [result] = contract._results(engine)
        return result.tokens

    whole = generated(1, 2)
    assert generated(1, 2) == whole
    assert generated(1, 2, *whole[:3], resumed=3) == whole[3:]
