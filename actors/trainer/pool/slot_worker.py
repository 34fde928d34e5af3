"""A slot of the training pool: a process that hosts the ranks of policies in turn.

    prefetch  the base part and the step part from the host's memory, for a gang that has not met
    enter     a gang: the first rank opens its meeting
    bind      build, or resume: the same unless it was prefetched
    compute   accumulate, optimizer_step, sft, end_sft, save; after those that change the base part: set_weights, and
              set_rest beside the computations that follow
    suspend   the step part into the host's memory: the base part is there already

It owns nothing: the memory is the facade's, the rows are leased by the facade. If it dies, the facade begins again from
the last whole base part, at another slot or at its next life.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from ....core.actor import Actor, endpoint
from ....core.base.task_groups import first_error
from ....core.waits import Wait
from ....transport.device_memory.devices import DeviceEvent
from ....transport.handle import LentMemory, StateHandle
from ....transport.select import this_node
from ....transport.state import payload_bytes
from ...errors import WorkerReplaced
from ...messages import (
    GangPlace,
    HostState,
    LeasedBatch,
    MicroBatchTrained,
    Moved,
    SavedRest,
    SavedWeights,
    SlotApi,
    SlotLife,
    SlotStepped,
    StateBytes,
    Suspended,
)
from ...names import PolicyName, Step
from ...spans import record
from ..backends.policy_backend import PolicyBackend, TrainingStep
from ..trainer_setup import TrainerSetup
from .lender import TRANSFER_TIMEOUT_S
from .resharding import reads_of_rank
from .slot import Slot
from .state_data import plain_data, sent_data

_LOOPBACK: Final = "127.0.0.1"
_ABORT_AGAIN_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class _Base:
    """A base part on this slot, until it is copied: live tensors, and what was beside them when they were complete, at
    ``point`` of the devices' computations."""

    tensors: Mapping[str, Any]
    data: dict[str, Any]
    version: int
    point: DeviceEvent | None


class SlotWorker(Actor, SlotApi):
    """It is one class because each call is meant for one life, and each move of a state takes the policy's lock: most
    of it are the calls of ``SlotApi``."""

    def __init__(self, setup: TrainerSetup) -> None:
        """Raises RecipeError if the recipe can't be loaded."""
        self._slot = Slot(setup)
        self._moving = {policy: asyncio.Lock() for policy in setup.policies}
        """A policy moves in one direction at a time: one that is dropped, because another of its gang's slots was lost,
        may be on its way."""
        self._prefetched: dict[PolicyName, dict[str, Any]] = {}
        self._bases: dict[PolicyName, _Base] = {}
        self._gang = asyncio.Lock()
        self._in_gang: PolicyName | None = None

    async def on_start(self) -> None:
        self._life = self.system.new_id()
        self._torch = version("torch")
        await self._slot.open(self.system, self.background)

    async def on_stop(self) -> None:
        await self._slot.close()

    def statistics(self) -> Mapping[str, float]:
        return self._slot.statistics()

    # ------------------------------------------------------------------ lives

    @endpoint
    async def enlist(self) -> AsyncGenerator[SlotLife]:
        system, side = self.system, self._slot.side
        yield SlotLife(self._life, system.incarnation, self._torch, this_node(system.directory), side)
        await asyncio.Event().wait()

    def _check_life(self, life: str) -> None:
        """Raises WorkerReplaced if ``life`` is not this one."""
        if life != self._life:
            raise WorkerReplaced(self._life, life)

    # ------------------------------------------------------------------ states

    @asynccontextmanager
    async def _record_move(self, kind: str, policy: PolicyName) -> AsyncIterator[None]:
        """Records the time of a move as a span, with the policy's version after it."""
        begin = self.system.spans.now()
        yield
        version, end = self._slot.version_of(policy), self.system.spans.now()
        record(self.system.spans, self.ref.name, kind, begin, end, policy=policy, version=version)

    @endpoint
    async def enter(self, life: str, policy: PolicyName, rank: int, over_hosts: bool) -> str:
        self._check_life(life)
        async with self._moving[policy]:
            await self._gang.acquire()  # the policy that leaves may still be on its way
            self._in_gang = policy
            if rank:
                return ""
            host = self._address() if over_hosts else _LOOPBACK
            return await self.system.run_blocking(self._slot.open_meeting, policy, host, over_hosts)

    def _address(self) -> str:
        """This host's, in the network of the run."""
        tcp = self.system.tcp
        assert tcp is not None, "hosts reach each other over TCP"
        return tcp.advertise or tcp.host

    @endpoint
    async def build(self, life: str, policy: PolicyName, place: GangPlace) -> None:
        self._check_life(life)
        async with self._moving[policy], self._record_move("build", policy):
            await self._slot.compute(f"the start of {policy}", partial(self._slot.build, policy, place))
            await self._note_base(life, policy)

    @endpoint
    async def prefetch(self, life: str, policy: PolicyName, state: HostState) -> Moved:
        self._check_life(life)
        async with self._moving[policy], self._record_move("resume", policy):
            return await self._prefetch(policy, state)

    async def _prefetch(self, policy: PolicyName, state: HostState) -> Moved:
        handles = [state.base.rest, *([] if state.step is None else [state.step])]
        specs = [spec for handle in handles for spec in handle.tensors]
        # In a thread: a device that is short of memory lets it wait for the computations under way.
        memory = await self.system.run_blocking(self._slot.memory, policy, specs)
        parts = [(handle, {spec.name: memory[spec.name] for spec in handle.tensors}) for handle in handles]
        moved = await self._fetch_all(parts)
        self._prefetched[policy] = memory
        return moved

    @endpoint
    async def resume(self, life: str, policy: PolicyName, place: GangPlace, state: HostState) -> Moved:
        self._check_life(life)
        async with self._moving[policy], self._record_move("resume", policy):
            if place.size > 1:
                await self._resume_rank(policy, place, state)
                return self._count_moved([])
            backend = await self._slot.compute(f"room for {policy}", partial(self._slot.host, policy, place))
            live = backend.live_weights() if state.base.weights_are_live else {}
            gradient = {} if state.step is None else backend.gradients()
            parts: list[tuple[StateHandle, Mapping[str, Any]]]
            parts = [(state.base.rest, _exclude_live(backend.base_state(), live))]
            if live:
                parts.append((state.base.weights, live))
            if state.step is not None:
                parts.append((state.step, gradient))
            moved = await self._fetch_all(parts)
            await self._slot.compute(
                f"the state of {policy}",
                partial(backend.load_state, TrainingStep(gradient, plain_data(state.data))),
            )
            return moved

    async def _resume_rank(self, policy: PolicyName, place: GangPlace, state: HostState) -> None:
        """The state is here before the gang meets: ranks that copy it meanwhile would let the others wait, and the
        backend takes over its memory."""
        assert not state.base.weights_are_live, "those of a gang are gathered copies"
        memory = self._prefetched.pop(policy)

        def host() -> None:
            backend = self._slot.host(policy, place, memory)
            gradient = {} if state.step is None else backend.gradients()
            backend.load_state(TrainingStep(gradient, plain_data(state.data)))

        await self._slot.compute(f"the state of {policy}", host)

    @endpoint
    async def reshard(
        self, life: str, policy: PolicyName, place: GangPlace, ranks: list[tuple[HostState, StateBytes]]
    ) -> Moved:
        self._check_life(life)
        async with self._moving[policy], self._record_move("resume", policy):
            backend = await self._slot.compute(f"room for {policy}", partial(self._slot.host, policy, place))
            state = ranks[0][0]
            gradient = {} if state.step is None else backend.gradients()
            live = {**backend.base_state(), **gradient}
            moved = self._count_moved([])
            for part in reads_of_rank(live, backend.parts(), ranks):
                await self._slot.transport.get(
                    part.handle,
                    names=part.into.keys(),
                    rows=part.rows,
                    into=part.into,
                    timeout_s=TRANSFER_TIMEOUT_S,
                )
                moved = Moved(
                    moved.size_bytes + payload_bytes(part.into), self._count_moved([part.handle]).path
                )
            await self._slot.compute(
                f"the state of {policy}",
                partial(backend.load_state, TrainingStep(gradient, plain_data(state.data))),
            )
            await self._note_base(life, policy)
            return moved

    @endpoint
    async def state_bytes(self, life: str, policy: PolicyName) -> StateBytes:
        self._check_life(life)
        backend = self._slot[policy]
        base, live = backend.base_state(), backend.live_weights()
        step = payload_bytes(backend.gradients())
        names = {_address(tensor): name for name, tensor in base.items()}
        return StateBytes(
            weights=payload_bytes(backend.weights_outline()),
            rest=payload_bytes(_exclude_live(base, live)),
            step=step,
            base=payload_bytes(base),
            on_slot=payload_bytes(base) + step + payload_bytes(backend.frozen_state()),
            rows={name: (part.start, part.stop) for name, part in backend.parts().items()},
            live={name: names[_address(tensor)] for name, tensor in live.items()},
        )

    @endpoint
    async def set_weights(self, life: str, policy: PolicyName, weights: LentMemory) -> SavedWeights:
        self._check_life(life)
        async with self._moving[policy], self._record_move("publish", policy):
            backend = self._slot[policy]

            def note() -> tuple[Mapping[str, Any], DeviceEvent | None]:
                return backend.live_weights(), self._slot.transport.record()

            live, point = await self._slot.compute(f"the weights of {policy}", note)
            if live:
                handle = await self._set(policy, live, backend.version, weights, point)
            else:
                handle = await self._gather(policy, backend, weights)
            return SavedWeights(handle, await self._slot.compute(f"the probe of {policy}", backend.probe))

    async def _gather(self, policy: PolicyName, backend: PolicyBackend, weights: LentMemory) -> StateHandle:
        """Sets the weights of all ranks in ``weights``, where they are made."""
        try:
            return await self._slot.transport.fill(
                policy,
                backend.weights_outline(),
                partial(self._slot.gather_weights, policy, backend),
                version=backend.version,
                lent=weights,
                timeout_s=TRANSFER_TIMEOUT_S,
            )
        except BaseException:
            # The other ranks wait for this one's rows, or for their own to be taken.
            await self.system.run_blocking(self._slot.abort, policy)
            raise

    @endpoint
    async def set_rest(self, life: str, policy: PolicyName, rest: LentMemory, live: list[str]) -> SavedRest:
        self._check_life(life)
        async with self._moving[policy], self._record_move("copy", policy):
            base = self._bases.pop(policy)
            tensors = {name: tensor for name, tensor in base.tensors.items() if name not in live}
            handle = await self._set(f"{policy}/rest", tensors, base.version, rest, base.point)
            return SavedRest(handle, sent_data(base.data))

    async def _note_base(self, life: str, policy: PolicyName) -> None:
        """The base part has changed: ``set_rest`` will copy it. Called before the next computation of the policy."""
        self._check_life(life)
        backend = self._slot[policy]

        def note() -> _Base:
            point = self._slot.transport.record()
            return _Base(backend.base_state(), backend.step_state().data, backend.version, point)

        # Not in set_rest: beside a forward, modules of a gang have gathered tensors in place of their own.
        self._bases[policy] = await self._slot.compute(f"the state of {policy}", note)

    @endpoint
    async def suspend(self, life: str, policy: PolicyName, step: LentMemory) -> Suspended:
        self._check_life(life)
        async with self._moving[policy], self._record_move("suspend", policy):
            backend = self._slot[policy]
            state = backend.step_state()
            handle = None
            moved = Moved(0, "none")
            if state.tensors:
                handle = await self._set(f"{policy}/step", state.tensors, backend.version, step)
                moved = Moved(handle.size_bytes, handle.sources[0].path)
            await self._leave(policy)
            return Suspended(handle, sent_data(state.data), moved)

    @endpoint
    async def forget_copies(self, life: str, policy: PolicyName) -> None:
        self._check_life(life)
        for part in ("rest", "step"):
            await self._slot.transport.drop(f"{policy}/{part}")

    @endpoint
    async def drop(self, life: str, policy: PolicyName) -> None:
        self._check_life(life)
        with first_error():
            async with asyncio.TaskGroup() as group:
                aborting = group.create_task(self._abort(policy))
                async with self._moving[policy]:
                    await self._leave(policy)
                aborting.cancel()

    async def _abort(self, policy: PolicyName) -> None:
        """Ends its collective calls, until this is cancelled: a rank may be about to join its gang, and wait there."""
        while True:
            await self.system.run_blocking(self._slot.abort, policy)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def _leave(self, policy: PolicyName) -> None:
        self._prefetched.pop(policy, None)
        self._bases.pop(policy, None)
        try:
            await self._slot.compute(f"the release of {policy}", partial(self._slot.release, policy))
        finally:
            if self._in_gang == policy:
                self._in_gang = None
                self._gang.release()

    async def _set(
        self,
        key: str,
        tensors: Mapping[str, Any],
        version: int,
        lent: LentMemory,
        after: DeviceEvent | None = None,
    ) -> StateHandle:
        return await self._slot.transport.set(
            key, tensors, version=version, lent=lent, after=after, timeout_s=TRANSFER_TIMEOUT_S
        )

    async def _fetch_all(self, parts: Sequence[tuple[StateHandle, Mapping[str, Any]]]) -> Moved:
        """Copies each part of a state, by a thread of its own."""
        with first_error():
            async with asyncio.TaskGroup() as group:
                for handle, into in parts:
                    group.create_task(self._fetch(handle, into))
        return self._count_moved([handle for handle, _ in parts])

    def _count_moved(self, handles: Sequence[StateHandle]) -> Moved:
        """States that were copied here."""
        chosen = {choice.path for handle in handles if (choice := self._slot.transport.chosen(handle.key))}
        return Moved(sum(handle.size_bytes for handle in handles), ", ".join(sorted(chosen)) or "none")

    async def _fetch(self, handle: StateHandle, into: Mapping[str, Any]) -> None:
        await self._slot.transport.get(handle, into=into, timeout_s=TRANSFER_TIMEOUT_S)

    # ------------------------------------------------------------------ computations

    @endpoint
    async def accumulate(self, life: str, policy: PolicyName, leased: LeasedBatch) -> MicroBatchTrained:
        self._check_life(life)
        self._slot.forget_consumed()
        return await self._slot.accumulate(policy, leased)

    @endpoint
    async def optimizer_step(self, life: str, policy: PolicyName, step: Step) -> SlotStepped:
        self._check_life(life)
        stats, version = await self._slot.optimizer_step(policy, step)
        await self._note_base(life, policy)
        return SlotStepped(version, stats)

    @endpoint
    async def sft(self, life: str, policy: PolicyName, first_batch: int, count: int) -> float:
        self._check_life(life)
        loss = await self._slot.sft(policy, first_batch, count)
        await self._note_base(life, policy)
        return loss

    @endpoint
    async def end_sft(self, life: str, policy: PolicyName) -> None:
        self._check_life(life)
        await self._slot.end_sft(policy)
        await self._note_base(life, policy)

    @endpoint
    async def save(self, life: str, policy: PolicyName, folder: str) -> None:
        self._check_life(life)
        await self._slot.save(policy, Path(folder))

    def waits(self) -> list[Wait]:
        return self._slot.waits()

    def progress(self) -> int:
        return self._slot.progress()


def _exclude_live(base: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a base part that are not among the ``live`` weights."""
    published = set(map(_address, live.values()))
    return {name: tensor for name, tensor in base.items() if _address(tensor) not in published}


def _address(tensor: Any) -> tuple[int, int]:
    """Address and bytes of a tensor of PyTorch, or of an array."""
    at = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
    return at, tensor.nbytes
