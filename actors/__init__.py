"""The roles of a run. For the author of a workflow: ``Agent``, ``Query``, ``Rewards``, ``Turn``, ``Environment``,
``Ask``, ``LimitReached``, ``McpServer``, ``ProgramFailed``, ``compute_reward``, ``in_process``, ``open_gateway``,
``run_in_sandbox``, ``run_tools``; of a query source: ``QuerySource``, ``GroupEnd``, ``ReplaySource``; of a group
filter: ``Exclusion``, ``FinishedGroup``; for a client of the experience store: ``StoreApi``.

Names are imported when they are first used. None of them imports torch.
"""

from typing import TYPE_CHECKING

from ..core.base.front_door import lazy_exports

if TYPE_CHECKING:
    from .environments.environment import Ask, Environment
    from .environments.gymnasium_environment import GymnasiumEnvironment
    from .environments.mcp_server import McpServer
    from .environments.openenv_environment import OpenEnvEnvironment
    from .environments.parallel_environment import ParallelEnvironment
    from .environments.process_pool import in_process
    from .environments.reward_calls import compute_reward
    from .environments.sandboxes.sandbox import run_in_sandbox
    from .environments.tool_runs import run_tools
    from .environments.verifiers_environment import verifiers_workflow
    from .errors import LimitReached, ProgramFailed
    from .filters.group_filter import Exclusion, FinishedGroup
    from .gateway.gateway import open_gateway
    from .messages import Query, StoreApi
    from .recipe.query_source import GroupEnd, QuerySource
    from .recipe.sources.replay_source import ReplaySource
    from .workflow import Agent, Rewards, Turn
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "environments.environment": ["Ask", "Environment"],
            "errors": ["LimitReached", "ProgramFailed"],
            "gateway.gateway": ["open_gateway"],
            "environments.gymnasium_environment": ["GymnasiumEnvironment"],
            "environments.mcp_server": ["McpServer"],
            "environments.openenv_environment": ["OpenEnvEnvironment"],
            "environments.parallel_environment": ["ParallelEnvironment"],
            "environments.process_pool": ["in_process"],
            "environments.reward_calls": ["compute_reward"],
            "messages": ["Query", "StoreApi"],
            "recipe.query_source": ["GroupEnd", "QuerySource"],
            "recipe.sources.replay_source": ["ReplaySource"],
            "filters.group_filter": ["Exclusion", "FinishedGroup"],
            "environments.sandboxes.sandbox": ["run_in_sandbox"],
            "environments.tool_runs": ["run_tools"],
            "environments.verifiers_environment": ["verifiers_workflow"],
            "workflow": ["Agent", "Rewards", "Turn"],
        },
    )

__all__ = [
    "Agent",
    "Ask",
    "Environment",
    "Exclusion",
    "FinishedGroup",
    "GroupEnd",
    "GymnasiumEnvironment",
    "LimitReached",
    "McpServer",
    "OpenEnvEnvironment",
    "ParallelEnvironment",
    "ProgramFailed",
    "Query",
    "QuerySource",
    "ReplaySource",
    "Rewards",
    "StoreApi",
    "Turn",
    "compute_reward",
    "in_process",
    "open_gateway",
    "run_in_sandbox",
    "run_tools",
    "verifiers_workflow",
]
