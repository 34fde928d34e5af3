"""The figures of steps and evaluations for sinks. Pure."""

from ....actors.run_events import Evaluated
from ....actors.step_metrics import StepMetrics
from ...run_folder.json_lines import VERSIONS, metrics_to_json
from ..formatting import number
from .sink import Figures


def figures_of_step(metrics: StepMetrics, time_s: float) -> Figures:
    """Without the evaluation after the step, which is reported as an event of its own."""
    line = metrics_to_json(metrics)
    figures = {
        f"{key}/{policy}": float(version) for key in VERSIONS for policy, version in line.pop(key).items()
    }
    for key, value in line.items():
        if not key.startswith("eval/") and key != "eval_s" and (finite := number(value)) is not None:
            figures[key] = finite
    return Figures("step", metrics.step, time_s, figures)


def figures_of_evaluation(event: Evaluated, time_s: float) -> Figures:
    """The metrics of an evaluation as ``eval/<name>``, and its seconds as ``eval_s``; those that are not finite are
    left out."""
    figures = {
        f"eval/{name}": finite
        for name, value in event.metrics.items()
        if (finite := number(value)) is not None
    }
    return Figures("evaluation", event.step, time_s, figures | {"eval_s": event.eval_s})
