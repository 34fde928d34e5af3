"""The command ``flexmarl calibrate``."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.cli.calibrate import calibrate
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run.resuming import record
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.devices import DeviceConfig


def measured(folder: Path, seconds: float = 2.0) -> Path:
    run = RunDirectory.create(folder / "run", "")
    record(run, resolve("sort-digits", []))
    step = {
        "samples/sorter": 100, "mean_tokens/sorter": 6.0, "backward_s/sorter": seconds, "turns/sorter": 100,
    }  # fmt: skip
    rows = [{"step": number, **step, "cpu_s/rollout-0": 0.2 * number} for number in (1, 2, 3)]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return run.path


def test_the_description_is_a_device_of_a_scenario(tmp_path: Path) -> None:
    run = measured(tmp_path)
    text = CliRunner().invoke(calibrate, [str(run), "--like", "A100"], catch_exceptions=False).output
    device = DeviceConfig.model_validate(yaml.safe_load(text)["device"])
    assert "training_share: 1.0 # measured: forward and backward" in text
    assert "memory_gib: 80.0 # not measured: as A100" in text
    assert yaml.safe_load(text)["workload"] == {"turn_s": 0.002}
    assert "turn_s: 0.002 # measured: the rollout worker's processor, for each turn\n" in text
    told = json.loads(CliRunner().invoke(calibrate, [str(run), "--json"], catch_exceptions=False).output)
    assert told["workload"] == {"turn_s": pytest.approx(0.002)}
    assert told["device"]["tflops"] == pytest.approx(device.tflops, rel=1e-3)


def test_several_runs_are_fitted_together(tmp_path: Path) -> None:
    runs = [
        str(measured(tmp_path / name, seconds)) for name, seconds in (("a", 2.0), ("b", 2.0), ("slow", 8.0))
    ]
    rates = [
        json.loads(CliRunner().invoke(calibrate, [*words, "--json"], catch_exceptions=False).output)[
            "device"
        ]["tflops"]
        for words in (runs[:1], runs)
    ]
    assert rates[0] >= rates[1] > 0.9 * rates[0], "the slow one counts less"


def test_an_unknown_device_is_refused_by_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="H100, H200, H20"):
        CliRunner().invoke(calibrate, [str(measured(tmp_path)), "--like", "H1"], catch_exceptions=False)
