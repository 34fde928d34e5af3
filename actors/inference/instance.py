"""The instance: an engine that serves one version of one policy, or of each of several adapters over one base."""

import asyncio
import dataclasses
import gc
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from ...core.actor import Actor, endpoint
from ...core.base.collector import spare_collector
from ...core.base.texts import text_of
from ...core.errors import FlexmarlError, is_loss
from ...core.waits import OpenWaits, Wait
from ...transport.device_memory import find_devices
from ...transport.errors import FetchFailed, PeerRefused, StaleHandle, TransferTimeout
from ...transport.remote.bulk import Bulk
from ...transport.state import StateTransport
from ..errors import EngineFailed, LoadFailed, NonFiniteLogits, ReadFailed, WrongPolicy, WrongVersion
from ..messages import GenerateRequest, Generation, InstanceApi, Loaded, Published, TextTo
from ..names import PolicyName, Version
from ..spans import place_of, record, record_time
from .engine_requests import (
    answer_forms,
    engine_request,
    generation_of,
    keep_result,
    listener,
    prompt_tokens,
    stop_search,
)
from .engines.engine import Engine, EngineResult, EngineStatistics
from .engines.engine_factory import EngineFactory
from .engines.factories import factory_of
from .install import Installer
from .instance_setup import InstanceSetup
from .text_stream import TextStream

END_TIMEOUT_S: Final = 60.0
"""For the turns under way of an engine that has failed: later they are lost with the instance, and are begun again."""


@dataclass(frozen=True, slots=True)
class _Served:
    policy: PolicyName
    version: Version


class Instance(Actor, InstanceApi):
    """Serves the policies of its setup in turn, with the engine that each one's config names; adapters over one base at
    the same time.

    It is one class because turns, loads and the engine's end wait for each other: each changes what the others serve.
    """

    def __init__(self, setup: InstanceSetup) -> None:
        self._setup = setup
        self._factories: dict[PolicyName, EngineFactory] = {}
        self._engine: Engine | None = None
        self._former: EngineStatistics | None = None
        """The totals of the engines that were closed, for policies of other architectures."""
        self._built_for = setup.policy
        self._served: dict[str, _Served] = {}
        """By the engine's name of the weights: see ``_adapter``. Weights that are being loaded are not there."""
        self._loading = asyncio.Lock()
        self._turns = 0
        self._engine_ids: set[str] = set()
        self._failure: EngineFailed | None = None
        """The reason for which this instance ends."""
        self._answered = asyncio.Event()
        self._answered.set()
        self._waits = OpenWaits()
        self._ended = 0
        """Turns and loads that have ended."""

    async def on_start(self) -> None:
        self._transport = await self._made_transport().__aenter__()
        self._installer = Installer(self._transport, self.system.run_blocking)
        policy, router = self._setup.policy, self._setup.router
        loading = self._waits.open(f"the engine of {policy}, which loads its model")
        with loading, record_time(self.system.spans, self.ref.name, "load", policy=policy):
            await self._build(policy)
        if router is not None:
            turns_at_once = self._setup.policies[policy].engine.turns_at_once
            await router.api.join(self.ref, (policy, *self._setup.beside), turns_at_once)

    def _made_transport(self) -> StateTransport:
        setup = self._setup
        bulk = Bulk.of(self.system, encrypted=setup.encrypted)
        return StateTransport(
            self.system.directory, find_devices(setup.devices), setup.weights.only_path, bulk
        )

    async def on_stop(self) -> None:
        await self._close_engine()
        await self._transport.close()

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def load(self, published: Published) -> Loaded:
        policy, handle_version = published.policy, Version(published.handle.version)
        if policy not in self._setup.policies:
            raise WrongPolicy(self._built_for, policy)
        if handle_version != published.version:
            raise WrongVersion(policy, published.version, handle_version)
        async with self._loading:
            self._check_failure()
            try:
                loading = self._waits.open(f"version {handle_version} of {policy}, which is being loaded")
                installing = record_time(
                    self.system.spans, self.ref.name, "install", policy=policy, version=handle_version
                )
                with loading, installing:
                    loaded = await self._load(published)
                self._ended += 1
                return loaded
            except (EngineFailed, WrongVersion):
                raise
            except (
                FlexmarlError,
                OSError,
                RuntimeError,
                ValueError,
            ) as error:  # transport, or an engine's library
                self._served.pop(self._adapter(policy), None)
                problem = f"{type(error).__name__}: {text_of(error)}"
                failure = ReadFailed if _may_be_read_later(error) else LoadFailed
                raise failure(policy, published.version, problem) from error

    @endpoint
    async def served_version(self, policy: PolicyName) -> Version | None:
        # No version as the answer would bring the next load; after an error the router asks again.
        self._check_failure()
        is_served = policy in self._setup.policies
        served = self._served.get(self._adapter(policy)) if is_served else None
        return served.version if served is not None and served.policy == policy else None

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        if request.chat is not None:
            await self._prepare_chat(request.policy)
        self._check_failure()
        served, engine = self._serves(request.policy), self._engine
        if served is None or engine is None or served.version not in request.versions:
            raise WrongVersion(
                request.policy, request.versions.oldest, None if served is None else served.version
            )
        codec, options = self._factories[served.policy].codec, self._setup.policies[served.policy].engine
        prompt = prompt_tokens(request, codec)
        forms = answer_forms(request, prompt, codec, options)
        search = None if options.endpoint else stop_search(request, codec)
        stream = None if text_to is None else TextStream(text_to, codec.decode, request.completion)
        on_tokens = listener(search, stream)
        generating = f"a turn of {served.policy} from {options.place}"
        begin = self.system.spans.now()
        with self._turn(generating), self._engine_id(request.sample_id) as request_id:
            adapter = self._adapter(request.policy)
            result = await engine.generate(
                dataclasses.replace(
                    engine_request(request, prompt, forms), request_id=request_id, adapter=adapter
                ),
                on_tokens,
            )
        self._record(request, served, begin, len(prompt), result)
        if search is not None:
            result = search.ended(result)
        if self._setup.policies[served.policy].drops_routes:
            result = dataclasses.replace(result, routes=None)
        result = keep_result(result, resumable=options.resumable and not forms)
        if not math.isfinite(sum(result.logprobs)):
            raise NonFiniteLogits((request.sample_id,))
        return generation_of(served.version, request, prompt, result, codec)

    def _record(
        self,
        request: GenerateRequest,
        served: _Served,
        begin: float,
        prompt_tokens: int,
        result: EngineResult,
    ) -> None:
        """Records the spans of a turn, or of a part of one, that the engine has generated: ``prefill`` and ``decode``
        behind its wait in the engine, or one of both if the engine can't tell them apart."""
        step, query, turn, trajectory = place_of(request.sample_id)
        end, phases = self.system.spans.now(), result.phases

        def add(kind: str, begin: float, end: float, tokens: int) -> None:
            attributes = (trajectory, turn, served.version, step, -1, tokens)
            record(
                self.system.spans, self.ref.name, kind, begin, end, query, "", served.policy, "", *attributes
            )

        if phases is None:
            add("generate", begin, end, len(result.tokens))
            return
        # By another clock, which may be ahead by the engine's way to this loop.
        begin = min(begin + phases.queue_s, end)
        first_token = min(begin + phases.prefill_s, end)
        if phases.prefill_s or result.tokens:  # else the turn was interrupted before the engine has begun
            add("prefill", begin, first_token, prompt_tokens)
        if result.tokens:
            add("decode", first_token, end, len(result.tokens))

    async def _prepare_chat(self, policy: PolicyName) -> None:
        """Imports what the policy's first conversation needs. Later ones do not wait."""
        factory = self._factories.get(policy)
        if factory is not None and not factory.codec.is_ready:
            needs = f"the library that makes tokens of messages for {policy}"
            # The turn's prompt raises the same, as an error of the turn.
            with self._waits.open(needs, "rollout.turn_timeout_s ends it"), suppress(ValueError):
                await self.system.run_blocking(factory.codec.prepare)

    def _adapter(self, policy: PolicyName) -> str:
        """The engine's name of the policy's weights: empty for a whole model, of which it has one."""
        return policy if self._setup.policies[policy].base is not None else ""

    def _serves(self, policy: PolicyName) -> _Served | None:
        """The version of the policy that is served, if there is one. Raises WrongPolicy if another policy is served in
        its place, or the setup has no such policy."""
        if policy not in self._setup.policies:
            raise WrongPolicy(self._built_for, policy)
        served = self._served.get(self._adapter(policy))
        if served is not None and served.policy != policy:
            raise WrongPolicy(served.policy, policy)
        return served

    @contextmanager
    def _engine_id(self, sample_id: str) -> Iterator[str]:
        """The engine's id for a turn. The turn of a rollout worker that was lost may still run when another worker
        asks for it."""
        request_id, copies = sample_id, itertools.count(2)
        while request_id in self._engine_ids:
            request_id = f"{sample_id}#{next(copies)}"
        self._engine_ids.add(request_id)
        try:
            yield request_id
        finally:
            self._engine_ids.discard(request_id)

    def statistics(self) -> Mapping[str, float]:
        """Numbers of the engine and of the transport, as ``engine_...`` and ``transport_...``, and ``batch_size``, the
        mean number of sequences that are decoded together; empty before the engine is ready. Totals are those since the
        start: an instance that moves to another policy may get another engine."""
        if self._engine is None:
            return {}
        engine = self._engine_statistics(self._engine)
        batch_size = engine.batch_occupancy * self._setup.policies[self._built_for].engine.max_batch
        return {"batch_size": batch_size, **engine.numbers(), **self._transport.statistics().numbers()}

    def progress(self) -> int:
        """Tokens, and turns and loads that have ended."""
        engine = self._former if self._engine is None else self._engine_statistics(self._engine)
        return self._ended + (0 if engine is None else engine.prompt_tokens + engine.generated_tokens)

    def _engine_statistics(self, engine: Engine) -> EngineStatistics:
        statistics = engine.statistics()
        return statistics if self._former is None else statistics.after(self._former)

    def waits(self) -> list[Wait]:
        return self._waits.current()

    # ------------------------------------------------------------------ the engine

    async def _load(self, published: Published) -> Loaded:
        policy, version, adapter = published.policy, published.version, self._adapter(published.policy)
        factory = await self._factory(policy)
        stays = factory.architecture == self._factories[self._built_for].architecture
        if stays:
            self._served.pop(adapter, None)
        else:
            self._served.clear()
        if self._engine is not None:
            await self._engine.interrupt(adapter if stays else None)
        began = factory.clock()
        engine = await self._engine_for(policy)
        try:
            installed = await self._installer.install(engine, published, adapter, self._bound(policy))
        except EngineFailed as error:
            self._fail(error)
            raise
        self._served[adapter] = _Served(policy, version)
        times, chosen = installed.times, self._transport.chosen(published.handle.key)
        return Loaded(
            policy,
            version,
            factory.clock() - began,
            times.transfer_s,
            times.load_s,
            chosen,
            installed.differences,
            installed.mismatch,
        )

    def _bound(self, policy: PolicyName) -> float | None:
        """The most that a probe may differ by; None if nothing is decided by it."""
        served, bound = self._setup.policies[policy], self._setup.weights.probe_bound
        if bound is not None or served.model is None:
            return bound
        return served.engine.probe_bound(served.model.dtype)

    async def _engine_for(self, policy: PolicyName) -> Engine:
        """The engine without requests: the present one if it can take the policy's weights, or a new one."""
        factory = await self._factory(policy)
        if self._engine is not None:
            if factory.architecture == self._factories[self._built_for].architecture:
                self._built_for = policy
                return self._engine
            await self._close_engine()
            # Models have reference cycles, which the collector skips as long as their objects are frozen, and the next
            # engine needs the memory. Without a model the search is in vain: simulated runs did little else.
            if self._setup.policies[self._built_for].model is not None:
                gc.unfreeze()
                spare_collector()
        return await self._build(policy)

    async def _factory(self, policy: PolicyName) -> EngineFactory:
        if policy not in self._factories:
            served = self._setup.policies[policy]
            self._factories[policy] = await factory_of(served.model, served.engine, served.base)
        return self._factories[policy]

    async def _build(self, policy: PolicyName) -> Engine:
        factory = await self._factory(policy)
        self._engine = engine = await factory.build()
        self._built_for = policy
        self.background(self._watch(engine), "engine")
        return engine

    async def _close_engine(self) -> None:
        if self._engine is not None:
            former = self._engine_statistics(self._engine)
            await self._engine.close()
            self._former, self._engine = former, None

    async def _watch(self, engine: Engine) -> None:
        """Ends this instance if the engine is broken, after the turns under way have been answered."""
        try:
            await engine.wait_closed()
        except EngineFailed as error:
            self._fail(error)

    def _fail(self, error: EngineFailed) -> None:
        """Ends this instance, whose engine can't serve. Until it has ended it refuses turns and loads: of an engine
        that is alive but not proven, other adapters would get turns, and the wait for all turns would be endless."""
        if self._failure is None:
            self._failure = error
            self._served.clear()
            self.background(self._end(error), "end")

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure.problem)

    async def _end(self, error: EngineFailed) -> None:
        """Ends this instance after the turns under way have been answered, or are late."""
        turns = "the turns under way, before the instance ends: its engine has failed"
        with self._waits.open(turns, f"{END_TIMEOUT_S:g} s end it"), suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._answered.wait()
        raise error

    @contextmanager
    def _turn(self, text: str) -> Iterator[None]:
        self._turns += 1
        self._answered.clear()
        try:
            with self._waits.open(text, "rollout.turn_timeout_s ends it"):
                yield
        finally:
            self._ended += 1
            self._turns -= 1
            if not self._turns:
                self._answered.set()


def _may_be_read_later(error: Exception) -> bool:
    """True if the version could not be read, for a reason that may pass, or that a newer version does not have."""
    if isinstance(error, PeerRefused):
        return False
    return isinstance(error, StaleHandle | FetchFailed | TransferTimeout) or is_loss(error)
