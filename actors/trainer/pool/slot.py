"""The policies that one process computes with: their backends, tokenizers and supervised examples, the reader of their
rows and the transport of their states.

The trainer's own process is one that has all policies for ever (``StaticPool``); a slot worker has those that are bound
to it. Both compute by the same methods: a coroutine here is one computation, with the name that a standstill shows.
``build``, ``host`` and ``release`` are functions to be called within ``compute``, as their callers move states in
between.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ....core.base.collector import importing
from ....core.base.threads import in_thread, wait_ended
from ....core.spans import SpanRecorder
from ....core.system import ActorSystem
from ....core.waits import Wait
from ....transport.device_memory import find_devices, find_side
from ....transport.handle import PathName, TensorSpec
from ....transport.remote.bulk import Bulk
from ....transport.state import StateTransport
from ...columns.store_client import ExperienceReader, far_reader, segment_directories
from ...compared_logprobs import Compared
from ...errors import PlainGang
from ...messages import NO_GANG, GangPlace, LeasedBatch, MicroBatchTrained, Sample, StepStats
from ...names import PolicyName, Step, Version
from ...recipe.recipe import Recipe
from ...spans import batch_number, place_of, record
from ..arrival_order import Place
from ..backends.backend_config import SimulatedTrainerConfig, has_simulated_gangs
from ..backends.backend_factory import BackendFactory
from ..backends.policy_backend import MicroBatchStats, PolicyBackend
from ..compared_records import ComparedRecords
from ..loss_columns import with_columns
from ..shards import even_ranks
from ..trainer_setup import TrainerSetup
from .computations import Computations
from .sft_rows import sft_rows, sft_shares

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..backends.torch_policy.gang_meeting import Meeting, Membership
    from ..backends.torch_policy.gang_rank import GangRank

T = TypeVar("T")
Background = Callable[[Coroutine[Any, Any, None], str], None]
"""As of ``Actor``."""


class Slot:
    """The hardware of one process. It is open from ``open`` to ``close``, and has its ``side`` (``find_side``) then."""

    def __init__(self, setup: TrainerSetup) -> None:
        """Raises RecipeError if the recipe can't be loaded."""
        self._setup = setup
        self._recipe = Recipe(setup.recipe)
        self._factory = factory_of(setup, self._recipe)
        self._computations = Computations(self._factory, setup.compute_timeout_s, self._recipe.folder)
        self._hosted: dict[PolicyName, PolicyBackend] = {}
        self._tokenizers: dict[PolicyName, PreTrainedTokenizerBase] = {}
        self._memberships: dict[PolicyName, Membership] = {}
        self._meetings: dict[PolicyName, Meeting] = {}
        self._first_ranks: set[PolicyName] = set()
        """Policies of whose gangs this is the first rank."""
        self._resources = AsyncExitStack()
        self._spans, self._lane = SpanRecorder(), ""
        self.side: int | None = None

    async def open(
        self, system: ActorSystem, background: Background, only_path: PathName | None = None
    ) -> None:
        """``system`` and ``background``: of the actor that computes. ``only_path``: of its states; None: any."""
        self._spans, self._lane = system.spans, system.name
        self._compared = ComparedRecords(self._setup.archive, system.run_blocking)
        background(self._compared.run(), "records")
        setup, directory = self._setup, system.directory
        bulk = Bulk.of(system, encrypted=setup.encrypted)
        devices = find_devices(setup.devices)
        self.side = find_side(devices)
        transport = StateTransport(directory, devices, only_path, bulk)
        self._transport = await self._resources.enter_async_context(transport)
        segments = segment_directories(directory, setup.store_dir)
        far = far_reader(system, encrypted=setup.encrypted)
        self._experience = ExperienceReader(setup.store, segments, far)
        self._resources.callback(self._experience.close)
        self._resources.push_async_callback(self._compared.drain)

    async def close(self) -> None:
        """Forgets the computations that have not begun. Does not wait for the one under way."""
        self._factory.close()
        await self._resources.aclose()

    @property
    def transport(self) -> StateTransport:
        """The one of this process, from ``open`` on."""
        return self._transport

    def statistics(self) -> Mapping[str, float]:
        """Numbers of the transport, as ``transport_...``, and of the reader of samples."""
        return self._transport.statistics().numbers() | self._experience.statistics()

    def waits(self) -> list[Wait]:
        """See ``Actor.waits``: the computation under way."""
        return self._computations.waits()

    def progress(self) -> int:
        """See ``Actor.progress``: the computations that have ended."""
        return self._computations.ended

    # ------------------------------------------------------------------ policies

    def __getitem__(self, policy: PolicyName) -> PolicyBackend:
        """The backend of a policy that is here."""
        return self._hosted[policy]

    def version_of(self, policy: PolicyName) -> int:
        """The version of a policy's weights; -1 of one that is not here."""
        return self._hosted[policy].version if policy in self._hosted else -1

    def build(self, policy: PolicyName, place: GangPlace = NO_GANG) -> PolicyBackend:
        """The policy as it begins the run. Raises CheckpointIncomplete, CheckpointMismatch."""
        setup = self._setup.policies[policy]
        backend = self._factory.build(policy, setup, self._join(policy, place), place=place)
        self._tokenizers[policy] = self._factory.tokenizer(setup)
        if self._setup.resume_from is not None:
            backend.load(self._setup.resume_from / policy)
        elif setup.init_from is not None:
            backend.start_from(setup.init_from)
        self._hosted[policy] = backend
        return backend

    def memory(self, policy: PolicyName, tensors: Iterable[TensorSpec]) -> dict[str, Any]:
        """See ``BackendFactory.memory``."""
        return self._factory.memory(policy, self._setup.policies[policy], tensors)

    def host(
        self, policy: PolicyName, place: GangPlace = NO_GANG, memory: dict[str, Any] | None = None
    ) -> PolicyBackend:
        """The policy, to have a state loaded before anything else. ``memory``: see ``BackendFactory.host``."""
        setup = self._setup.policies[policy]
        gang = self._join(policy, place)
        backend = self._hosted[policy] = self._factory.host(policy, setup, gang, memory, place=place)
        if policy not in self._tokenizers:
            self._tokenizers[policy] = self._factory.tokenizer(setup)
        return backend

    def _join(self, policy: PolicyName, place: GangPlace) -> "GangRank | None":
        """This process in the policy's gang, until the policy is released."""
        (self._first_ranks.discard if place.rank else self._first_ranks.add)(policy)
        if place.size == 1:
            return None
        setup = self._setup.policies[policy]
        membership = self._factory.membership(setup, place)
        if membership is None:
            return None
        self._memberships[policy] = membership
        return membership.join()

    def open_meeting(self, policy: PolicyName, host: str, over_hosts: bool) -> str:
        """The address at which the ranks of the policy meet, served here until it is released; empty if they have no
        process group. To be called in a thread, at any time. Raises PlainGang."""
        if (meeting := self._factory.open_meeting(host)) is None:
            return ""
        self._meetings[policy] = meeting
        if over_hosts and self._setup.encrypted:
            raise PlainGang(policy)
        return meeting.address

    def abort(self, policy: PolicyName) -> None:
        """Ends a collective call of the policy that waits for other ranks; see ``Membership.abort``. To be called in a
        thread, beside a computation."""
        if (membership := self._memberships.get(policy)) is not None:
            membership.abort()

    def release(self, policy: PolicyName) -> None:
        """Hosts the policy no more, also if ``build`` or ``host`` has failed."""
        membership = self._memberships.pop(policy, None)
        if membership is not None:  # first: what is released may be another policy's memory at once
            membership.leave()
        if (backend := self._hosted.pop(policy, None)) is not None:
            self._factory.release(backend)
            del backend
        if membership is not None:
            self._factory.free_released()
        if (meeting := self._meetings.pop(policy, None)) is not None:
            meeting.close()

    # ------------------------------------------------------------------ computations

    async def compute(
        self, name: str, function: Callable[[], T], took: Callable[[float], None] = lambda seconds: None
    ) -> T:
        """See ``Computations.run``."""
        return await self._computations.run(name, function, took)

    def _record_as(self, kind: str, policy: PolicyName, step: int = -1) -> Callable[[float], None]:
        """Records the span of a computation when it has ended. Its version: of the policy's weights after it."""

        def took(seconds: float) -> None:
            end = self._spans.now()
            version = self.version_of(policy)
            begin = end - seconds
            record(self._spans, self._lane, kind, begin, end, policy=policy, version=version, step=step)

        return took

    async def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        """See ``TrainerApi.sft``."""
        name = f"supervised batches {first_batch} to {first_batch + count - 1} of {policy}"
        return await self.compute(
            name, lambda: self._take_sft_steps(policy, first_batch, count), self._record_as("sft", policy)
        )

    def _take_sft_steps(self, policy: PolicyName, first_batch: int, count: int) -> float:
        setup, tokenizer = self._setup.policies[policy], self._tokenizers[policy]
        codec = self._factory.codec(setup, tokenizer)
        loss = 0.0
        for batch in range(first_batch, first_batch + count):
            shares = sft_shares(tuple(setup.credit), setup.sft.batch_size, batch)
            rows = [
                row
                for agent, size in shares.items()
                for row in sft_rows(self._recipe, agent, batch, size, codec, tokenizer.eos_token_id)
            ]
            loss = self._hosted[policy].sft(rows)
        return loss

    async def end_sft(self, policy: PolicyName) -> None:
        """See ``PolicyBackend.sft_done``."""

        def end() -> None:
            self._hosted[policy].sft_done()
            self._note_weights(policy)

        await self.compute(f"the weights of {policy}", end)

    async def accumulate(
        self, policy: PolicyName, leased: LeasedBatch, place: Place | None = None
    ) -> MicroBatchTrained:
        """See ``TrainingPool.accumulate``."""
        samples = await self._experience.samples(leased)
        if names := self._setup.policies[policy].read_columns:
            columns = await self._experience.columns(leased, names)
            samples = list(with_columns(samples, names, columns))
        if place is not None:
            await place.wait_turn()
        name = f"a micro-batch of {policy}, {len(samples)} samples"
        took: list[float] = []

        def accumulate() -> tuple[MicroBatchStats, Mapping[str, Compared]]:
            backend = self._hosted[policy]
            return backend.accumulate(samples), backend.take_compared()

        stats, compared = await self.compute(name, accumulate, took.append)
        self._compared.add(compared)
        self._record_batch(policy, leased.fence, samples, stats.tokens, sum(took))
        versions = Counter(sample.policy_version for sample in samples)
        lengths = [len(sample.prompt_tokens) + len(sample.tokens) for sample in samples]
        return MicroBatchTrained(
            stats.samples,
            stats.tokens,
            dict(versions),
            stats.trained_samples,
            stats.seconds,
            even_ranks(lengths),
        )

    def _record_batch(
        self, policy: PolicyName, fence: int, samples: Sequence[Sample], tokens: int, seconds: float
    ) -> None:
        """Records the spans of a micro-batch that has just been computed, and of its samples."""
        end = self._spans.now()
        begin = end - seconds
        version, number = self.version_of(policy), batch_number(fence)
        record(
            self._spans,
            self._lane,
            "micro_batch",
            begin,
            end,
            policy=policy,
            version=version,
            micro_batch=number,
            tokens=tokens,
        )
        if policy not in self._first_ranks:  # the first rank of a gang speaks for all
            return
        lane = f"{self._lane} samples"
        for sample in samples:
            step, query, turn, trajectory = place_of(sample.sample_id)
            attributes = (trajectory, turn, sample.policy_version, step, number, len(sample.tokens))
            record(self._spans, lane, "sample", begin, end, query, sample.agent, policy, "", *attributes)

    async def optimizer_step(self, policy: PolicyName, step: Step) -> tuple[StepStats, Version]:
        """See ``TrainingPool.optimizer_step``."""

        def take_step() -> tuple[StepStats, Version, Mapping[str, Compared]]:
            backend = self._hosted[policy]
            stats = backend.optimizer_step(step - 1)
            self._note_weights(policy)
            return stats, Version(backend.version), backend.take_compared()

        name = f"the optimizer step {step} of {policy}"
        record_span, took = self._record_as("optimizer", policy, step=step), 0.0

        def end(seconds: float) -> None:
            nonlocal took
            took = seconds
            record_span(seconds)

        stats, version, compared = await self.compute(name, take_step, end)
        self._compared.add(compared)
        return replace(stats, figures={**stats.figures, "update_s": took}), version

    async def gather_weights(
        self, policy: PolicyName, backend: PolicyBackend, into: Mapping[str, Any]
    ) -> None:
        """See ``PolicyBackend.gather_weights``. A cancelled call aborts that of the ranks, and raises when nothing is
        written ``into`` any more."""
        job = Future[None]()

        def gather() -> None:
            if job.set_running_or_notify_cancel():
                try:
                    backend.gather_weights(into)
                finally:
                    job.set_result(None)

        try:
            await self.compute(f"the weights of {policy}", gather)
        except asyncio.CancelledError:
            if not job.cancel():
                await in_thread(self.abort, policy)
                await wait_ended(asyncio.wrap_future(job))
            raise

    async def save(self, policy: PolicyName, folder: Path) -> None:
        """See ``PolicyBackend.save``."""
        name = f"saving {policy} in {folder}"
        saving = self._record_as("save", policy)
        await self.compute(name, lambda: self._hosted[policy].save(folder, self._tokenizers[policy]), saving)

    def _note_weights(self, policy: PolicyName) -> None:
        """The policy has new weights. Called within the computation that has changed them: a later one may change the
        policy again, or release it, before the caller of this one continues."""

    def forget_consumed(self) -> None:
        """Rows that a step has consumed may go from memory."""
        self._experience.forget_consumed()


def factory_of(setup: TrainerSetup, recipe: Recipe | None) -> BackendFactory:
    """The backends of the kind that the setup's policies, all of one kind, name. ``recipe``: of the losses of users;
    None: nothing is trained."""
    # Imported here, so that a simulated trainer does not import transformers: that takes seconds.
    if all(isinstance(policy.trainer, SimulatedTrainerConfig) for policy in setup.policies.values()):
        from ..backends.simulated_factory import SimulatedFactory

        trainers = (policy.trainer for policy in setup.policies.values())
        return SimulatedFactory(setup.recipe.seed, has_groups=has_simulated_gangs(trainers))
    with importing():
        from ..backends.torch_policy.torch_factory import TorchFactory

    return TorchFactory(setup.recipe.seed, setup.total_steps, recipe=recipe)
