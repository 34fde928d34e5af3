"""Writes to MLflow: to a tracking server, or to a local store."""

import re
from typing import TYPE_CHECKING, Any, Final

from .sink import Figures, Sink, SinkRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

_METRICS_AT_ONCE: Final = 1000
_PARAMETERS_AT_ONCE: Final = 100
_VALUE_LENGTH: Final = 500
_REFUSED: Final = re.compile(r"[^\w\-. /]")
"""Characters that MLflow refuses in names, as the ``@`` of ``pass@8``."""


class MlflowSink(Sink):
    """A resumed run continues the run of MLflow, whose figures can't be replaced."""

    appends_only = True

    def __init__(self, uri: str | None, experiment: str) -> None:
        self._uri, self._experiment = uri, experiment
        self._client: MlflowClient | None = None
        self._run_id = ""

    def open(self, run: SinkRun, series: str) -> tuple[str, str]:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self._uri)
        if series:
            client.update_run(series, status="RUNNING")
            self._run_id = series
        else:
            self._run_id = self._begin(client, run)
        self._client = client
        return self._run_id, f"{client.tracking_uri}, experiment {self._experiment}, run {self._run_id}"

    def _begin(self, client: "MlflowClient", run: SinkRun) -> str:
        from mlflow.entities import Param

        existing_experiment = client.get_experiment_by_name(self._experiment)
        experiment = (
            client.create_experiment(self._experiment)
            if existing_experiment is None
            else existing_experiment.experiment_id
        )
        run_id: str = client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [Param(_name(key), str(value)[:_VALUE_LENGTH]) for key, value in run.config.items()]
        for at in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            client.log_batch(run_id, params=parameters[at : at + _PARAMETERS_AT_ONCE])
        return run_id

    def write(self, figures: Figures) -> None:
        from mlflow.entities import Metric

        assert self._client is not None, "it was opened"
        time_ms = round(1000 * figures.time_s)
        metrics: list[Any] = [
            Metric(metric_name(key), value, time_ms, figures.step) for key, value in figures.figures.items()
        ]
        for at in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[at : at + _METRICS_AT_ONCE])

    def close(self, failed: bool) -> None:
        assert self._client is not None, "it was opened"
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")


def _name(key: str) -> str:
    return _REFUSED.sub("_", key)


def metric_name(key: str) -> str:
    """Figures of the whole step have the prefix ``step/``: a local store has a file for each metric, and can't have
    ``tokens`` beside ``tokens/solver``."""
    return _name(key if "/" in key else f"step/{key}")
