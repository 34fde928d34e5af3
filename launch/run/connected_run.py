"""A run from another program: in another process, or on another host.

    async with flexmarl.connect("runs/first") as run:
        async for step in run.steps(after=0):
            print(step.step, step.tokens)

The commands ``flexmarl status``, ``stop``, ``logs``, ``admit`` and ``store`` are made of it.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from ...actors.columns.column_refs import plain_cell
from ...actors.columns.declared_columns import OFFER_KEY, REWARD_COLUMN
from ...actors.columns.store_client import ExperienceReader
from ...actors.errors import QueriesRefused, StoreError
from ...actors.messages import WORK_TIMEOUT_S, Query, QueryAnswer, Selection, StoreApi
from ...actors.names import AgentName
from ...actors.recipe.query_problem import query_problem
from ...actors.run_events import RunEnded, RunEvent
from ...actors.step_metrics import StepMetrics
from ...core.base.texts import half_problem
from ...core.durable.files import replace_private
from ...core.errors import ActorDead, CallNotAllowed, CallTimeout, LocalProtocolError
from ...core.ref import ActorRef
from ...core.system import ActorSystem
from ...core.wire.curve import Keys
from ..errors import RunDirectoryError, RunUnreachable
from ..run_folder import stored_run
from ..run_folder.run_directory import RunDirectory
from ..sharing.shared_group import SharedGroup, Task
from .run_address import SCHEMES, RunAddress
from .run_control import NAME, Right, RunControl, RunStatus

Answer = TypeVar("Answer")

_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.1
_MOST_SHOWN: Final = 65536
_LOG_BYTES: Final = 1 << 20


def connect(run: Path | str, keys: Keys | None = None, *, wait_s: float = 0.0) -> "ConnectedRun":
    """A connection to a run, as a context of the loop that is running.

    ``run``: its folder; the file ``address`` in it, or one of ``flexmarl admit``, also copied to another host; or its
    address, with ``keys`` if it begins with ``tcp://``. ``wait_s``: seconds in which it may still be starting.
    """
    return ConnectedRun(run, keys, wait_s)


class ConnectedRun:
    """A run that another program has started. Entering raises RunUnreachable if it can't be asked, UnsafeKeys if others
    may have read the file. Every method raises ActorDead if the run's launcher has ended, CallTimeout if it does not
    answer within 30 s, CallNotAllowed if the keys are not for this call.
    """

    def __init__(self, run: Path | str, keys: Keys | None = None, wait_s: float = 0.0) -> None:
        self._run = run
        self._keys = keys
        self._wait_s = wait_s
        self._store: ActorRef[StoreApi] | None = None
        self._shown: dict[str, str] = {}
        """The offers of samples that were shown to judge them, by sample id, the newest last."""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._wait_s
        while True:
            try:
                return await self._enter()
            except (RunUnreachable, RunDirectoryError):
                if loop.time() >= give_up_at:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _enter(self) -> Self:
        self._address = _address_of(self._run, self._keys)
        name = f"client-{os.getpid()}-{secrets.token_hex(4)}"
        self._system = ActorSystem(name, keys=self._address.keys)
        await self._system.__aenter__()
        try:
            self._control = self._system.ref(NAME, self._address.address, RunControl)
            await self.status()
        except (ActorDead, CallTimeout) as error:
            await self._system.__aexit__(None, None, None)
            raise RunUnreachable(f"{self._run} does not answer: has it ended? {error}") from None
        except BaseException:
            await self._system.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._system.__aexit__(kind, error, trace)

    # ------------------------------------------------------------------ following

    async def status(self) -> RunStatus:
        """The run as it is now: step, phase, processes, and the causes of a standstill."""
        return await self._control.within(_TIMEOUT_S).status()

    async def actor_waits(self) -> tuple[str, ...]:
        """The waits and computations of all actors, a line each, also while the run moves."""
        return await self._control.within(_TIMEOUT_S).actor_waits()

    def steps(self, after: int | None = None) -> AsyncGenerator[StepMetrics, None]:
        """The steps after step ``after`` (0: all), None: those that are complete from the first iteration on, until the
        run ends or is stopped. Raises RunFailed at the end of a run that fails.

        A slow reader delays nothing: the run's file keeps the steps for it. A run that ends waits 2 s for readers.
        """
        return self._control.within(WORK_TIMEOUT_S).steps(after)

    def events(self, after: int | None = None) -> AsyncGenerator[RunEvent, None]:
        """The events after the first ``after`` of ``events.jsonl`` (0: all), None: those from the first iteration on;
        the last one is ``RunEnded``. Raises RunFailed at the end of a run that fails."""
        return self._control.within(WORK_TIMEOUT_S).events(after)

    async def wait(self) -> RunEnded:
        """Waits for the run's end. Raises RunFailed."""
        last: RunEvent | None = None
        async for event in self.events():
            last = event
        assert isinstance(last, RunEnded)
        return last

    async def log(self, actor: str = "launcher") -> str:
        """The last MiB of an actor's log. Raises RunDirectoryError if the actor has none."""
        return await self._control.within(_TIMEOUT_S).log(actor, _LOG_BYTES)

    # ------------------------------------------------------------------ changing

    async def stop(self, *, now: bool = False, by: str = "a connected program") -> bool:
        """Asks the run to end, and does not wait for its end. True: it ends after the steps under way, with a
        checkpoint; False: at once, as with ``now``. ``by``: for the run's messages."""
        return await self._control.within(_TIMEOUT_S).stop(by, now)

    async def admit(self, file: Path, rights: Sequence[Right]) -> None:
        """Makes a file for ``connect``, whose holder may do no more than ``rights``: ``watch`` (status, steps, events,
        logs), and with it ``judge`` (samples, write), ``submit``, ``share`` or ``stop``. It is for this life of the
        run: a resumed run has new keys. Raises RunUnreachable if the run does not listen over TCP, OSError."""
        run_keys = self._address.keys
        if run_keys is None:
            raise RunUnreachable(
                f"{self._run} has its sockets in a private folder of this host. Start it with "
                "network.listen=ADDRESS, so that it listens for other users and hosts"
            )
        keys = Keys.for_client(run_keys.server_public)
        await self._control.within(_TIMEOUT_S).admit(keys.client_public, [*rights])
        replace_private(file, RunAddress(self._address.address, keys).text().encode("ascii"))

    async def submit(self, queries: Sequence[Query], *, judged: bool = True) -> list[QueryAnswer]:
        """Has the run roll out and train these queries, and waits for it: returns an answer for each, in their order,
        with the texts, turns and rewards of its trajectories. If not ``judged``, it does not wait for rewards from
        outside the run, which the answers lack then; ``sample_id`` of a turn names it for ``write``.

        Under ``async`` they begin at once. Else they are in the next step that begins, in place of queries that it
        would draw from the training data; beyond the step's size they are in the steps after that. They are not part of
        a checkpoint: if the run ends before, or continues from an earlier checkpoint, submit them again. If this call
        is cancelled, those that wait are withdrawn.

        Raises QueriesRefused if one can't be sent; if one has the id of another that is under way; if no further step
        begins or the run has ended, as soon as that is so for one of them; if 10 000 wait already; if the run is
        ``deterministic``. Those that a step has taken are trained all the same.
        """
        for number, query in enumerate(queries):
            if (problem := query_problem(query)) is not None:
                raise QueriesRefused(f"queries[{number}] is {problem}")
        return await self._control.within(WORK_TIMEOUT_S).submit([*queries], judged)

    async def submit_logged(self, lines: Sequence[Mapping[str, Any]]) -> list[QueryAnswer]:
        """Has the run train trajectories that ended before, and waits until they are in its store: returns an answer
        for each group, in the order of their first lines; ``dropped`` is the reason if it is not trained.

        A line has ``agent``, ``prompt`` (text or messages, with ``tools``), ``answer`` (text), ``reward`` and
        ``logprobs``; ``version`` if this run has generated the answer; ``tokens`` and ``prompt_tokens`` in place of
        texts; ``temperature`` of the log-probs; ``query``, the same for all answers to one query; or ``turns``, a list
        of such turns. They begin with the next steps, in place of drawn queries.

        Raises QueriesRefused, and trains none then: with the mistakes by line; if no further step begins or the run has
        ended; if 10 000 groups wait already; if the run is ``deterministic``.
        """
        for number, line in enumerate(lines, 1):
            if problem := half_problem(line):
                raise QueriesRefused(f"line {number}: {problem}")
        return await self._control.within(WORK_TIMEOUT_S).submit_logged([dict(line) for line in lines])

    def shared_groups(self, task: Task, after: int | None = None) -> AsyncGenerator[SharedGroup, None]:
        """The finished groups of the run as text, for another run of the same ``task``: those behind number ``after``,
        None: from the first iteration on, until the run ends. The first item has no lines. Raises SharingRefused for
        another task."""
        return self._control.within(WORK_TIMEOUT_S).shared_groups(task, after)

    # ------------------------------------------------------------------ samples

    async def samples(self, where: str = "", limit: int = 1000) -> list[dict[str, Any]]:
        """The first ``limit`` samples in the store for which ``where``, an SQL expression over their columns, is true;
        by column name, without tokens, tensors and strings of more than 256 characters (``column`` has them). Waits
        until the run has a store. Raises StoreError, SelectTimeout, TooManySelects."""
        return (await self.select(where, limit)).rows

    async def select(self, where: str = "", limit: int = 1000) -> Selection:
        """As ``samples``, with the number of all samples for which ``where`` is true."""
        return await (await self._store_api()).select(where, limit)

    async def trajectory(self, name: str) -> Selection:
        """The samples of a trajectory that the store has, turn by turn. ``name``: the trajectory's, or the id of one of
        its samples. Raises StoreError if nothing in the store has that name."""
        return await (await self._store_api()).trajectory(name)

    async def column(self, agent: str, name: str, sample_ids: Sequence[str]) -> list[Any]:
        """The values of a column of these samples, in their order: also long strings, token ids and arrays; None if
        a sample has no value, or was trained already. Raises StoreError for an unknown agent, column or sample,
        SamplesUnreachable for long values that a rollout worker on another node than the store's has written."""
        reader = ExperienceReader(await self._store_ref(), None)
        return await reader.column(AgentName(agent), name, sample_ids)

    async def unjudged(self, agent: str, *columns: str) -> AsyncGenerator[dict[str, list[Any]], None]:
        """The samples of ``agent`` that wait for a reward from this program, as they come, until the run ends: lists by
        column, ``sample_id``, ``@offer``, ``text`` (the answer's), ``query_text`` and ``columns``. ``write`` their
        rewards; those without one come again. It ends too if the run continues from a checkpoint: connect again then.
        Raises StoreError if the config has no ``agents.<agent>.columns.reward``, and for an unknown column."""
        names = ["text", "query_text", *columns]
        try:
            while True:
                samples = await (await self._store_api()).unjudged(AgentName(agent), names)
                if samples["sample_id"]:
                    self._shown |= zip(samples["sample_id"], samples[OFFER_KEY], strict=True)
                    for name in [*islice(self._shown, max(0, len(self._shown) - _MOST_SHOWN))]:
                        del self._shown[name]
                    yield {name: [plain_cell(cell) for cell in cells] for name, cells in samples.items()}
                await asyncio.sleep(_POLL_S)
        except ActorDead:
            return

    async def write(self, agent: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Writes columns that the config declares as ``written_by: external``, all values or none: ``sample_id`` and
        further columns by name, one value for each sample; ``reward`` alone. Returns when they are durable. A reward
        is for the answer that ``unjudged`` has shown last, or for that of the column ``@offer``; it is left out if the
        sample's group began again since then. Raises StoreError with the reason."""
        values = {name: [*cells] for name, cells in columns.items()}
        if REWARD_COLUMN in values:
            shown = [self._shown.get(name) for name in values.get("sample_id", ())]
            values.setdefault(OFFER_KEY, shown)
        store = await self._store_api()
        try:
            await store.write(self._system.name, {agent: values})
        except LocalProtocolError as error:
            raise StoreError(str(error)) from error

    async def _store_api(self) -> StoreApi:
        return (await self._store_ref()).within(_TIMEOUT_S)

    async def _store_ref(self) -> ActorRef[StoreApi]:
        if self._store is None:
            self._store = await self._control.within(WORK_TIMEOUT_S).store()
        return self._store


def query_run(run: Path, call: Callable[[ConnectedRun], Awaitable[Answer]]) -> Answer:
    """The answer to one question, in a loop of its own. Raises RunUnreachable if no process works on the run, or
    another user's does."""

    async def ask() -> Answer:
        async with connect(run) as connected:
            try:
                return await call(connected)
            except CallNotAllowed as error:
                if error.endpoint == "admit":
                    raise RunUnreachable(
                        f"{run} can't admit others: the run's own runs/NAME/address can"
                    ) from error
                raise RunUnreachable(
                    f"{run} does not give the right to call {error.endpoint}: ask the person who started the run for "
                    "`flexmarl admit RUN FILE --may stop`, or watch, judge, submit or share, and use that FILE"
                ) from error

    return asyncio.run(ask())


def _address_of(run: Path | str, keys: Keys | None) -> RunAddress:
    """Raises RunUnreachable, RunDirectoryError, UnsafeKeys."""
    if isinstance(run, str) and run.startswith(SCHEMES):
        return RunAddress(run, keys)
    path = Path(run)
    if not path.is_file():
        directory = RunDirectory.existing(path)
        if not stored_run.is_alive(directory):
            raise RunUnreachable(f"{path} is not running")
        path = directory.control_address
    try:
        run_address = RunAddress.load(path)
    except FileNotFoundError:
        raise RunUnreachable(f"{run} starts or ends: it can't be asked yet, or any more") from None
    except PermissionError:
        owner = path.stat().st_uid
        raise RunUnreachable(f"{run} is a run of user {owner}, not {os.geteuid()}") from None
    return RunAddress(run_address.address, keys or run_address.keys)
