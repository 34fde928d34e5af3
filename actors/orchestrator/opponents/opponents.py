"""The policies of a run that are not trained: the pools of past versions among them.

A step of a pool ``rival`` of the policy ``solver``, and the events that each part waits for:

    begin(step)   the results of the steps before are in (strict, sync: all of their games have ended)
                  solver as it is after the step before becomes a member, if it is its turn, and so do its exploiters
                  a member is drawn: a pure function of seed, step and results, so that a resumed run repeats it
    bring(step)   waits for that version of solver, and writes its weights to the run's folder;
                  publishes the drawn member as a new version of rival, whose turns of the step wait for it

Solver does not step before its weights are written (``wait_kept``). The files of members that neither the pool nor a
checkpoint names any more are removed.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from ....core.durable.files import make_private_folder, replace_private
from ....core.system import ActorSystem
from ...errors import CheckpointIncomplete, SamplesLost
from ...figures import Numbers, StepFigures
from ...json_files import as_text, read_json
from ...messages import (
    EvaluationEnd,
    EvaluationTrajectory,
    GroupClosed,
    Published,
    Query,
    RouterApi,
    TrainerApi,
    TrajectoryFailure,
)
from ...names import AgentName, PolicyName, Step, Version
from ...recipe.recipe import Recipe
from ...run_events import OpponentDrawn
from .. import checkpoint
from ..orchestrator_config import PoolOfConfig
from .meta_game import meta_game, mixture
from .past_pool import Game, Member, PastPool
from .rules import RULES, Rule, draw_member, latest, nash, pfsp, rule_of_function


@dataclass(frozen=True, slots=True)
class FrozenPolicy:
    """A policy that is not trained. ``agents``: those that use it. ``pool_of``: None if its weights never change.
    ``against``: the agents that play against a pool."""

    agents: tuple[AgentName, ...]
    pool_of: PoolOfConfig | None = None
    against: tuple[AgentName, ...] = ()


Play = Callable[[list[EvaluationTrajectory], dict[PolicyName, Version]], Awaitable[list[EvaluationEnd]]]
"""Plays trajectories outside of training with versions of the policies; returns their ends in the same order."""


@dataclass(frozen=True, slots=True)
class OpponentsSetup:
    """``folder``: of the members' weights and the pools' results, in the run's folder. ``checkpoints``: the folder of
    the run's checkpoints. ``seed``: of the run. ``resumed``: the pools of a run that is resumed. ``save_every``: steps
    between checkpoints, 0 for none but the last."""

    policies: dict[PolicyName, FrozenPolicy] = field(default_factory=dict)
    folder: Path = Path()
    checkpoints: Path = Path()
    seed: int = 0
    resumed: dict[PolicyName, PastPool] = field(default_factory=dict)
    save_every: int = 0


class Opponents:
    """``tell_console``: sends the console a message. ``system``: the orchestrator's, once it has one."""

    def __init__(
        self,
        setup: OpponentsSetup,
        recipe: Recipe,
        trainer: TrainerApi,
        router: RouterApi,
        tell_console: Callable[..., Awaitable[None]],
        system: Callable[[], ActorSystem],
    ) -> None:
        """Raises RecipeError if the recipe has no function that a pool's rule names."""
        self._trainer, self._router, self._tell_console = trainer, router, tell_console
        self._setup, self._system = setup, system
        self._versions = dict.fromkeys(setup.policies, Version(0))
        self._published: dict[PolicyName, Published] = {}
        """The newest of each policy that is trained."""
        self._writing = asyncio.Lock()
        self._news = asyncio.Condition()
        """Notified of new weights, and of members whose weights are written."""
        self.agents = tuple(agent for policy in setup.policies.values() for agent in policy.agents)
        self._pools = {
            name: _Pool(name, policy.pool_of, (policy.against, policy.agents), recipe, setup)
            for name, policy in setup.policies.items()
            if policy.pool_of is not None
        }

    # ------------------------------------------------------------------ versions

    def with_frozen(self, versions: Mapping[PolicyName, Version]) -> dict[PolicyName, Version]:
        """``versions`` of the policies that are trained, and those of the others now."""
        return {**versions, **self._versions}

    async def trained(self, published: Published) -> None:
        """A policy that is trained has these weights from now on."""
        async with self._news:
            self._published[published.policy] = published
            self._news.notify_all()

    async def start(self) -> None:
        """Publishes the first weights of every policy, after the first of those that are trained."""
        for policy in self._versions:
            if policy not in self._pools:
                await self._router.publish(await self._trainer.publish(policy))
        for policy, pool in self._pools.items():
            if not pool.state.members:  # a new run
                pool.join(Step(0), {name: self._published[name].version for name in pool.config.sources})
                pool.state.play(pool.state.members[0])
            self._versions[policy] = pool.state.version
            await self._keep(pool)
            await self._publish(pool, pool.state.playing, pool.state.version)

    # ------------------------------------------------------------------ a step

    def begin(self, step: Step, versions: Mapping[PolicyName, Version]) -> list[Coroutine[Any, Any, None]]:
        """Draws the members that play ``step``, which begins with ``versions``; returns the work that publishes
        them."""
        work: list[Coroutine[Any, Any, None]] = []
        for policy, pool in self._pools.items():
            changed = pool.begin(step, versions)
            state = pool.state
            self._versions[policy] = state.version
            event = OpponentDrawn(step, policy, state.member, state.version, len(state.members))
            work.append(self._play(pool, event, state.playing, changed=changed))
        return work

    async def _play(self, pool: "_Pool", event: OpponentDrawn, member: Member, *, changed: bool) -> None:
        async with pool.publishing:
            if event.member in pool.to_keep:
                await self._keep(pool)
            if changed:
                await self._publish(pool, member, event.version)
            await self._keep(pool)  # of another member: the one that plays does not wait for it
            await self._system().run_blocking(pool.remove_files, self._setup.checkpoints)
        await self._tell_console("event", event)

    async def _publish(self, pool: "_Pool", member: Member, version: Version) -> None:
        published = await self._trainer.publish_file(pool.policy, version, str(pool.file(member)))
        await self._router.publish(published)

    async def _keep(self, pool: "_Pool") -> None:
        """Writes the weights of the new members."""
        for name, member in list(pool.to_keep.items()):
            async with self._news:
                while self._published[member.policy].version < member.version:
                    await self._news.wait()
            await self._trainer.keep(self._published[member.policy], str(pool.file(member)))
            async with self._news:
                del pool.to_keep[name]
                self._news.notify_all()

    async def wait_kept(self, policy: PolicyName | None = None) -> None:
        """Returns when the weights that ``policy`` has now are written, if they are those of a member; None: those of
        every policy."""

        def are_files_written() -> bool:
            return not any(
                member.version <= self._published[member.policy].version
                for pool in self._pools.values()
                for member in pool.to_keep.values()
                if policy in (None, member.policy)
            )

        async with self._news:
            await self._news.wait_for(are_files_written)

    # ------------------------------------------------------------------ a tournament

    async def tournament(
        self,
        step: Step,
        versions: Mapping[PolicyName, Version],
        queries: Sequence[Query],
        first: int,
        play: Play,
    ) -> list[TrajectoryFailure]:
        """Plays the matches of the policies as they are after ``step``, at its evaluation: no step is under way. They
        join their pools first, and play ``queries`` against each other member.

        ``first``: the first free number of a query's trajectories. Returns the trajectories that failed.
        """
        failures: list[TrajectoryFailure] = []
        for pool in self._pools.values():
            if pool.config.matches and pool.config.joins_after(step):
                async with pool.publishing:
                    pool.join(step, versions)
                    await self._keep(pool)
                    for member in pool.strangers():
                        work = [
                            EvaluationTrajectory(query, first + number, None)
                            for number in range(pool.config.matches)
                            for query in queries
                        ]
                        first += pool.config.matches
                        if pool.state.play(member):
                            self._versions[pool.policy] = pool.state.version
                            await self._publish(pool, member, pool.state.version)
                        ends = await play(work, self.with_frozen(versions))
                        failures += pool.count(ends)
        return failures

    # ------------------------------------------------------------------ results

    def closed(self, group: GroupClosed) -> None:
        """Keeps the games of a group until its step is complete. A group that begins again, and closes again, counts
        once."""
        for pool in self._pools.values():
            games = [Game(*game) for game in group.games.get(pool.policy, ())]
            pool.results.setdefault(group.step, {})[group.query] = games

    def lost(self, group: GroupClosed) -> None:
        """A group begins again. Raises SamplesLost if another member plays by now."""
        for pool in self._pools.values():
            if pool.step != group.step:
                raise SamplesLost(
                    f"step {group.step}: samples are lost with their host after {pool.policy} has played the step: the "
                    "run can continue from its last checkpoint"
                )
            pool.results.get(group.step, {}).pop(group.query, None)

    def metrics(self, step: Step) -> dict[PolicyName, Numbers]:
        """Figures of a complete step, to be asked for once."""
        return {policy: pool.metrics_of(step) for policy, pool in self._pools.items()}

    async def write_results(self) -> None:
        """Writes ratings and pay-offs of each pool to ``<policy>.json``, off the event loop; one call after the
        other."""
        async with self._writing:
            for pool in self._pools.values():
                await self._system().run_blocking(pool.write_results, pool.results_now())

    # ------------------------------------------------------------------ checkpoints

    def states_after(self, step: Step) -> dict[PolicyName, PastPool]:
        """The pools after ``step``, without anything of later steps."""
        return {policy: pool.state_after(step) for policy, pool in self._pools.items()}

    def committed(self, step: Step) -> None:
        """Forgets the states before ``step``: no checkpoint of an earlier step will be made."""
        for pool in self._pools.values():
            pool.forget_states_before(step)


class _Pool:
    """One pool. ``state``: with the results of all steps before ``step``, the one that is under way."""

    def __init__(
        self,
        policy: PolicyName,
        config: PoolOfConfig,
        sides: tuple[Collection[AgentName], Collection[AgentName]],
        recipe: Recipe,
        setup: OpponentsSetup,
    ) -> None:
        """``sides``: the agents against the pool, and its own."""
        self.policy, self.config, self._sides = policy, config, sides
        self.state = copy.deepcopy(setup.resumed.get(policy, PastPool()))
        self.step = self._settled = Step(0)
        self.results: dict[Step, dict[str, list[Game]]] = {}
        """Games by step and query."""
        self.to_keep: dict[str, Member] = {}
        """New members whose weights are not written yet, by name."""
        self.publishing = asyncio.Lock()
        self._rule, self._seed, self._folder = _rule_of(config, recipe), setup.seed, setup.folder
        self._save_every = setup.save_every
        self._after: dict[Step, PastPool] = {}
        """The state after each step that may still be saved."""
        self._metrics: dict[Step, Numbers] = {}

    def begin(self, step: Step, versions: Mapping[PolicyName, Version]) -> bool:
        """True if another member plays ``step`` than the step before. ``versions``: of the policies in training."""
        before = Step(step - 1)
        self._settle(before)
        self._after = {step: state for step, state in self._after.items() if self._may_be_saved(step, before)}
        self._after[before] = copy.deepcopy(self.state)
        if self.config.joins_after(before):
            self.join(before, versions)
        self.step = step
        member = draw_member(self._rule, self.state, self.config.trainee, self._seed, self.policy, step)
        return self.state.play(member)

    def join(self, step: Step, versions: Mapping[PolicyName, Version]) -> None:
        """The policies as they are after ``step`` become members; the pool's own policy is the newest."""
        for source in reversed(self.config.sources):
            if self.state.add(source, step, versions[source], self.config.size):
                member = self.state.members[-1]
                self.to_keep[member.name] = member

    def _may_be_saved(self, step: Step, newest: Step) -> bool:
        """True for the steps of checkpoints, and for the last ones: a run that is asked to stop saves where it ends."""
        return step >= newest - 1 or (self._save_every > 0 and step % self._save_every == 0)

    def _settle(self, step: Step) -> None:
        """Adds the results of a step whose games have all ended: in the order of the queries' names, whichever ended
        first."""
        by_query = self.results.pop(step, {})
        games = [game for query in sorted(by_query) for game in by_query[query]]
        if step != self.step or step <= self._settled:
            return
        self._settled = step
        self.state.played(games)
        if not self.config.matches:
            self.state.count(games, self.config.trainee)
        member = self.state.playing
        figures = StepFigures("opponent")
        figures.update({"opponent_step": member.step, "opponent_games": len(games)})
        for game in games:
            figures.update({"opponent_score": game.score, "opponent_payoff": game.reward})
        figures.update({"opponent_elo": member.elo, "elo": self.state.elo})
        newest = self.state.newest_of(self.config.trainee)
        if newest is not None:
            wins = meta_game(self.state.members, self.state.payoffs)[:, self.state.members.index(newest)]
            figures.update({"opponent_gap": float(wins.max())})
        self._metrics[step] = figures.numbers()

    def strangers(self) -> list[Member]:
        """The members but for the newest version of the policy in training."""
        newest = self.state.newest_of(self.config.trainee)
        return [member for member in self.state.members if member is not newest]

    def count(self, ends: Sequence[EvaluationEnd]) -> list[TrajectoryFailure]:
        """Counts the games of matches against the member that plays; returns the trajectories that failed."""
        games = []
        for end in ends:
            sides = [[end.rewards[agent] for agent in side if agent in end.rewards] for side in self._sides]
            if all(sides):
                games.append(Game(fmean(sides[0]), fmean(sides[1])))
        self.state.count(games, self.config.trainee)
        return [end.failure for end in ends if end.failure is not None]

    def metrics_of(self, step: Step) -> Numbers:
        self._settle(step)
        return self._metrics.pop(step)

    def state_after(self, step: Step) -> PastPool:
        return self._after[step] if step in self._after else copy.deepcopy(self.state)

    def forget_states_before(self, step: Step) -> None:
        self._after = {number: state for number, state in self._after.items() if number >= step}

    # ------------------------------------------------------------------ files

    def file(self, member: Member) -> Path:
        return self._folder / self.policy / file_name(member.policy, member.step)

    def results_now(self) -> dict[str, Any]:
        game = meta_game(self.state.members, self.state.payoffs)
        return {
            "policy": self.config.policy,
            **asdict(self.state),
            "mixture": mixture(game) if len(game) else [],
        }

    def write_results(self, results: dict[str, Any]) -> None:
        """``results``: of one moment; this runs in a thread."""
        path = self._folder / f"{self.policy}.json"
        make_private_folder(path.parent)
        replace_private(path, as_text(results).encode())

    def remove_files(self, checkpoints: Path) -> None:
        """Removes the weights of members that can't play any more, also not in a run that is resumed."""
        kept = {
            self.file(member).name
            for state in (self.state, *self._after.values())
            for member in state.members
        }
        for folder in checkpoint.complete(checkpoints):
            try:
                pools = read_json(folder / "run.json").get("opponents") or {}
            except CheckpointIncomplete:  # an older one that is just being removed
                continue
            saved = pools.get(self.policy, {}).get("members", ())
            kept |= {file_name(PolicyName(member["policy"]), Step(member["step"])) for member in saved}
        for path in (self._folder / self.policy).glob("*.safetensors"):
            if path.name not in kept:
                path.unlink()


def file_name(policy: PolicyName, step: Step) -> str:
    """The file of a member's weights."""
    return f"{policy}-step_{step:06d}.safetensors"


def _rule_of(config: PoolOfConfig, recipe: Recipe) -> Rule:
    if config.only is not None:
        return latest
    if config.rule == "pfsp":
        return partial(pfsp, power=config.power)
    if config.rule == "nash":
        return partial(nash, explore=config.explore)
    return RULES[config.rule] if config.rule in RULES else rule_of_function(recipe.function(config.rule))
