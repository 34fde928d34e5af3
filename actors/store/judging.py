"""Rewards from outside the run: the samples that wait for one, and those that were given.

    offer      a workflow has returned: the samples of its trajectory are shown to judges, as rows that are ``writing``
    write      a judge gives rewards; they are acknowledged once they are durable
    given      the rewards of a rollout worker's samples, with which it closes their groups
    withdraw   their trajectory has its rewards, or has failed: nothing more is known of them here

A sample is a row of its table only when its group is closed, with its reward. Offers are in memory alone: a worker
repeats them if the store was started again. A run that continues from a checkpoint has another store, without the
samples of the one before. Rewards stay in the journal until they are withdrawn.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, TypeVar

import msgpack

from ..columns.declared_columns import MAX_STRING, META, OFFER_KEY, REWARD_COLUMN, Columns, outside_reward
from ..errors import StoreError
from ..messages import UnjudgedSample
from ..names import AgentName
from ..sample_id import SampleId
from ..workflow import LARGEST_REWARD
from .schema import Schema
from .tables import UNCHANGED, TableChange, Tables

# Of every sample; beside them are the columns that its workflow has written.
_FOR_JUDGES: Final = ("text", "query_text", "temperature", "prompt_tokens", "tokens")
_MOST_SHOWN: Final = 1000
# Rewards of so many samples may come too late, and are left out rather than refused.
_MOST_ENDED: Final = 65536
JUDGED: Final = 20  # [[sample id, writer, number, reward], ...]
WITHDRAWN: Final = 21  # sample ids


@dataclass(frozen=True, slots=True)
class _Offer:
    """``since``: the store's clock when it was made."""

    writer: str
    sample: UnjudgedSample
    since: float

    @property
    def name(self) -> str:
        """Unique, also among samples of one id."""
        return f"{self.writer}#{self.sample.number}"


@dataclass(frozen=True, slots=True)
class _Given:
    """``writer``, ``number``: of the offer that the reward is for."""

    writer: str
    number: int
    reward: float


Owned = TypeVar("Owned", _Offer, _Given)


class Judging:
    def __init__(self, columns: Mapping[AgentName, Columns], *, continues: bool = False) -> None:
        """``columns``: the declared ones, by agent. ``continues``: the run had another store before, whose samples are
        forgotten: a reward for an unknown sample may be one's, and is too late."""
        self._continues = continues
        self._schemas = {
            str(agent): Schema({REWARD_COLUMN: column})
            for agent, own in columns.items()
            if (column := outside_reward(own)) is not None
        }
        self._known = {agent: (*_FOR_JUDGES, *columns[AgentName(agent)]) for agent in self._schemas}
        self._offers: dict[str, _Offer] = {}
        self._given: dict[str, _Given] = {}
        self._ended: dict[str, bool] = {}
        """Samples that were offered and wait no longer, the newest last. True: without a reward until now."""
        self._late: dict[str, str] = {}
        """Samples whose rewards were given too late, and not taken by ``take_late`` yet: their agents."""
        self._news: dict[str, dict[str, float]] = {}
        self._has_news: dict[str, asyncio.Event] = {}

    # ------------------------------------------------------------------ for rollout workers

    def offer(self, writer: str, samples: Sequence[UnjudgedSample], now: float) -> None:
        """Shows samples to judges. Those that have their rewards already, as after a restart of the store, are
        ``given`` again. Raises StoreError for an agent whose rewards the workflow gives, and an invalid sample id."""
        for sample in samples:
            if sample.agent not in self._schemas:
                raise StoreError(f"the rewards of agent {sample.agent!r} are the workflow's")
            SampleId.parse(sample.sample_id)
        for sample in samples:
            before = self._given.get(sample.sample_id)
            if before is not None and (before.writer, before.number) != (writer, sample.number):
                del self._given[sample.sample_id]  # of an earlier trajectory of the same name
            self._offers[sample.sample_id] = _Offer(writer, sample, now)
            self._ended.pop(sample.sample_id, None)
        self.publish([sample.sample_id for sample in samples])

    async def outside_rewards(self, writer: str) -> AsyncIterator[dict[str, float]]:
        """Rewards of the writer's samples by sample id, as they come; without end."""
        news = self._has_news[writer] = asyncio.Event()
        if self._news.get(writer):
            news.set()
        while True:
            await news.wait()
            news.clear()
            if found := self._news.pop(writer, {}):
                yield found

    def withdraw(self, writer: str, sample_ids: Sequence[str]) -> TableChange:
        """These samples of the writer wait no longer; those of others, and unknown ones, don't matter."""
        offers = _take(self._offers, writer, sample_ids)
        self._end({name: name not in self._given for name in offers})
        given = _take(self._given, writer, sample_ids)
        if not given:
            return UNCHANGED

        def undo() -> None:
            self._offers |= offers
            self._given |= given

        return TableChange(msgpack.packb([WITHDRAWN, [*given]]), undo, len(given), [], [])

    def retire(self, writer: str) -> None:
        """The writer is lost: its groups begin again, with other samples of the same names."""
        self._end(
            {name: name not in self._given for name, offer in self._offers.items() if offer.writer == writer}
        )
        self._offers = {name: offer for name, offer in self._offers.items() if offer.writer != writer}
        self._given = {name: given for name, given in self._given.items() if given.writer != writer}
        self._news.pop(writer, None)
        self._has_news.pop(writer, None)

    def _end(self, samples: Mapping[str, bool]) -> None:
        """``samples``: as in ``_ended``."""
        self._ended |= samples
        for name in [*islice(self._ended, max(0, len(self._ended) - _MOST_ENDED))]:
            del self._ended[name]

    # ------------------------------------------------------------------ for judges

    def is_for(self, parts: Mapping[str, Mapping[str, Any]]) -> bool:
        """True if a judge gives rewards with this write."""
        return any(agent in self._schemas and REWARD_COLUMN in columns for agent, columns in parts.items())

    def write(self, parts: Mapping[str, Mapping[str, Any]]) -> TableChange:
        """Rewards by agent, all or none; to be published once they are durable. Those of samples that wait no longer or
        for the reward of another answer, and the same reward again, change nothing.

        Raises StoreError, with the sample's name, for one that never waited (but if the run ``continues``) or has
        another reward already, and for a
        value that is not a finite number of at most ``LARGEST_REWARD``; for further columns in the same write.
        """
        rewards: dict[str, float] = {}
        for agent, columns in parts.items():
            rewards |= self._check_rewards(agent, columns)
        self._end({name: True for name in rewards if self._is_forgotten(name)})
        self._late |= {
            name: agent
            for agent, columns in parts.items()
            for name in columns["sample_id"]
            if self._is_late(name, rewards)
        }
        self._ended |= dict.fromkeys(self._late.keys() & self._ended.keys(), False)
        new = {
            name: _Given(self._offers[name].writer, self._offers[name].sample.number, reward)
            for name, reward in rewards.items()
            if name in self._offers and name not in self._given
        }
        if not new:
            return UNCHANGED
        self._given |= new

        def undo() -> None:
            for name in new:
                self._given.pop(name, None)

        return TableChange(_judged_record(new), undo, len(new), [], [])

    def _is_forgotten(self, name: str) -> bool:
        """True for the id of a sample that may have waited in an earlier life of the run."""
        if not self._continues or name in self._offers or name in self._ended:
            return False
        try:
            SampleId.parse(name)
        except StoreError:
            return False
        return True

    def _is_late(self, name: str, rewards: Mapping[str, float]) -> bool:
        """True if a reward that was written is left out: its sample waits no longer and had none, or the reward is that
        of an answer before. ``rewards``: those that are not of another answer."""
        return name not in rewards or (name not in self._offers and self._ended.get(name, False))

    def take_late(self) -> dict[str, list[str]]:
        """By agent: the samples whose rewards were left out since the last call."""
        by_agent: dict[str, list[str]] = {}
        for name, agent in self._late.items():
            by_agent.setdefault(agent, []).append(name)
        self._late.clear()
        return by_agent

    def publish(self, sample_ids: Iterable[str]) -> None:
        """The rewards of these samples, as far as they have any, are on their way to the workers that wait."""
        for name in sample_ids:
            given, offer = self._given.get(name), self._offers.get(name)
            if given is None or offer is None:
                continue
            self._news.setdefault(offer.writer, {})[name] = given.reward
            if (news := self._has_news.get(offer.writer)) is not None:
                news.set()

    def _check_rewards(self, agent: str, columns: Mapping[str, Any]) -> dict[str, float]:
        schema = self._schemas.get(agent)
        ids = columns.get("sample_id")
        if schema is None or columns.keys() - {OFFER_KEY} != {"sample_id", REWARD_COLUMN}:
            raise StoreError(
                f"table {agent}: rewards are written alone: sample_id and {REWARD_COLUMN}, not "
                f"{', '.join(columns)}; other columns once the sample's group is complete"
            )
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise StoreError(f"table {agent}: sample_id is {ids!r:.120}: a list of sample ids is wanted")
        if len({*ids}) != len(ids):
            raise StoreError(f"table {agent}: a sample is in this write twice")
        values = schema.check(agent, ids, {REWARD_COLUMN: columns[REWARD_COLUMN]})[REWARD_COLUMN]
        offers = columns.get(OFFER_KEY, [None] * len(ids))
        if not isinstance(offers, list) or len(offers) != len(ids):
            raise StoreError(
                f"table {agent}: {OFFER_KEY} is {offers!r:.120}: a list with one for each sample is wanted"
            )
        rewards = {
            name: reward
            for name, offer, reward in zip(ids, offers, values, strict=True)
            if offer is None or name not in self._offers or self._offers[name].name == offer
        }
        for name, reward in rewards.items():
            self._check_reward(agent, name, reward)
        return rewards

    def _check_reward(self, agent: str, name: str, reward: float) -> None:
        if abs(reward) > LARGEST_REWARD:
            raise StoreError(
                f"table {agent}: sample {name}: reward {reward:g} is beyond {LARGEST_REWARD:g}, so that the gradient "
                "would overflow"
            )
        if name in self._ended or self._is_forgotten(name):
            return
        offer = self._offers.get(name)
        if offer is None or offer.sample.agent != agent:
            raise StoreError(f"table {agent}: there is no sample {name!r} that waits for a reward")
        given = self._given.get(name)
        if given is not None and given.reward != reward:
            raise StoreError(f"table {agent}: sample {name} has the reward {given.reward:g} already")

    # ------------------------------------------------------------------ looking

    def waiting(self, before: float) -> dict[str, int]:
        """By agent: the samples that were offered before this time and have no reward."""
        counts: dict[str, int] = {}
        for name, offer in self._offers.items():
            if name not in self._given and offer.since <= before:
                counts[offer.sample.agent] = counts.get(offer.sample.agent, 0) + 1
        return counts

    def scalars(self, columns: Collection[str]) -> Iterator[tuple[Any, ...]]:
        """Samples without a reward, as ``Tables.scalars`` has rows. ``columns``: the names of the values."""
        waiting = [offer.sample for name, offer in self._offers.items() if name not in self._given]
        for sample in waiting:
            row = {**_meta(sample), **sample.columns}
            yield tuple([_scalar(row.get(name)) for name in columns])

    def with_rows(self, tables: Tables) -> Iterator[tuple[Any, ...]]:
        """The rows of all tables, and the samples that wait."""
        return chain(tables.scalars(), self.scalars(tables.scalar_columns()))

    def unjudged(self, agent: str, columns: Sequence[str]) -> dict[str, list[Any]]:
        """As ``StoreApi.unjudged``."""
        if agent not in self._schemas:
            raise StoreError(
                f"the rewards of agent {agent!r} are the workflow's, or there is no such agent; rewards from outside "
                f"the run: agents.{agent}.columns.{REWARD_COLUMN}={{type: float, required: true, written_by: external}}"
            )
        if unknown := [name for name in columns if name not in self._known[agent]]:
            raise StoreError(
                f"table {agent}: unknown column {unknown[0]!r}; there are: {', '.join(self._known[agent])}"
            )
        waiting = (
            offer
            for name, offer in self._offers.items()
            if offer.sample.agent == agent and name not in self._given
        )
        offers = [*islice(waiting, _MOST_SHOWN)]
        return {
            "sample_id": [offer.sample.sample_id for offer in offers],
            OFFER_KEY: [offer.name for offer in offers],
            **{name: [offer.sample.columns.get(name) for offer in offers] for name in columns},
        }

    # ------------------------------------------------------------------ the journal

    def apply(self, kind: int, what: Sequence[Any]) -> None:
        """Repeats a record of the journal."""
        if kind == JUDGED:
            for name, *given in what[0]:
                self._given[name] = _Given(*given)
        else:
            for name in what[0]:
                self._given.pop(name, None)

    def records(self) -> Iterator[bytes]:
        """The records that lead to the rewards of this moment."""
        if self._given:
            yield _judged_record(self._given)


def _take(known: dict[str, Owned], writer: str, sample_ids: Iterable[str]) -> dict[str, Owned]:
    """Removes those of the writer from ``known``, and returns them."""
    return {name: known.pop(name) for name in sample_ids if name in known and known[name].writer == writer}


def _judged_record(given: Mapping[str, _Given]) -> bytes:
    rows = [[name, one.writer, one.number, one.reward] for name, one in given.items()]
    record: bytes = msgpack.packb([JUDGED, rows])
    return record


def _meta(sample: UnjudgedSample) -> dict[str, Any]:
    name = SampleId.parse(sample.sample_id)
    values = (
        sample.agent, sample.sample_id, name.step, name.group, name.query, name.turn, name.trajectory,
        sample.policy_version, None, "writing", None,
    )  # fmt: skip
    return dict(zip(META, values, strict=True))


def _scalar(value: Any) -> Any:
    """``value`` if it would lie in a row, else None."""
    if isinstance(value, str):
        return value if len(value) <= MAX_STRING else None
    return value if isinstance(value, bool | int | float) else None
