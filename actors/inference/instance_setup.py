"""The constructor's argument of every instance."""

from dataclasses import dataclass
from pathlib import Path

from ..messages import ModelConfig
from ..names import PolicyName
from .inference_config import EngineConfig


@dataclass(frozen=True, slots=True)
class InstanceSetup:
    """``policy``: the policy that the instance serves. ``runtime_dir``: the run's directory on tmpfs (mode 0700), with
    the transport's shared memory."""

    policy: PolicyName
    model: ModelConfig
    engine: EngineConfig
    runtime_dir: Path
