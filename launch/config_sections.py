"""The sections of an agent and of a policy in a run's configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, field_validator, model_validator

from ..actors.config_base import Config, Count, Natural, Seconds
from ..actors.declared_columns import Column, check_names
from ..actors.errors import ConfigError
from ..actors.inference.inference_config import EmbeddedEngineConfig, SimulatedEngineConfig
from ..actors.messages import ModelConfig
from ..actors.names import PolicyName
from ..actors.rollout.rollout_config import SamplingConfig
from ..actors.store_client import ARRAY_COLUMNS, SCALAR_COLUMNS
from ..actors.trainer.backends.simulated_policy import SimulatedTrainerConfig
from ..actors.trainer.trainer_config import CreditConfig, LossConfig, OptimizerConfig, SftConfig
from ..core.protocol.session import DEFAULT_SETTINGS, Settings
from ..core.supervision.restart_policy import Intensity


@contextmanager
def config_errors() -> Iterator[None]:
    """Turns a ConfigError of a validator's block into the ValueError that pydantic adds the key to."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from None


class AgentConfig(Config):
    """One LLM role: its policy by name, sampling and credit assignment.

    ``columns``: of its samples, by name, beyond those that training needs; the workflow fills them by ``Turn.write``.
    """

    policy: PolicyName
    sampling: SamplingConfig = SamplingConfig()
    algorithm: CreditConfig = CreditConfig()
    columns: Annotated[dict[str, Column], Field(default_factory=dict)]

    @field_validator("columns")
    @classmethod
    def _column_names(cls, columns: dict[str, Column]) -> dict[str, Column]:
        with config_errors():
            check_names(columns, (*SCALAR_COLUMNS, *ARRAY_COLUMNS))
        for name, column in columns.items():
            if column.type == "tensor" and column.dtype is not None and column.dtype not in np.sctypeDict:
                raise ValueError(
                    f"column {name!r}: NumPy has no {column.dtype}, so that no workflow could write it"
                )
        return columns


class PolicyConfig(Config):
    """One set of trainable weights, for one agent or several. ``instances`` engines generate with it.

    ``global_batch``: samples of one optimizer step, by default all of a step's queries. A number is for ``async``:
    samples of a step beyond it are carried to the next, at most once; with fewer the policy waits for more.
    ``init_from``: the folder of a saved policy, whose weights this one starts from (``init_from.py``).
    """

    model: ModelConfig
    instances: Count = 1
    engine: EmbeddedEngineConfig = EmbeddedEngineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: LossConfig = LossConfig()
    sft: SftConfig = SftConfig()
    global_batch: Count | None = None
    init_from: Path | None = None

    @property
    def simulated(self) -> bool:
        """True if generating and training take time and compute nothing, for tests and measurements:
        ``model.config`` is ``{model_type: simulated, engine: {...}, trainer: {...}}``."""
        return self.model.config is not None and self.model.config["model_type"] == "simulated"

    @property
    def simulated_engine(self) -> SimulatedEngineConfig:
        """Settings from a simulated model's config."""
        shared = {"max_batch": self.engine.max_batch, "max_context": self.engine.max_context}
        return SimulatedEngineConfig.model_validate(shared | (self.model.config or {}).get("engine", {}))

    @property
    def simulated_trainer(self) -> SimulatedTrainerConfig:
        """Settings from a simulated model's config."""
        return SimulatedTrainerConfig.model_validate((self.model.config or {}).get("trainer", {}))

    @model_validator(mode="after")
    def _simulation_is_known(self) -> "PolicyConfig":
        if self.simulated:
            _ = self.simulated_engine, self.simulated_trainer
        return self


class SupervisionConfig(Config):
    """The time after which an actor is lost. One that is needed is pinged every ``heartbeat_s``; a call to it fails
    within ``missed_heartbeats`` without a sign of life. One that is not needed is lost if its process has not answered
    the launcher for ``silence_s``.

    Actors that can be restarted alone are, together at most ``max_restarts`` times within any ``restart_period_s``; one
    more loss ends the run. The loss of any other actor ends the run at once."""

    heartbeat_s: Seconds = DEFAULT_SETTINGS.heartbeat_s
    missed_heartbeats: Annotated[Count, Field(ge=2)] = DEFAULT_SETTINGS.missed_heartbeats
    silence_s: Seconds = 300.0
    max_restarts: Natural = 10
    restart_period_s: Seconds = 3600.0

    def settings(self) -> Settings:
        return Settings(heartbeat_s=self.heartbeat_s, missed_heartbeats=self.missed_heartbeats)

    def intensity(self) -> Intensity:
        return Intensity(self.max_restarts, self.restart_period_s)
