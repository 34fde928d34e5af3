"""Calibration: a device is found again from the seconds that its own rooflines say."""

import json
from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.model_shape import ModelShape
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run.resuming import record
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.calibration import Measured, calibrate
from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.devices import PRESETS, DeviceConfig
from flexmarl.launch.simulate.measured_run import measured_run
from flexmarl.launch.simulate.roofline import EngineLoad, TrainerLoad, engine_times, trainer_times

from .shapes import QWEN_7B, QWEN_14B, QWEN_32B

H100, A100 = PRESETS["H100"], PRESETS["A100"]
RECIPE = Path(__file__).parents[1] / "recipes" / "simulated"


def cluster(device: DeviceConfig) -> ClusterConfig:
    return ClusterConfig(hosts=1, devices=8, device=device)


def played(shape: ModelShape, device: DeviceConfig, ranks: int, devices: int) -> Measured:
    """The figures of a run on ``device``, by its rooflines: decode steps of 32 sequences, prompts that fill the device,
    and ten micro-batches on each rank."""
    engine = engine_times(shape, device, EngineLoad(devices, 2, 40 << 30))
    trainer = trainer_times(shape, cluster(device), TrainerLoad(ranks, 2, 10**9, True))
    trainer = trainer.model_copy(update={"pair_s": 0.0, "exchange_s": 0.0})
    engine = engine.model_copy(
        update={"exchange_token_s": 0.0, "context_token_s": 0.0, "step_s": device.step_s}
    )
    return Measured(
        shape=shape, ranks=ranks, devices=devices, item_bytes=2, checkpoints=True,
        prompt_tokens=1e6, prefill_s=engine.token_s * 1e6,
        decode_steps=1000, decoded_tokens=32_000, decode_s=1000 * engine.decode_s(32, 0),
        trained_tokens=1e6, forwards=10,
        backward_s=sum(trainer.micro_batch_s([100] * 1000, ranks) for _ in range(10)),
        optimizer_s=trainer.optimizer_s,
        versions=10, transfer_s=10 * 2 * shape.parameters / cluster(device).copy_bytes_s(1),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["A100", "H200", "NPU-64GB"])
def test_the_rates_of_a_device_are_found_again(name: str) -> None:
    device = PRESETS[name]
    found = calibrate([played(QWEN_7B, device, 4, 1), played(QWEN_14B, device, 8, 2)], H100).device
    for share, peak in (
        ("product_share", "tflops"),
        ("training_share", "tflops"),
        ("memory_share", "memory_gb_s"),
    ):
        before, after = (getattr(of, share) * getattr(of, peak) for of in (device, found))
        assert after == pytest.approx(before, rel=1e-6), share
    assert found.host_gb_s == pytest.approx(device.host_gb_s * device.link_share)
    assert found.step_s == pytest.approx(device.step_s)


def test_another_size_of_model_takes_the_seconds_that_it_would_take() -> None:
    found = calibrate([played(QWEN_7B, A100, 4, 1)], H100).device
    load = EngineLoad(4, 2, 20 << 30)
    before, after = (
        engine_times(QWEN_32B, device.model_copy(update={"exchange_s": 0.0, "link_gb_s": 300}), load)
        for device in (A100, found)
    )
    for batch in (1, 64, 512):
        assert after.decode_s(batch, 10_000) == pytest.approx(before.decode_s(batch, 10_000), rel=1e-6)


def test_numbers_that_a_run_has_not_measured_are_those_of_the_base() -> None:
    nothing = Measured(QWEN_7B, 1, 1, 2, False)
    assert calibrate([nothing], A100).device == A100 and not calibrate([nothing], A100).sources
    training = Measured(QWEN_7B, 1, 1, 2, False, trained_tokens=1e6, backward_s=300.0)
    found = calibrate([training], A100)
    assert found.device.tflops * found.device.training_share == pytest.approx(
        6 * QWEN_7B.parameters / 300 / 1e6
    )
    assert set(found.sources) == {"tflops", "training_share"} and found.device.memory_gb_s == A100.memory_gb_s


def rows(run: RunDirectory, *figures: dict[str, float]) -> None:
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in figures))


def test_a_run_without_steps_and_a_simulated_one_are_refused(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "")
    record(run, resolve(str(RECIPE), []))
    with pytest.raises(ConfigError, match="0 complete steps: 3 are needed"):
        measured_run(run)
    rows(run, *({"step": float(step)} for step in (1, 2, 3)))
    with pytest.raises(ConfigError, match="simulated policies alone"):
        measured_run(run)


def test_the_figures_of_a_run_are_summed_without_its_first_step(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "")
    record(run, resolve("sort-digits", []))
    of_step = {
        "turns/sorter": 100, "samples/sorter": 100, "mean_tokens/sorter": 6.0, "merged_share/sorter": 0.0,
        "nonzero_advantage_share/sorter": 0.5, "backward_s/sorter": 2.0, "update_s/sorter": 0.5,
        "optimizer_s/sorter": 0.75,
        "transfer_mean_s/sorter": 0.25,
    }  # fmt: skip
    engine = "actor.engine_{}/sorter-0"
    rows(
        run,
        *(
            {
                "step": step,
                **of_step,
                engine.format("prompt_tokens"): 700.0 * step,
                engine.format("prefill_s"): 1.0 * step,
                engine.format("steps"): 20.0 * step,
                engine.format("decoded_tokens"): 600.0 * step,
                engine.format("decode_s"): 3.0 * step,
            }
            for step in (1, 2, 3)
        ),
    )
    sorter, checker = measured_run(run)
    assert (sorter.prompt_tokens, sorter.prefill_s, sorter.decode_steps) == (700.0, 1.0, 20.0)
    assert (sorter.decoded_tokens, sorter.decode_s) == (600.0, 3.0)
    assert sorter.trained_tokens == pytest.approx(2 * 50 * (6 + 7)), (
        "prompts of seven tokens; samples without an advantage are not computed"
    )
    assert (sorter.backward_s, sorter.optimizer_s) == (4.0, 0.5)
    assert sorter.forwards == 2 * 4, "micro-batches of 32"
    assert (sorter.versions, sorter.transfer_s) == (2, 0.5)
    assert checker.backward_s == 0.0 and checker.decode_steps == 0.0
