"""flexmarl: trains several LLM agents together with reinforcement learning.

The packages are ``flexmarl.core`` (actor runtime), ``flexmarl.transport`` (Set/Get of training
states), ``flexmarl.actors`` (the five roles) and ``flexmarl.launch`` (processes, files, people).
``flexmarl.Run`` is a run within a program, and ``flexmarl.NodeRequest`` the other hosts that it waits for;
``flexmarl.connect`` reaches a run of another program, and ``flexmarl.Samples`` reads the trajectories of one;
``flexmarl.QuerySource`` is the base of a recipe's own source of queries. They are imported when they are first used.
"""

from typing import TYPE_CHECKING

from .core.base.front_door import lazy_exports

if TYPE_CHECKING:
    from .actors.recipe.query_source import QuerySource
    from .launch.hosts.nodes.joined_cluster import NodeRequest
    from .launch.run.connected_run import connect
    from .launch.run.run import Run
    from .launch.run_folder.samples.reader import Samples
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "actors.recipe.query_source": ["QuerySource"],
            "launch.run.connected_run": ["connect"],
            "launch.hosts.nodes.joined_cluster": ["NodeRequest"],
            "launch.run.run": ["Run"],
            "launch.run_folder.samples.reader": ["Samples"],
        },
    )

__version__ = "0.1.0"

__all__ = ["NodeRequest", "QuerySource", "Run", "Samples", "connect"]
