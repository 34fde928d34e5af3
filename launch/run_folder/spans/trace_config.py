"""The settings of a run's spans."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from ....actors.config_base import Config, Count, Unit, no_bool


class TraceConfig(Config):
    """The spans of the run, for the timeline and `flexmarl trace`."""

    enabled: bool = True
    """Record what each part of the run does, from when to when."""
    sample: Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1)] = 1.0
    """Share of the queries whose trajectories, turns and samples are recorded. Optimizer steps, installs and moves of
    states are recorded always."""
    limit_mib: Annotated[Count, Unit("MiB")] = 256
    """Largest size of the files. When half of it is used, half of the queries are recorded, and so on: a run of any
    length has spans from all of its time."""
