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


def measured(folder: Path) -> Path:
    run = RunDirectory.create(folder / "run", "")
    record(run, resolve("sort-digits", []))
    step = {"samples/sorter": 100, "mean_tokens/sorter": 6.0, "backward_s/sorter": 2.0}
    run.metrics.write_text("".join(f"{json.dumps({'step': number, **step})}\n" for number in (1, 2, 3)))
    return run.path


def test_the_description_is_a_device_of_a_scenario(tmp_path: Path) -> None:
    run = measured(tmp_path)
    text = CliRunner().invoke(calibrate, [str(run), "--like", "A100"], catch_exceptions=False).output
    device = DeviceConfig.model_validate(yaml.safe_load(text)["device"])
    assert "training_share: 1.0 # measured: forward and backward" in text
    assert "memory_gib: 80.0 # not measured: as A100" in text
    told = json.loads(CliRunner().invoke(calibrate, [str(run), "--json"], catch_exceptions=False).output)
    assert told["device"]["tflops"] == pytest.approx(device.tflops, rel=1e-3)


def test_an_unknown_device_is_refused_by_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="H100, H200, H20"):
        CliRunner().invoke(calibrate, [str(measured(tmp_path)), "--like", "H1"], catch_exceptions=False)
