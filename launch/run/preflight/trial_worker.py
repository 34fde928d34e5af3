"""A rollout worker for the trial: the product's own, with a simulated engine in the place of each model.

A model's tokenizer, its chat template and its context stay those of the run, so that prompts are made, measured and
refused as they will be.
"""

from dataclasses import replace
from typing import Any, Final

import numpy as np

from ....actors.columns.store_client import segment_directories
from ....actors.inference.inference_config import SimulatedEngineConfig
from ....actors.inference.instance import Instance
from ....actors.inference.instance_setup import InstanceSetup, ServedPolicy
from ....actors.inference.router.router_actor import RouterActor
from ....actors.inference.router.router_setup import RouterSetup
from ....actors.messages import WORK_TIMEOUT_S, Published, UnjudgedSample
from ....actors.names import PolicyName, Version
from ....actors.recipe.recipe import Recipe
from ....actors.rollout.rollout import Rollout
from ....actors.rollout.rollout_setup import RolloutSetup
from ....actors.run_events import RunEvent
from ....actors.store.store import Store
from ....core.actor import Actor, endpoint
from ....core.ref import ActorRef
from ....core.system import ActorSystem
from ....transport.state import StateTransport
from ...config.config_sections import PolicyConfig
from ...config.run_config import RunConfig
from ..actor_specs import References, rollout_setup, store_setup
from ..context_limit import context_limit

_ANSWER_TOKENS: Final = 8.0
"""The median of the random answers: short ones, so that a prompt that is too long with them is too long with any."""
_SHARE: Final = 0.8
"""The part of the trial's time that a trajectory may take, or the recipe's ``setup``: then their own deadlines come
first, which know the line."""


class _Console(Actor):
    @endpoint
    async def event(self, event: RunEvent) -> None: ...


class _JudgedStore(Store):
    """A judge too: a sample that waits for a reward from outside the run gets 0."""

    @endpoint
    async def offer(self, writer: str, samples: list[UnjudgedSample]) -> None:
        await super().offer(writer, samples)
        for sample in samples:
            await self.write("trial", {sample.agent: {"sample_id": [sample.sample_id], "reward": [0.0]}})


class _TrialRollout(Rollout):
    """Its recipe has been loaded: a module that is run twice may find what it registered the first time."""

    def __init__(self, setup: RolloutSetup, recipe: Recipe) -> None:
        self._recipe = recipe
        super().__init__(setup)

    def load_recipe(self) -> Recipe:
        return self._recipe


async def trial_worker(
    config: RunConfig, recipe: Recipe, system: ActorSystem, transport: StateTransport
) -> Rollout:
    """A worker that is to be added to ``system``, whose router and instances serve version 0 of every policy."""
    console: ActorRef[Any] = await system.add(_Console(), "console")
    router = await system.add(RouterActor(RouterSetup(tuple(config.policies), console)), "router")
    store_dir = system.directory / "store"
    references = References(console, console, router, [], console, console, console, {})
    for folder in (store_dir, *segment_directories(system.directory, store_dir).all()):
        folder.mkdir(mode=0o700, exist_ok=True)
    store = await system.add(_JudgedStore(store_setup(config, references, store_dir)), "store")
    for name, policy in config.policies.items():
        served = {name: ServedPolicy(policy.used_model, _engine(policy))}
        await system.add(Instance(InstanceSetup(name, served, router)), f"{name}-0")
        await _publish(name, router, transport)
    limited, references = _within_the_trial(config), replace(references, store=store)
    return _TrialRollout(rollout_setup(limited, references, store_dir, system.directory), recipe)


async def _publish(policy: PolicyName, router: ActorRef[RouterActor], transport: StateTransport) -> None:
    """The weights of a simulated engine are their version alone."""
    handle = await transport.set(policy, {"state": np.zeros(2, np.int64)}, version=0)
    await router.within(WORK_TIMEOUT_S).publish(Published(policy, Version(0), handle))


def _engine(policy: PolicyConfig) -> SimulatedEngineConfig:
    return SimulatedEngineConfig(
        max_context=context_limit(policy), median_tokens=_ANSWER_TOKENS, token_s=1e-6, prompt_share=0.0
    )


def _within_the_trial(config: RunConfig) -> RunConfig:
    """``config`` with deadlines that pass before that of the trial."""
    limit_s = _SHARE * config.checks.trajectory_timeout_s
    rollout = config.rollout.model_copy(
        update={
            "trajectory_timeout_s": min(config.rollout.trajectory_timeout_s, limit_s),
            "setup_timeout_s": min(config.rollout.setup_timeout_s, limit_s),
        }
    )
    return config.model_copy(update={"rollout": rollout})
