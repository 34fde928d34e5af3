"""The trainer actor: the training state of every policy; ``PolicyBackends`` computes.

Computations queue in the order they came; the event loop stays free meanwhile. Leases, commits and
publishing are messages and shared memory, and happen around the computing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.actor import Actor, endpoint
from ...core.task_groups import first_error
from ...transport.state import StateTransport
from ..messages import WORK_TIMEOUT_S, MicroBatchTrained, PolicyStepped, Published, TrainerApi
from ..names import AgentName, PolicyName, Step, Version
from ..store_client import ExperienceReader, segment_directories
from ..workflow import Recipe
from .arrival_order import ArrivalOrder
from .backends.backend_config import SimulatedTrainerConfig
from .backends.policy_backend import PolicyBackend, StepStats
from .backends.policy_backends import PolicyBackends
from .trainer_setup import PolicySetup, TrainerSetup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Catches a hang, not slowness: a large model takes long.
_TRANSFER_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights to publish. ``tensors`` may alias the live weights: publish them before the next step."""

    version: int
    tensors: Mapping[str, Any]


class Trainer(Actor, TrainerApi):
    def __init__(self, setup: TrainerSetup) -> None:
        self._setup = setup
        self._store = setup.store
        self._transport = StateTransport(setup.runtime_dir)
        self._places = segment_directories(setup.runtime_dir, setup.store_dir)
        self._policies: dict[PolicyName, PolicyBackend] = {}
        self._tokenizers: dict[PolicyName, PreTrainedTokenizerBase] = {}
        self._leases: dict[PolicyName, list[int]] = {policy: [] for policy in setup.policies}
        self._arrivals = {policy: ArrivalOrder() for policy in setup.policies}

    async def on_start(self) -> None:
        self._recipe = Recipe(self._setup.recipe)
        self._backends = _backends(self._setup)
        self._experience = ExperienceReader(self._store, self._places)
        await self._transport.__aenter__()
        for policy, setup in self._setup.policies.items():
            build = partial(self._build, policy, setup)
            self._policies[policy] = await self._backends.compute(build)

    async def on_stop(self) -> None:
        self._backends.close()
        self._experience.close()
        await self._transport.__aexit__(None, None, None)

    def statistics(self) -> Mapping[str, float]:
        """Numbers of the transport, as ``transport_...``."""
        return self._transport.statistics().numbers()

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        return await self._backends.compute(lambda: self._sft(policy, first_batch, count))

    @endpoint
    async def publish(self, policy: PolicyName) -> Published:
        return await self._publish(policy, await self._backends.compute(lambda: self._end_sft(policy)))

    @endpoint
    async def train(self, policy: PolicyName, policy_version: int, count: int) -> MicroBatchTrained:
        with self._arrivals[policy].place() as turn:
            leased = await self._store.within(WORK_TIMEOUT_S).lease(policy, policy_version, count)
            self._leases[policy].append(leased.fence)
            samples = await self._experience.samples(leased)
            # The store may answer a later lease first, and a sum of floats depends on its order.
            await turn
        stats = await self._backends.compute(lambda: self._policies[policy].accumulate(samples))
        versions = Counter(sample.policy_version for sample in samples)
        return MicroBatchTrained(
            stats.samples, stats.tokens, dict(versions), stats.trained_samples, stats.seconds
        )

    @endpoint
    async def optimizer_step(self, policy: PolicyName, step: Step) -> PolicyStepped:
        started = time.perf_counter()
        stats, weights = await self._backends.compute(lambda: self._step(policy, step))
        stepped = time.perf_counter()
        fences, self._leases[policy] = self._leases[policy], []
        with first_error():
            async with asyncio.TaskGroup() as group:
                group.create_task(self._committed(policy, fences, weights.version))
                publishing = group.create_task(self._publish(policy, weights))
        self._experience.forget_consumed()
        published = publishing.result()
        publish_s = time.perf_counter() - stepped
        return PolicyStepped(
            published=published,
            samples=stats.samples,
            tokens=stats.tokens,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            lr=stats.lr,
            clip_fraction=stats.clip_fraction,
            ratio_deviation=stats.ratio_deviation,
            busy_s=stepped - started,
            publish_s=publish_s,
            skipped_update=stats.skipped_update,
            padding_share=stats.padding_share,
            value_loss=stats.value_loss,
            explained_variance=stats.explained_variance,
        )

    @endpoint
    async def save(self, policy: PolicyName, folder: str) -> None:
        await self._backends.compute(
            lambda: self._policies[policy].save(Path(folder), self._tokenizers[policy])
        )

    # ------------------------------------------------------------------ on the worker thread

    def _build(self, policy: PolicyName, setup: PolicySetup) -> PolicyBackend:
        backend = self._backends.build(policy, setup)
        self._tokenizers[policy] = self._backends.tokenizer(setup)
        if self._setup.resume_from is not None:
            backend.load(self._setup.resume_from / policy)
        elif setup.init_from is not None:
            backend.start_from(setup.init_from)
        return backend

    def _sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        setup, tokenizer = self._setup.policies[policy], self._tokenizers[policy]
        loss = 0.0
        for batch in range(first_batch, first_batch + count):
            shares = sft_shares(tuple(setup.credit), setup.sft.batch_size, batch)
            examples = [
                example for agent, size in shares.items() for example in self._recipe.sft(agent, batch, size)
            ]
            loss = self._policies[policy].sft(
                [
                    (
                        tuple(tokenizer(prompt).input_ids),
                        (*tokenizer(completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id),
                    )
                    for prompt, completion in examples
                ]
            )
        return loss

    def _end_sft(self, policy: PolicyName) -> _Weights:
        backend = self._policies[policy]
        backend.sft_done()
        return _weights(backend)

    def _step(self, policy: PolicyName, step: Step) -> tuple[StepStats, _Weights]:
        backend = self._policies[policy]
        return backend.optimizer_step(step - 1), _weights(backend)

    # ------------------------------------------------------------------ small things

    async def _committed(self, policy: PolicyName, fences: list[int], version: int) -> None:
        await self._store.within(WORK_TIMEOUT_S).commit(policy, fences, version)

    async def _publish(self, policy: PolicyName, weights: _Weights) -> Published:
        handle = await self._transport.set(
            policy, weights.tensors, version=weights.version, timeout_s=_TRANSFER_TIMEOUT_S
        )
        return Published(policy, Version(weights.version), handle)


def _backends(setup: TrainerSetup) -> PolicyBackends:
    """Those of the kind that the setup's policies, all of one kind, name."""
    # Imported here, so that a simulated trainer does not import transformers: that takes seconds.
    if all(isinstance(policy.trainer, SimulatedTrainerConfig) for policy in setup.policies.values()):
        from .backends.simulated_policies import SimulatedPolicies

        return SimulatedPolicies(setup.recipe.seed)
    from .backends.torch_policy.torch_policies import TorchPolicies

    return TorchPolicies(setup.recipe.seed, setup.total_steps)


def sft_shares(agents: Sequence[AgentName], size: int, batch: int) -> dict[AgentName, int]:
    """Examples of each agent in a supervised batch of ``size``: equal shares, agents without an example left out.

    Examples that are left over go to one agent each, to others in the next batch, so that over the batches all agents
    have as many.
    """
    share, left_over = divmod(size, len(agents))
    first = batch * left_over
    counts = {
        agent: share + ((number - first) % len(agents) < left_over) for number, agent in enumerate(agents)
    }
    return {agent: count for agent, count in counts.items() if count}


def _weights(backend: PolicyBackend) -> _Weights:
    # Casting a whole model takes long enough that it must not happen on the event loop.
    return _Weights(backend.version, backend.weights())
