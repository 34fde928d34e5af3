"""Calibration: a device is found again from the seconds that its own rooflines say."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.actors.model_shape import ModelShape
from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run.resuming import record
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.calibration import Measured, Work, calibrate
from flexmarl.launch.simulate.cluster_config import ClusterConfig
from flexmarl.launch.simulate.devices import PRESETS, DeviceConfig
from flexmarl.launch.simulate.measured_run import computed_share, measured_run, turn_s
from flexmarl.launch.simulate.roofline import EngineLoad, TrainerLoad, engine_times, trainer_times

from .shapes import QWEN_7B, QWEN_14B, QWEN_32B

H100, A100 = PRESETS["H100"], PRESETS["A100"]
RECIPE = Path(__file__).parents[1] / "recipes" / "simulated"


def cluster(device: DeviceConfig) -> ClusterConfig:
    return ClusterConfig(hosts=1, devices=8, device=device)


def played(
    shape: ModelShape, device: DeviceConfig, ranks: int, devices: int, samples: Sequence[int] = (1000,)
) -> Measured:
    """The figures of a run on ``device``, by its rooflines: decode steps of 32 sequences, prompts that fill the device,
    and micro-batches of ``samples`` of 100 tokens."""
    engine = engine_times(shape, device, EngineLoad(devices, 2, 40 << 30))
    trainer = trainer_times(shape, cluster(device), TrainerLoad(ranks, 2, 10**9, True))
    trainer = trainer.model_copy(update={"pair_s": 0.0, "exchange_s": 0.0})
    engine = engine.model_copy(
        update={"exchange_token_s": 0.0, "context_token_s": 0.0, "step_s": device.step_s}
    )
    return Measured(
        shape=shape, ranks=ranks, devices=devices, item_bytes=2, checkpoints=True,
        prefill=tuple(
            Work(chunks, tokens, chunks * (device.prompts_s + engine.weights_s) + engine.token_s * tokens)
            for chunks, tokens in ((200, 1e6), (100, 1e6))
        ),
        decode=(Work(1000, 32_000, 1000 * engine.decode_s(32, 0)),),
        training=tuple(
            Work(1, 100.0 * count, trainer.micro_batch_s([100] * count, ranks)) for count in samples
        ),
        optimizer_s=trainer.optimizer_s,
        versions=10, transfer_s=10 * 2 * shape.parameters / cluster(device).copy_bytes_s(1),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["A100", "H200", "NPU-64GB"])
def test_the_rates_of_a_device_are_found_again(name: str) -> None:
    device = PRESETS[name]
    found = calibrate([played(QWEN_7B, device, 4, 1), played(QWEN_32B, device, 8, 1)], H100).device
    for share, peak in (
        ("product_share", "tflops"),
        ("training_share", "tflops"),
        ("memory_share", "memory_gb_s"),
        ("update_share", "memory_gb_s"),
    ):
        before, after = (getattr(of, share) * getattr(of, peak) for of in (device, found))
        assert after == pytest.approx(before, rel=1e-4), share
    assert found.host_gb_s == pytest.approx(device.host_gb_s * device.link_share)
    assert found.step_s == pytest.approx(device.step_s, rel=1e-3)


SLOW = A100.model_copy(
    update={"prompts_s": 0.2, "forward_s": 3.0, "element_s": 1e-9, "update_s": 0.02, "step_s": 4e-3}
)
"""A device whose calls take as long as their work."""


def test_the_time_of_a_call_is_told_apart_from_its_work() -> None:
    small = replace(QWEN_7B, parameters=QWEN_7B.parameters // 8)
    found = calibrate(
        [played(shape, SLOW, 4, 1, (40, 100, 400, 1600)) for shape in (small, QWEN_32B)], H100
    ).device
    for key in ("prompts_s", "forward_s", "element_s", "update_s", "step_s"):
        assert getattr(found, key) == pytest.approx(getattr(SLOW, key), rel=0.02), key
    before, after = (
        trainer_times(QWEN_14B, cluster(device), TrainerLoad(2, 2, 10**9, True)).micro_batch_s([100] * 64, 2)
        for device in (SLOW, found.model_copy(update={"link_gb_s": 300}))
    )
    assert after == pytest.approx(before, rel=0.02), "of a size and a batch that were not measured"


def test_a_call_is_counted_as_work_where_the_run_can_not_tell_them_apart() -> None:
    calibration = calibrate([played(QWEN_7B, SLOW, 4, 1, (100, 100, 110))], H100)
    assert {"forward_s", "element_s", "update_s"}.isdisjoint(calibration.sources)
    assert calibration.device.forward_s == 0.0 and "training_share" in calibration.sources
    assert (
        calibration.device.training_share * calibration.device.tflops
        < 0.5 * SLOW.tflops * SLOW.training_share
    )


def test_a_step_that_waited_for_something_else_counts_less() -> None:
    policies = [played(shape, SLOW, 4, 1, (40, 100, 400, 800, 1600) * 3) for shape in (QWEN_7B, QWEN_32B)]
    late = [replace(work, seconds=5 * work.seconds) for work in policies[0].training[:2]]
    disturbed = replace(policies[0], training=(*late, *policies[0].training[2:]))
    found = calibrate([disturbed, policies[1]], H100).device
    assert found.forward_s == pytest.approx(SLOW.forward_s, rel=0.1)


def test_another_size_of_model_takes_the_seconds_that_it_would_take() -> None:
    found = calibrate([played(QWEN_7B, A100, 4, 1)], H100).device
    load = EngineLoad(4, 2, 20 << 30)
    before, after = (
        engine_times(QWEN_32B, device.model_copy(update={"exchange_s": 0.0, "link_gb_s": 300}), load)
        for device in (A100, found)
    )
    for batch in (1, 64, 512):
        assert after.decode_s(batch, 10_000) == pytest.approx(before.decode_s(batch, 10_000), rel=1e-3)


def test_numbers_that_a_run_has_not_measured_are_those_of_the_base() -> None:
    nothing = Measured(QWEN_7B, 1, 1, 2, False)
    assert calibrate([nothing], A100).device == A100 and not calibrate([nothing], A100).sources
    training = Measured(QWEN_7B, 1, 1, 2, False, training=(Work(1, 1e6, 300.0),))
    found = calibrate([training], A100)
    assert found.device.tflops * found.device.training_share == pytest.approx(
        6 * QWEN_7B.parameters / 300 / 1e6, rel=1e-3
    )
    assert set(found.sources) == {"tflops", "training_share"} and found.device.memory_gb_s == A100.memory_gb_s


def test_the_computed_part_of_the_prompts_and_the_time_of_a_turn_are_those_of_the_steps_between_evaluations() -> (
    None
):
    computed, prompts = (f"actor.engine_{kind}_tokens/solver-0" for kind in ("computed", "prompt"))
    rows: list[dict[str, float]] = [
        {prompts: 1000.0, computed: 1000.0, "cpu_s/rollout-0": 3.0, "turns/solver": 500.0},
        {prompts: 1400.0, computed: 1100.0, "cpu_s/rollout-0": 4.0, "turns/solver": 50.0},
        {prompts: 1800.0, computed: 1200.0, "cpu_s/rollout-0": 5.0, "turns/solver": 50.0},
        {prompts: 9800.0, computed: 9200.0, "cpu_s/rollout-0": 9.0, "turns/solver": 50.0},
    ]
    assert computed_share(rows, PolicyName("solver")) == 200 / 800
    assert turn_s(rows, ["solver"]) == 2.0 / 100
    without: list[dict[str, float]] = [{"turns/solver": 1.0}] * 4
    assert computed_share(without, PolicyName("solver")) is None and turn_s(without, ["solver"]) == 0.0


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


def test_the_figures_of_a_run_are_those_of_its_steps_but_the_first(tmp_path: Path) -> None:
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
                engine.format("computed_tokens"): 200.0 * step + 50.0,
                engine.format("prefill_s"): 1.0 * step,
                engine.format("prefill_chunks"): 5.0 * step,
                "actor.turns.sorter-0/router": 100.0 * step,
                engine.format("steps"): 20.0 * step,
                engine.format("decoded_tokens"): 600.0 * step,
                engine.format("decode_s"): 3.0 * step,
            }
            for step in (1, 2, 3)
        ),
    )
    sorter, checker = measured_run(run).policies
    assert sorter.prefill == (Work(5.0, 200.0, 1.0),) and sorter.decode == (Work(20.0, 600.0, 3.0),)
    assert [(work.calls, work.seconds) for work in sorter.training] == [(4, 2.0)] * 2, "micro-batches of 32"
    assert [work.tokens for work in sorter.training] == pytest.approx([50 * (6 + 7)] * 2), (
        "prompts of seven tokens; samples without an advantage are not computed"
    )
    assert sorter.optimizer_s == 0.5
    assert (sorter.versions, sorter.transfer_s) == (2, 0.5)
    assert not checker.decode and all(work.seconds == 0.0 for work in checker.training)
