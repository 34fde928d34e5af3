"""Engines' times from the tables of ``aiconfigurator-core``: a stand-in, and the package itself where it is
installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.inference.engine_times import RooflineTimes
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.inference.measured_times import MeasuredTimes
from flexmarl.actors.messages import ModelConfig
from flexmarl.launch.simulate import measured_tables
from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.engine_sources import times_of_engine
from flexmarl.launch.simulate.measured_tables import tables_of
from flexmarl.launch.simulate.roofline import EngineLoad
from flexmarl.launch.simulate.scenario import read_scenario, simulated_config
from flexmarl.launch.simulate.scenario_run import run_scenario

from .shapes import QWEN_14B

SCENARIO = Path(__file__).parent / "scenario.yaml"
MODEL = ModelConfig.model_validate({
    "config": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "tokenizer": "some/tokenizer", "device": "cuda",
})  # fmt: skip


class StandIn:
    """10 ms a step and 1 ms for each 1000 tokens of context; 1 ms for 100 tokens of a prompt, and attention."""

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        return 10.0 + bs * isl / 1000

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        return bs * (isl / 100 + (isl / 1000) ** 2)


def measured(device: str = "H100", devices: int = 2, item_bytes: int = 2) -> RooflineTimes | MeasuredTimes:
    cluster = ClusterConfig.model_validate({
        "hosts": 1, "devices": 8, "device": device, "engine_times": "measured"
    })  # fmt: skip
    return times_of_engine(MODEL, QWEN_14B, cluster, EngineLoad(devices, item_bytes, 24 << 30), 16)


def test_the_tables_have_the_estimated_times_and_one_entry_beyond_the_largest_batch() -> None:
    tables = tables_of(
        StandIn(), batches=[1, 8], contexts=[100, 1000], prompts=[128, 1024], step_s=0.5, kv_tokens=7
    )
    assert tables.decode_s(8, 8000) == pytest.approx(0.5 + 0.018)
    assert tables.products == pytest.approx((0.00128 + 0.128**2 / 1e3, 0.01024 + 8 * 0.128**2 / 1e3))
    assert tables.attention == pytest.approx((0.0, (1.024**2 - 8 * 0.128**2) / 1e3))
    assert measured_tables._up_to((1, 2, 4, 8), 3) == [1, 2, 4]
    assert measured_tables._up_to((1, 2, 4, 8), 1) == [1, 2]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_time_that_can_not_be_is_refused(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "predict_decode_latency", lambda *_, **__: value)
    with pytest.raises(ValueError, match="ms for 1 x 100 tokens"):
        tables_of(StandIn(), batches=[1, 8], contexts=[100, 1000], prompts=[128, 1024], step_s=0, kv_tokens=7)


def test_a_scenario_takes_its_engines_times_from_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_tables, "_estimator", lambda *_: StandIn())
    scenario = read_scenario(SCENARIO, ["cluster.engine_times=measured"])
    engine = next(iter(simulated_config(scenario).policies.values())).engine
    assert isinstance(engine, SimulatedEngineConfig) and engine.measured_times is not None
    assert engine.times is None and engine.measured_times.decode[0][0] == pytest.approx(0.010128)
    slow = run_scenario(scenario, tmp_path / "measured")
    fast = run_scenario(read_scenario(SCENARIO, []), tmp_path / "roofline")
    assert slow.step_s > fast.step_s, "10 ms a step are more than such a small model needs"


@pytest.mark.parametrize("device", ["H20", "NPU-64GB"])
def test_a_device_without_tables_is_refused_with_those_that_there_are(device: str) -> None:
    with pytest.raises(ConfigError, match=r"no measured tables; .*A100 \(a100_sxm\), H100 .*roofline"):
        measured(device)


def test_other_numbers_than_those_of_the_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16, 2 bytes, and the model has 4"):
        measured(item_bytes=4)
    with pytest.raises(ConfigError, match=r"cluster\.engine_times=.guessed.: Input should be"):
        read_scenario(SCENARIO, ["cluster.engine_times=guessed"])


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_tables._estimator.cache_clear()
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)
    with pytest.raises(ConfigError, match=r"pip install 'flexmarl\[plan\]'"):
        measured()


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed")
class TestThePackage:
    @pytest.mark.parametrize("device", ["A100", "H100", "H200"])
    def test_its_tables_are_within_a_third_of_the_rooflines(self, device: str) -> None:
        """Nothing is fitted: the two have no number in common but the time beside the device."""
        cluster = ClusterConfig.model_validate({"hosts": 1, "devices": 8, "device": device})
        roofline = times_of_engine(MODEL, QWEN_14B, cluster, EngineLoad(2, 2, 24 << 30), 16)
        tables = measured(device)
        for batch, context in ((1, 1000), (8, 4000), (16, 8000)):
            ratio = tables.decode_s(batch, batch * context) / roofline.decode_s(batch, batch * context)
            assert 0.75 < ratio < 1.34, (device, batch, ratio)
        ratio = tables.prefill_s([4000] * 4, 8) / roofline.prefill_s([4000] * 4, 8)
        assert 0.67 < ratio < 1.5, (device, ratio)

    def test_devices_that_can_not_divide_the_model_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"16 devices of h100_sxm.*40 should be divisible"):
            measured(devices=16)
