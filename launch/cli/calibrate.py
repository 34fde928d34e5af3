"""The command ``flexmarl calibrate``."""

import json
from pathlib import Path
from statistics import median

import click
import yaml

from ...actors.errors import ConfigError
from ...core.base.texts import guess
from ..monitoring.console.echo import echo
from ..run_folder.run_directory import RunDirectory
from ..simulate.calibration import Calibration
from ..simulate.calibration import calibrate as fit
from ..simulate.devices import PRESETS
from ..simulate.measured_run import measured_run
from .options import RUN, as_json_option


@click.command()
@click.argument("runs", type=RUN, nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--like",
    default="H100",
    show_default=True,
    metavar="DEVICE",
    help="The named device whose numbers stand for those that a run does not measure.",
)
@as_json_option
def calibrate(runs: tuple[Path, ...], like: str, as_json: bool) -> int:
    """Describe the machine that a run has computed on, by the seconds that it took: for `cluster.device` of a scenario.

    RUN is the folder of a run with at least three steps. Its prefill, decode steps, forward and backward, optimizer
    steps and installs become rates; the first step does not count. Several runs on one machine are fitted together: a
    run that was slowed by something else counts less. The processor's time of a turn is printed as `workload.turn_s`.

    \b
    Examples:
      flexmarl calibrate runs/first
      flexmarl calibrate runs/first --like A100 > device.yaml
      flexmarl calibrate runs/first runs/second --json
    """
    if like not in PRESETS:
        raise ConfigError(
            f"--like {like}: there is no such device; there are: {', '.join(PRESETS)}{guess(like, [*PRESETS])}"
        )
    measured = [measured_run(RunDirectory.recorded(run)) for run in runs]
    calibration = fit([policy for run in measured for policy in run.policies], PRESETS[like])
    turn_s = median(run.turn_s for run in measured)
    echo(_json(calibration, turn_s) if as_json else _yaml(calibration, turn_s, like), nl=as_json)
    return 0


def _json(calibration: Calibration, turn_s: float) -> str:
    return json.dumps(
        {
            "device": calibration.device.model_dump(),
            "workload": {"turn_s": turn_s},
            "measured": dict(calibration.sources),
        }
    )


def _yaml(calibration: Calibration, turn_s: float, like: str) -> str:
    """The sections, each number with its source."""
    lines = ["device:"]
    for key, value in calibration.device.model_dump().items():
        written = yaml.safe_dump(value if isinstance(value, str) else float(f"{value:.4g}")).split("\n")[0]
        source = calibration.sources.get(key)
        as_base = f"as {like}" if value == getattr(PRESETS[like], key) else f"the rate of {like}"
        lines.append(
            f"  {key}: {written} # {f'measured: {source}' if source else f'not measured: {as_base}'}"
        )
    source = "measured: the rollout worker's processor, for each turn" if turn_s else "not measured"
    return "\n".join([*lines, "workload:", f"  turn_s: {turn_s:.4g} # {source}"]) + "\n"
