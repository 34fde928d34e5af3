"""The roles of a run. For the author of a workflow: ``Agent``, ``Query``, ``Rewards``, ``Turn``, ``Environment``,
``Ask``, ``LimitReached``, ``in_process``, ``run_tools``; of a query source: ``QuerySource``, ``GroupEnd``,
``ReplaySource``; for a client of the experience store: ``StoreApi``.

Names are imported when they are first used. None of them imports torch.
"""

from typing import TYPE_CHECKING

from ..core.front_door import lazy_exports

if TYPE_CHECKING:
    from .environment import Ask, Environment
    from .errors import LimitReached
    from .gymnasium_environment import GymnasiumEnvironment
    from .messages import Query, StoreApi
    from .parallel_environment import ParallelEnvironment
    from .process_pool import in_process
    from .query_source import GroupEnd, QuerySource
    from .replay_source import ReplaySource
    from .tool_runs import run_tools
    from .verifiers_environment import verifiers_workflow
    from .workflow import Agent, Rewards, Turn
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "environment": ["Ask", "Environment"],
            "errors": ["LimitReached"],
            "gymnasium_environment": ["GymnasiumEnvironment"],
            "parallel_environment": ["ParallelEnvironment"],
            "process_pool": ["in_process"],
            "messages": ["Query", "StoreApi"],
            "query_source": ["GroupEnd", "QuerySource"],
            "replay_source": ["ReplaySource"],
            "tool_runs": ["run_tools"],
            "verifiers_environment": ["verifiers_workflow"],
            "workflow": ["Agent", "Rewards", "Turn"],
        },
    )

__all__ = [
    "Agent",
    "Ask",
    "Environment",
    "GroupEnd",
    "GymnasiumEnvironment",
    "LimitReached",
    "ParallelEnvironment",
    "Query",
    "QuerySource",
    "ReplaySource",
    "Rewards",
    "StoreApi",
    "Turn",
    "in_process",
    "run_tools",
    "verifiers_workflow",
]
