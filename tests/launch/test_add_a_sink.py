"""The sink that the page adds: two files of the package, and the contract of sinks holds."""

import csv
from pathlib import Path
from types import ModuleType

import pytest

from ..checkouts import changed_files, new_files
from ..contracts import test_sinks as contract

PAGE = Path(__file__).parents[2] / "launch" / "docs" / "add-a-sink.md"
SINK = "launch/monitoring/sinks/csv_sink.py"


@pytest.fixture
def written(tmp_path: Path) -> contract.Written:
    module = ModuleType("csv_sink")
    module.__package__ = "flexmarl.launch.monitoring.sinks"
    exec(compile(new_files(PAGE)[SINK], str(PAGE), "exec"), vars(module))

    def read() -> contract.Curves:
        curves: contract.Curves = {}
        with (tmp_path / "figures.csv").open(newline="") as file:
            for step, name, value in csv.reader(file):
                points = curves.setdefault(name, {})
                assert int(step) not in points, f"{name} has two values of step {step}"
                points[int(step)] = float(value)
        return curves

    return contract.Written(lambda: module.CsvSink("figures.csv"), read, replaces=False)


def test_its_file_and_its_class_are_all() -> None:
    assert changed_files(PAGE) == {SINK, "launch/monitoring/sinks/sink_config.py"}


async def test_each_figure_is_there_once(written: contract.Written, tmp_path: Path) -> None:
    await contract.test_each_figure_is_there_once_by_its_name_and_step(written, tmp_path)


async def test_a_resumed_run_continues_the_series(written: contract.Written, tmp_path: Path) -> None:
    await contract.test_a_resumed_run_continues_the_series_without_doubled_steps(written, tmp_path)
