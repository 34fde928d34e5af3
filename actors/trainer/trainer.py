"""The trainer actor: the training state of every policy, and one worker thread that computes.

Calls queue for the thread in the order they came; the event loop stays free meanwhile. Leases, commits and
publishing are messages and shared memory, and happen around the computing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from ...core.actor import Actor, endpoint
from ...core.ref import ActorRef
from ...core.task_groups import first_error
from ...transport.state import StateTransport
from ..messages import MicroBatchTrained, PolicyStepped, Published, StoreApi
from ..names import PolicyName
from ..pretrained import load_tokenizer
from ..store_client import ExperienceReader, segment_places
from ..workflow import Recipe, RecipeConfig
from .backends.policy_backend import PolicyBackend, StepStats
from .backends.torch_policy.torch_policy import TorchPolicy
from .trainer_config import PolicyConfig

T = TypeVar("T")

# Only against hanging for good: a large model takes as long as it takes.
_TRANSFER_TIMEOUT_S = 3600.0
# The store waits for a full disk to be cleared.
_COMMIT_TIMEOUT_S = 24 * 3600.0
# The store ends the wait for what is written from outside, when the config says.
_LEASE_TIMEOUT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class _Weights:
    """What to publish. ``tensors`` may alias the live weights: publish them before the next step."""

    version: int
    tensors: Mapping[str, Any]


class Trainer(Actor):
    """Fulfils ``TrainerApi``."""

    def __init__(
        self,
        policies: dict[str, PolicyConfig],
        recipe: RecipeConfig,
        total_steps: int,
        store: ActorRef[StoreApi],
        directory: str,
        store_folder: str,
        resume_from: str | None,
    ) -> None:
        """``directory``: where this run's transport and store keep their shared memory; ``store_folder``: the store's
        on the disk. ``resume_from``: the folder of a joint checkpoint, with one folder per policy in it."""
        self._configs = policies
        self._recipe_config = recipe
        self._total_steps = total_steps
        self._store = store
        self._transport = StateTransport(Path(directory))
        self._places = segment_places(directory, store_folder)
        self._resume_from = Path(resume_from) if resume_from else None
        self._policies: dict[str, PolicyBackend] = {}
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self._leases: dict[str, list[int]] = {agent: [] for agent in policies}

    async def on_start(self) -> None:
        self._recipe = Recipe(self._recipe_config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._experience = ExperienceReader(self._store, self._places)
        await self._transport.__aenter__()
        for agent, config in self._configs.items():
            self._policies[agent] = await self._compute(lambda a=agent, c=config: self._build(a, c))  # type: ignore[misc]

    async def on_stop(self) -> None:
        # Not waiting: what computes now can't be interrupted, and the loop has other actors to serve. The
        # process ends after it.
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._experience.close()
        await self._transport.__aexit__(None, None, None)

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def sft(self, agent: str, first_batch: int, count: int) -> float:
        return await self._compute(lambda: self._sft(agent, first_batch, count))

    @endpoint
    async def publish(self, agent: str) -> Published:
        return await self._publish(agent, await self._compute(lambda: self._end_sft(agent)))

    @endpoint
    async def train(self, agent: str, policy_version: int, count: int) -> MicroBatchTrained:
        leased = await self._store.within(_LEASE_TIMEOUT_S).lease(PolicyName(agent), policy_version, count)
        self._leases[agent].append(leased.fence)
        samples = await self._experience.samples(leased)
        stats = await self._compute(lambda: self._policies[agent].accumulate(samples))
        versions = Counter(sample.policy_version for sample in samples)
        return MicroBatchTrained(
            stats.samples, stats.tokens, dict(versions), stats.trained_samples, stats.seconds
        )

    @endpoint
    async def optimizer_step(self, agent: str) -> PolicyStepped:
        started = time.perf_counter()
        stats, weights = await self._compute(lambda: self._step(agent))
        stepped = time.perf_counter()
        fences, self._leases[agent] = self._leases[agent], []
        with first_error():
            async with asyncio.TaskGroup() as group:
                group.create_task(self._committed(agent, fences, weights.version))
                publishing = group.create_task(self._publish(agent, weights))
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
            value_loss=stats.value_loss,
            explained_variance=stats.explained_variance,
        )

    @endpoint
    async def save(self, agent: str, folder: str) -> None:
        await self._compute(lambda: self._policies[agent].save(Path(folder), self._tokenizers[agent]))

    # ------------------------------------------------------------------ on the worker thread

    def _build(self, agent: str, config: PolicyConfig) -> PolicyBackend:
        policy = TorchPolicy(
            agent,
            config.model,
            config.optimizer,
            config.algorithm,
            config.sft,
            seed=self._recipe_config.seed,
            total_steps=self._total_steps,
            temperature=config.temperature,
            device=config.model.device,
            max_staleness=config.max_staleness,
        )
        self._tokenizers[agent] = load_tokenizer(config.model)
        if self._resume_from is not None:
            policy.load(self._resume_from / agent)
        return policy

    def _sft(self, agent: str, first_batch: int, count: int) -> float:
        tokenizer, size = self._tokenizers[agent], self._configs[agent].sft.batch_size
        loss = 0.0
        for batch in range(first_batch, first_batch + count):
            examples = self._recipe.sft(agent, batch, size)
            loss = self._policies[agent].sft(
                [
                    (
                        tuple(tokenizer(prompt).input_ids),
                        (*tokenizer(completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id),
                    )
                    for prompt, completion in examples
                ]
            )
        return loss

    def _end_sft(self, agent: str) -> _Weights:
        policy = self._policies[agent]
        policy.sft_done()
        return _weights(policy)

    def _step(self, agent: str) -> tuple[StepStats, _Weights]:
        policy = self._policies[agent]
        return policy.optimizer_step(), _weights(policy)

    # ------------------------------------------------------------------ small things

    async def _committed(self, agent: str, fences: list[int], version: int) -> None:
        await self._store.within(_COMMIT_TIMEOUT_S).commit(PolicyName(agent), fences, version)

    async def _publish(self, agent: str, weights: _Weights) -> Published:
        handle = await self._transport.set(
            agent, weights.tensors, version=weights.version, timeout_s=_TRANSFER_TIMEOUT_S
        )
        return Published(agent, weights.version, handle)

    async def _compute(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _weights(policy: PolicyBackend) -> _Weights:
    # Casting a whole model takes long enough that it must not happen on the event loop.
    return _Weights(policy.version, policy.weights())
