"""The turns of a worker's trajectories: each waits for a route, and goes straight to an instance.

generate ─> request ─> route ─> instance ─┬─> the answer: the turn has ended
                         ^                └─> newer weights, or a lost instance ─┐
                         └──────────────── the same turn, with the tokens it has ┘
"""

from collections.abc import Callable
from functools import partial

from ...core.errors import ActorDead, CallTimeout, FlexmarlError
from ...core.ref import ActorRef
from ..errors import EngineFailed, InvalidRequest, WrongPolicy, WrongVersion
from ..messages import GenerateRequest, Generation, TextApi, TextTo
from ..names import AgentName
from ..workflow import OnText, Prompt, Turn
from .call_graph import CallGraph, TimedTurn
from .resumable_turn import ResumableTurn
from .rollout_setup import RolloutSetup
from .rollout_spans import RolloutSpans
from .rollout_waits import RolloutWaits
from .trajectory import Trajectory
from .trajectory_records import TrajectoryRecords
from .turn_limits import TurnLimits
from .turn_options import NO_OPTIONS, TurnOptions
from .turn_request import turn_request
from .turn_routes import TurnRoute, TurnRoutes
from .turn_texts import TurnText, TurnTexts


class TurnGeneration:
    """Generates the turns of one worker. ``texts``: of those whose text is wanted as it comes."""

    def __init__(
        self,
        setup: RolloutSetup,
        worker: ActorRef[TextApi],
        clock: Callable[[], float],
        routes: TurnRoutes,
        waits: RolloutWaits,
        spans: RolloutSpans,
        records: TrajectoryRecords,
    ) -> None:
        """``worker``: takes the texts. ``clock``: of its system."""
        self._setup, self._config, self._agents = setup, setup.config, setup.agents
        self._worker, self._clock, self._routes = worker, clock, routes
        self._waits, self._spans, self._records = waits, spans, records
        sampling = {agent: settings.sampling for agent, settings in setup.agents.items()}
        self._limits = TurnLimits(setup.config, sampling)
        self._calls = CallGraph()
        self.texts = TurnTexts()

    def trajectory_ended(self, trajectory: Trajectory) -> None:
        """Learns from a trajectory that has succeeded which turns follow upon which."""
        self._calls.ended(trajectory.timed_turns)

    async def generate(
        self,
        agent: AgentName,
        trajectory: Trajectory,
        prompt: Prompt,
        options: TurnOptions = NO_OPTIONS,
        on_text: OnText | None = None,
    ) -> Turn:
        """One turn: waits for an instance with the version of the agent's policy. If new weights arrive meanwhile and
        may generate it too, they resume it; if the instance is lost, another one begins it again."""
        self._spans.between_turns(trajectory)
        begin = self._spans.now()
        settings = self._agents[agent]
        text = None if on_text is None else TurnText(on_text)
        tokens_left = self._limits.begin(agent, trajectory)
        request = turn_request(self._setup, agent, trajectory, prompt, options, tokens_left)
        self._records.note_prompt(trajectory, request.sample_id, prompt)
        turn = ResumableTurn(request)
        try:
            left_s = settings.sampling.turn_timeout_s or self._config.turn_timeout_s
            turn.downstream_tokens = self._calls.downstream_tokens(agent, trajectory.begin_turn(agent))
            while not turn.ended:
                left_s -= await self._generate_part(agent, turn, trajectory, left_s, text)
                if text is not None:
                    text.show(turn.text)
            trajectory.add_turn(agent, turn, TimedTurn(agent, begin, self._clock(), len(turn.tokens)))
        finally:
            self._spans.turn(agent, request.policy, trajectory, turn, begin)
        columns = trajectory.columns_of(agent, request.sample_id, settings.columns)
        return turn.result(agent, request.chat, columns.write)

    async def _generate_part(
        self,
        agent: AgentName,
        turn: ResumableTurn,
        trajectory: Trajectory,
        limit_s: float,
        text: TurnText | None,
    ) -> float:
        """Generates until the turn has ended, its version is no longer served, or its instance is lost. Returns the
        seconds that this took at an instance."""
        request = turn.request
        assert trajectory.deadline is not None, "it runs"
        waiting, policy = f"turns of {agent} that no instance has yet", request.policy
        begin = self._spans.now()
        try:
            # This time is the trainer's, or that of other trajectories.
            with (
                trajectory.deadline.paused(),
                self._waits.turn(trajectory, waiting, self._setup.router.name),
            ):
                route = await self._routes.route(
                    policy,
                    request.versions,
                    prompt_tokens=turn.prompt_size,
                    downstream_tokens=turn.downstream_tokens,
                    prefix=trajectory.prefix(request.prompt),
                    topic=f"{agent} {trajectory.query.id}",
                )
        finally:
            self._spans.wait(agent, policy, trajectory, turn, begin)
        started = self._clock()
        tokens, lost = 0, False
        try:
            turn.ask_for(route.version)
            with self._waits.turn(trajectory, f"turns of {agent}", route.instance.name):
                generation = await self._ask(agent, route, turn.request, trajectory, limit_s, text)
            tokens = len(generation.tokens)
            turn.take(generation)
            if turn.is_idle_again(route.instance.name, generation):
                raise _idle(route, request)
        except (WrongPolicy, WrongVersion) as error:  # it has begun to load, has moved, or was started again
            self._retry(turn, trajectory, error)
        except (ActorDead, EngineFailed) as error:
            lost = True
            self._retry(turn, trajectory, error)
        finally:
            self._routes.ended(route.turn, tokens, lost=lost)
            trajectory.add_times(agent, route.queue_s, self._clock() - started)
        return self._clock() - started

    def _retry(self, turn: ResumableTurn, trajectory: Trajectory, error: FlexmarlError) -> None:
        """Counts a turn that is to be begun again. Raises ``error`` if that was the case too often."""
        if turn.retries >= self._config.turn_retries:
            raise error
        turn.retries += 1
        trajectory.retried_turns += 1

    async def _ask(
        self,
        agent: AgentName,
        route: TurnRoute,
        request: GenerateRequest,
        trajectory: Trajectory,
        limit_s: float,
        text: TurnText | None,
    ) -> Generation:
        trajectory.turn_begins(self._clock())
        ask = partial(route.instance.ask, "generate", request, timeout_s=max(0.0, limit_s))
        try:
            if text is None:
                generation: Generation = await ask()
            else:
                with self.texts.opened(text) as stream:
                    generation = await text.listen(ask(text_to=TextTo(self._worker, stream)))
        except CallTimeout as error:
            trajectory.turn_overran(agent, error)
            raise
        except InvalidRequest as error:
            raise type(error)(request.sample_id, f"agent {agent}: {error.problem}") from error
        return generation


def _idle(route: TurnRoute, request: GenerateRequest) -> EngineFailed:
    name = route.instance.name
    return EngineFailed(
        f"{name} interrupts turn {request.sample_id} again and again without a token, and serves no later version"
    )
