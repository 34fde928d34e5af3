"""Sources of an engine's times by their names in ``cluster.engine_times``. A source is a file and a row here."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from ...actors.inference.engine_times import RooflineTimes
from ...actors.inference.measured_times import MeasuredTimes
from ...actors.messages import ModelConfig
from ...actors.model_shape import ModelShape
from .cluster_config import ClusterConfig, EngineSource
from .measured_tables import measured_engine_times
from .roofline import EngineLoad, engine_times

Times = RooflineTimes | MeasuredTimes
Source = Callable[[ModelConfig, ModelShape, ClusterConfig, EngineLoad, int], Times]
"""Gives the times of a model with its shape, on a cluster, with a load, and up to a number of sequences. Raises
ConfigError."""


def _roofline(
    model: ModelConfig, shape: ModelShape, cluster: ClusterConfig, load: EngineLoad, max_batch: int
) -> RooflineTimes:
    return engine_times(shape, cluster.device, load)


_SOURCES: Final[Mapping[EngineSource, Source]] = MappingProxyType(
    {"roofline": _roofline, "measured": measured_engine_times}
)


def times_of_engine(
    model: ModelConfig, shape: ModelShape, cluster: ClusterConfig, load: EngineLoad, max_batch: int
) -> Times:
    """The times from the cluster's source. Raises ConfigError if the source has none."""
    return _SOURCES[cluster.engine_times](model, shape, cluster, load, max_batch)
