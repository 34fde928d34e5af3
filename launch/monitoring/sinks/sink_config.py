"""The section ``sinks`` of the configuration: a list whose entries are names, or mappings with a name and more keys."""

import contextlib
import importlib.util
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator

from ....actors.config_base import Config, each_label_once
from .function_sink import FunctionSink
from .mlflow_sink import MlflowSink
from .opentelemetry_sink import OpentelemetrySink
from .prometheus_sink import PrometheusSink
from .sink import Sink
from .tensorboard_sink import TensorboardSink
from .wandb_sink import WandbMode, WandbSink

_FUNCTION: Final = re.compile(r"[\w./-]+\.py:[A-Za-z_]\w*")


class _OptionalSink(Config):
    module: ClassVar[str]
    """The package that it needs."""

    @property
    def label(self) -> str:
        """Its name in events and messages."""
        return str(getattr(self, "name"))  # noqa: B009  # of the classes below

    def unavailable(self) -> str | None:
        """The reason for which it can't be used here, None if it can."""
        with contextlib.suppress(ModuleNotFoundError):  # of the package that a module is in
            if importlib.util.find_spec(self.module) is not None:
                return None
        return f"{self.module} is not installed: pip install 'flexmarl[{self.label}]'"

    def sink(self) -> Sink:
        """The sink with these settings, which is not open yet."""
        raise NotImplementedError


class TensorboardConfig(_OptionalSink):
    """Event files for TensorBoard."""

    module = "tensorboard"
    name: Literal["tensorboard"] = "tensorboard"
    """Name of the sink, which chooses it; so in the sections below."""
    folder: Path | None = None
    """Folder of the event files of all runs, each in a folder with the run's name. `null`: `tensorboard` in the run's
    own folder."""

    def sink(self) -> Sink:
        return TensorboardSink(self.folder)


class WandbConfig(_OptionalSink):
    """A run of Weights & Biases."""

    module = "wandb"
    name: Literal["wandb"] = "wandb"
    """Name of the sink."""
    mode: WandbMode = "online"
    """`online`, or `offline`: into the run's folder."""
    project: str = "flexmarl"
    """Project that the run belongs to, as in `wandb.init`."""
    entity: str | None = None
    """User or team of the project, as in `wandb.init`."""
    group: str | None = None
    """Group of runs that the run belongs to, as in `wandb.init`."""

    def sink(self) -> Sink:
        return WandbSink(self.mode, self.project, self.entity, self.group)


class MlflowConfig(_OptionalSink):
    """A run of an MLflow experiment."""

    module = "mlflow"
    name: Literal["mlflow"] = "mlflow"
    """Name of the sink."""
    uri: str | None = None
    """Address of the tracking server or store. `null`: MLflow's own default, such as `MLFLOW_TRACKING_URI`."""
    experiment: str = "flexmarl"
    """Experiment that the run is added to."""

    def sink(self) -> Sink:
        return MlflowSink(self.uri, self.experiment)


class PrometheusConfig(_OptionalSink):
    """A page that Prometheus reads."""

    module = "prometheus_client"
    name: Literal["prometheus"] = "prometheus"
    """Name of the sink."""
    port: Annotated[int, Field(strict=True, ge=0, le=65535)] = 9464
    """Port of the page `/metrics`. 0: any free one, which the console shows."""
    address: str = "127.0.0.1"
    """Address at which the page is served, by default for this host alone."""

    def sink(self) -> Sink:
        return PrometheusSink(self.port, self.address)


class OpentelemetryConfig(_OptionalSink):
    """A collector of OpenTelemetry, which also gets the spans."""

    module = "opentelemetry.exporter.otlp.proto.http"
    name: Literal["opentelemetry"] = "opentelemetry"
    """Name of the sink."""
    endpoint: Annotated[str, Field(pattern="^https?://")] | None = None
    """Address of the collector, such as `http://127.0.0.1:4318`. `null`: of the variable `OTEL_EXPORTER_OTLP_ENDPOINT`.
    Headers, certificates and timeouts are set by the others that begin with `OTEL_EXPORTER_OTLP_`."""
    spans: bool = True
    """Send the spans of the run too, after each step."""

    def sink(self) -> Sink:
        return OpentelemetrySink(self.endpoint, spans=self.spans)


class FunctionConfig(Config):
    """A function of the recipe that gets the metrics."""

    name: Literal["function"] = "function"
    """Name of the sink."""
    function: str
    """`file.py:function` within the recipe's folder."""

    @field_validator("function")
    @classmethod
    def _is_in_a_file(cls, function: str) -> str:
        if not _FUNCTION.fullmatch(function):
            raise ValueError("write file.py:function, of a file in the recipe's folder")
        return function

    @property
    def label(self) -> str:
        """Its name in events and messages."""
        return self.function

    def unavailable(self) -> str | None:
        """None: it needs no package."""
        return None

    def sink(self) -> Sink:
        """The sink; the file is read when the sink is opened, in its thread."""
        return FunctionSink(self.function)


def _mapping(entry: Any) -> Any:
    """An entry that is a name alone, as a mapping."""
    if not isinstance(entry, str):
        return entry
    return {"name": "function", "function": entry} if ":" in entry else {"name": entry}


def _name_of(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, dict) else getattr(entry, "name", None)


SinkConfig = Annotated[
    Annotated[TensorboardConfig, Tag("tensorboard")]
    | Annotated[WandbConfig, Tag("wandb")]
    | Annotated[MlflowConfig, Tag("mlflow")]
    | Annotated[PrometheusConfig, Tag("prometheus")]
    | Annotated[OpentelemetryConfig, Tag("opentelemetry")]
    | Annotated[FunctionConfig, Tag("function")],
    Discriminator(_name_of),
    BeforeValidator(_mapping),
]


SinkConfigs = Annotated[tuple[SinkConfig, ...], AfterValidator(each_label_once)]
