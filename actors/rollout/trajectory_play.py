"""The way in which a worker's trajectories are played: as one line, as a tree, or along a demonstration."""

from collections.abc import Collection

from ..demonstrations.demonstration import Demonstration, read_demonstrations
from ..environments.demonstrated_play import follow_problem, play_demonstrated
from ..environments.environment import Environments
from ..environments.tree_play import TreeEnd, branch_problem, play_tree
from ..errors import RecipeError
from ..messages import Query
from ..recipe.recipe import Recipe
from ..workflow import Rewards
from .agent_handles import AgentHandles
from .rollout_config import RolloutConfig
from .trajectory import Trajectory


class TrajectoryPlay:
    """``recipe``: its workflow plays. It reads the demonstrations once."""

    def __init__(self, recipe: Recipe, config: RolloutConfig, agents: Collection[str]) -> None:
        """Raises RecipeError for a workflow that ``rollout.tree`` or ``rollout.demonstrations`` can't use, and for a
        file of demonstrations that can't be read."""
        self._recipe, self._rule = recipe, config.demonstrations
        self._demonstrations: dict[str, Demonstration] = {}
        cls = recipe.environment_class
        if config.tree is not None and (problem := branch_problem(cls, config.tree)):
            raise RecipeError(problem)
        if self._rule is not None:
            if problem := follow_problem(cls):
                raise RecipeError(problem)
            self._demonstrations = read_demonstrations(self._rule.file, recipe.folder, agents)

    def demonstration_of(self, query: Query) -> Demonstration | None:
        """Returns the demonstration for training trajectories of ``query``, or None."""
        return self._demonstrations.get(query.text)

    async def play(self, trajectory: Trajectory, handles: AgentHandles) -> Rewards | TreeEnd:
        """Runs the workflow, by the trajectory's rule of branches or its demonstration. Raises what these raise."""
        environments, query = self._recipe.environments, trajectory.query
        if environments is None:
            return await self._recipe.workflow(query, handles)
        if trajectory.rule is not None:
            return await play_tree(environments.new, query, handles, trajectory.rule, trajectory.model)
        if trajectory.demonstration is not None:
            return await self._follow(environments, trajectory, trajectory.demonstration, handles)
        return await self._recipe.workflow(query, handles)

    async def _follow(
        self,
        environments: Environments,
        trajectory: Trajectory,
        demonstration: Demonstration,
        handles: AgentHandles,
    ) -> Rewards:
        assert self._rule is not None, "the trajectory has a demonstration"
        end = await play_demonstrated(
            environments.new(), trajectory.query, handles, demonstration, self._rule
        )
        trajectory.add_figures(end.figures)
        return end.rewards
