"""Every message that the roles exchange, and the endpoints that they may call on one another.

Roles never import each other: they share data, and it is here, by subject. A ``...Api`` class lists a role's endpoints
with their signatures; the actor runtime validates arguments and results against them.
"""

from .evaluating import EvaluationSampling
from .experience import (
    MOST_VERSION_CHANGES,
    LeasedBatch,
    Sample,
    Selection,
    StoreApi,
    StoreStatistics,
    TableStatistics,
    UnjudgedSample,
)
from .generating import Chat, GenerateRequest, Generation, InstanceApi, Loaded, TextApi, TextTo, VersionRange
from .model_config import LoraConfig, ModelConfig
from .recording import ArchiveApi
from .rollouts import (
    AgentTurns,
    EvaluationEnd,
    EvaluationTrajectory,
    GroupClosed,
    Grouping,
    Query,
    QueryAnswer,
    RewardUse,
    RolloutApi,
    TrajectoryFailure,
    WorkerIncarnation,
    refuse_equal_ids,
)
from .routing import RouteAssigned, RouterApi, RouteRefused, RouteRequest, Routes, TurnEnded
from .running import WORK_TIMEOUT_S, ConsoleApi, OrchestratorApi, RunResult, SupervisorApi
from .slots import (
    BaseState,
    GangPlace,
    HostState,
    Moved,
    SavedRest,
    SlotApi,
    SlotLife,
    SlotStepped,
    StateBytes,
    Suspended,
)
from .training import (
    MicroBatchTrained,
    PolicyStepped,
    Published,
    StepStats,
    TrainerApi,
)
from .truncation import Truncation
from .weights_config import WeightsConfig

__all__ = [
    "MOST_VERSION_CHANGES",
    "WORK_TIMEOUT_S",
    "AgentTurns",
    "ArchiveApi",
    "BaseState",
    "Chat",
    "ConsoleApi",
    "EvaluationEnd",
    "EvaluationSampling",
    "EvaluationTrajectory",
    "GangPlace",
    "GenerateRequest",
    "Generation",
    "GroupClosed",
    "Grouping",
    "HostState",
    "InstanceApi",
    "LeasedBatch",
    "Loaded",
    "LoraConfig",
    "MicroBatchTrained",
    "ModelConfig",
    "Moved",
    "OrchestratorApi",
    "PolicyStepped",
    "Published",
    "Query",
    "QueryAnswer",
    "RewardUse",
    "RolloutApi",
    "RouteAssigned",
    "RouteRefused",
    "RouteRequest",
    "RouterApi",
    "Routes",
    "RunResult",
    "Sample",
    "SavedRest",
    "Selection",
    "SlotApi",
    "SlotLife",
    "SlotStepped",
    "StateBytes",
    "StepStats",
    "StoreApi",
    "StoreStatistics",
    "SupervisorApi",
    "Suspended",
    "TableStatistics",
    "TextApi",
    "TextTo",
    "TrainerApi",
    "TrajectoryFailure",
    "Truncation",
    "TurnEnded",
    "UnjudgedSample",
    "VersionRange",
    "WeightsConfig",
    "WorkerIncarnation",
    "refuse_equal_ids",
]
