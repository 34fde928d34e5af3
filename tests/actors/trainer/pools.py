"""A trainer with a shared pool in one process, with a store and slot workers that can die, in virtual time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final

from flexmarl.actors.columns.store_client import ExperienceWriter, segment_directories
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import WorkerReplaced
from flexmarl.actors.json_files import read_json
from flexmarl.actors.messages import Sample, SlotLife, TrainerApi
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.store.store import Store
from flexmarl.actors.trainer.backends.backend_config import SimulatedTrainerConfig
from flexmarl.actors.trainer.backends.simulated_policy import STATE_FILE
from flexmarl.actors.trainer.pool.lender import LENDER, HostLender
from flexmarl.actors.trainer.pool.pool_config import SharedPoolConfig
from flexmarl.actors.trainer.pool.slot import Slot
from flexmarl.actors.trainer.pool.slot_worker import SlotWorker
from flexmarl.actors.trainer.trainer import Trainer
from flexmarl.actors.trainer.trainer_setup import PolicySetup, SharedPoolSetup, TrainerSetup
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.core.wire.zeromq import Tcp
from flexmarl.transport.select import this_node

from ..stores import store_setup

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
RECIPE: Final = """
async def workflow(query, agents): ...
def train_query(position, seed): ...
def eval_queries(seed): ...
def sft(agent, batch, size, seed): return [("12", "34")] * size
"""
CALLS: Final = (
    "enter", "build", "prefetch", "resume", "reshard", "set_rest", "state_bytes", "set_weights", "suspend", "drop",
    "accumulate", "optimizer_step", "sft", "end_sft", "save", "forget_copies",
)  # fmt: skip


def simulated_policy(name: str, **costs: Any) -> PolicySetup:
    return PolicySetup(trainer=SimulatedTrainerConfig(**costs), credit={AgentName(name): CreditConfig()})


@dataclass
class Fate:
    """``dies_at``: the number of the call, over all slots, in which the worker dies; ``before`` the call does anything,
    or after it, so that its answer is lost. ``takes_host``: its host is lost with it. ``calls``: all that came, by
    name. ``ends``: all that have ended. ``torch``: its version, of the first life of all slots and of the later ones.
    """

    dies_at: int = 0
    before: bool = True
    takes_host: bool = False
    calls: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    torch: tuple[str, str] = ("2.9.0", "2.9.0")


class MortalSlot(SlotWorker):
    """A slot worker whose later life is the same object, which remembers nothing."""

    def __init__(self, setup: TrainerSetup, fate: Fate) -> None:
        super().__init__(setup)
        self._setup = setup
        self._fate = fate
        self.number_of_life = 1
        self.host: FarHost | None = None
        self._death = asyncio.Event()

    @endpoint
    async def enlist(self) -> AsyncGenerator[SlotLife]:
        torch, node = self._fate.torch[self.number_of_life > 1], this_node(self.system.directory)
        yield SlotLife(self._life, self.number_of_life, torch, node, self._slot.side)
        await self._death.wait()

    async def end(self) -> None:
        """Dies, with its host if its fate takes that too."""
        self.die()
        if self._fate.takes_host and self.host is not None:
            await self.host.lose()

    def die(self) -> None:
        old, self._slot = self._slot, Slot(self._setup)
        for kept in ("_transport", "_experience", "_compared", "_resources"):  # the process is the same
            setattr(self._slot, kept, getattr(old, kept))
        self._moving = {policy: asyncio.Lock() for policy in self._setup.policies}
        self._prefetched.clear()
        self._bases.clear()
        self._gang, self._in_gang = asyncio.Lock(), None
        self.number_of_life += 1
        self._life = f"{self._life}+"
        self._death.set()
        self._death = asyncio.Event()


def _mortal(name: str) -> Callable[..., Any]:
    method = getattr(SlotWorker, name)

    @wraps(method)
    async def called(self: MortalSlot, life: str, *arguments: Any) -> Any:
        fate = self._fate
        fate.calls.append(name)
        dies = len(fate.calls) == fate.dies_at
        if dies and fate.before:
            await self.end()
        result = await method(self, life, *arguments)
        fate.ends.append(name)
        if dies and not fate.before:
            await self.end()
        if life != self._life:
            raise WorkerReplaced(self._life, life)
        return result

    return called


for _name in CALLS:
    setattr(MortalSlot, _name, _mortal(_name))


@dataclass
class FarHost:
    """A host with a slot, and with a lender in its node's process."""

    name: str
    network: MemoryNetwork
    lender: HostLender
    is_lost: bool = False

    async def lose(self) -> None:
        """All its processes end, and its memory with them."""
        if not self.is_lost:
            self.is_lost = True
            self.network.crash(self.name)
            await self.lender.on_stop()


class Killer(Actor):
    """The supervisor, as far as the trainer knows it: a life that still runs ends, and another begins. ``lends``: the
    nodes of slots on other hosts lend memory."""

    def __init__(
        self, fate: Fate, slots: list[MortalSlot], refs: list[ActorRef[Any]], *, lends: bool = False
    ) -> None:
        self._fate, self._slots = fate, slots
        self.addresses = {ref.name: ref.address for ref in refs}
        self._nodes = self.addresses if lends else {}

    @endpoint
    async def locate_node(self, name: str) -> str:
        return self._nodes.get(name, "")

    @endpoint
    async def locate(self, name: str) -> str:
        return self.addresses[name]

    @endpoint
    async def lost(self, name: str, incarnation: int, reason: str) -> None:
        await asyncio.sleep(0.5)
        self._fate.killed.append(name)
        slot = self._slots[int(name.removeprefix("slot-"))]
        if slot.number_of_life == incarnation:
            slot.die()


class Listener(Actor):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    @endpoint
    async def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)


@dataclass
class House:
    """``trainer``, the reference to ``actor``, with all that it needs."""

    folder: Path
    actor: Trainer
    trainer: TrainerApi
    store: Store
    writer: ExperienceWriter
    fate: Fate
    slots: list[MortalSlot]
    listener: Listener
    hosts: list[FarHost] = field(default_factory=list)

    async def put(self, policy: PolicyName, step: int, count: int, prompt: tuple[int, ...] = ()) -> None:
        """Rows of two tokens each, of the version before ``step``."""
        await self.writer.put([sample(policy, step, number, prompt) for number in range(count)])

    async def step(self, policy: PolicyName, step: int, micro_batches: list[int]) -> float:
        """One whole step; returns its loss."""
        for count in micro_batches:
            await self.trainer.train(policy, Version(step - 1), count)
        return (await self.trainer.optimizer_step(policy, Step(step))).stats.figures["loss"]

    async def saved(self, policy: PolicyName) -> dict[str, Any]:
        """The saved state of a simulated policy, with the ids of all trained samples."""
        await self.trainer.save(policy, str(self.folder / "saved" / policy))
        return read_json(self.folder / "saved" / policy / STATE_FILE)


def sample(policy: str, step: int, number: int, prompt: tuple[int, ...] = ()) -> Sample:
    turn = 0 if policy == SOLVER else 1
    reward = float(number % 2)
    content = (prompt, (7, number), (-1.0, -1.0 - number / 8))
    return Sample(
        f"{step}:q_{turn}_{number}", policy, step, step - 1, f"{step}:q", reward, reward - 0.5, *content,
        query_position=number // 2,
    )  # fmt: skip


@asynccontextmanager
async def house(
    folder: Path,
    policies: dict[PolicyName, PolicySetup],
    config: SharedPoolConfig | None,
    fate: Fate | None = None,
    recipe: str = RECIPE,
    *,
    apart: bool = False,
    lends: bool = False,
) -> AsyncIterator[House]:
    """``config``: None for a static pool. ``recipe``: the code of its ``workflow.py``. ``apart``: each slot is on
    another host than the trainer, with a directory of its own. ``lends``: each slot is on another host, which lends
    memory; unless they are also ``apart``, all hosts share a directory, as in a simulated run."""
    folder.mkdir(exist_ok=True)
    (folder / "workflow.py").write_text(recipe)
    shared, fate = folder / "shared", fate or Fate()
    for path in (shared, shared / "store"):
        path.mkdir(mode=0o700)
    store = Store(store_setup(policies, shared / "store"))
    network, tcp = MemoryNetwork(), Tcp(keys=Keys.make()) if apart else None
    async with (
        AsyncExitStack() as hosts,
        ActorSystem("node", shared, wire=network.wire("node"), tcp=tcp) as system,
    ):
        store_ref = await system.add(store, "store")
        trained = (policies, RecipeConfig(folder=str(folder), data={}, seed=3), 10)
        setup = TrainerSetup(*trained, store_ref, shared / "store")
        listener, slots, far_hosts = Listener(), [], list[FarHost]()
        pool = None
        if config is not None:
            slots = [MortalSlot(setup, fate) for _ in range(config.slot_count)]
            refs: list[ActorRef[Any]] = []
            for number, slot in enumerate(slots):
                place = system
                if apart or lends:
                    name = f"host-{number}"
                    far = folder / name if apart else shared
                    far.mkdir(mode=0o700, exist_ok=True)
                    host = ActorSystem(name, far, wire=network.wire(name), tcp=tcp)
                    place = await hosts.enter_async_context(host)
                if lends:
                    lender = HostLender(name, far)
                    await place.add(lender, LENDER)
                    slot.host = FarHost(name, network, lender)
                    far_hosts.append(slot.host)
                await place.add(slot, f"slot-{number}")
                refs.append(system.ref(f"slot-{number}", place.address, MortalSlot))
            supervisor: ActorRef[Any] = await system.add(Killer(fate, slots, refs, lends=lends), "killer")
            console: ActorRef[Any] = await system.add(listener, "console")
            pool = SharedPoolSetup(config, refs, supervisor, console, folder / "suspended")
        whole = TrainerSetup(*trained, store_ref, shared / "store", pool=pool)
        actor = Trainer(whole)
        trainer = (await system.add(actor, "trainer")).within(1e6)
        writer = ExperienceWriter(store_ref, "tests", segment_directories(shared, shared / "store"))
        yield House(folder, actor, trainer, store, writer, fate, slots, listener, far_hosts)
        writer.close()
