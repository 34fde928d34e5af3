"""A workflow that does what the test asks of it.

The config's ``data`` section says what; every query carries it along:

    trace: file      a line ``<query> <agent>=<prompt tokens>/<tokens> ...`` is appended for each training trajectory
    hold: file       trajectories of the query position written in the file, and of later ones, wait until it is gone
    faults: [what]   the first ``faulty`` (default 1) trajectories of the n-th query do the n-th: see ``_misbehave``;
                     null: nothing
    shape: how       who is asked what: see ``_SHAPES``
    hold_rewards: file  the same of the function ``score``, by which the shape ``scored`` has its rewards computed;
                     a process in which it waits leaves a file ``<file>.<process id>``
    digits: file     the queries' texts, instead of random ones
    warm_up_pause_s  each supervised batch takes that much longer
"""

import asyncio
import math
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from flexmarl.actors import compute_reward
from flexmarl.actors.workflow import Agents, Query, Rewards, Turn

_started: Counter[str] = Counter()


async def workflow(query: Query, agents: Agents) -> Rewards:
    asked: dict[str, Any] = query.data
    shape = _SHAPES[asked.get("shape", "pair")]
    if query.id.startswith("e"):
        return await shape(query, agents, asked)
    _started[query.id] += 1
    while "hold" in asked and asked["position"] >= _held_from(Path(asked["hold"])):
        await asyncio.sleep(0.1)
    if "faults" in asked and _started[query.id] <= asked.get("faulty", 1):
        faults = asked["faults"]
        if fault := faults[asked["position"] % len(faults)]:
            return await _misbehave(fault, query, agents)
    return await shape(query, agents, asked)


def _held_from(hold: Path) -> float:
    try:
        return float(hold.read_text() or 0)  # empty while the test writes it
    except FileNotFoundError:
        return math.inf


async def _pair(query: Query, agents: Agents, asked: dict[str, Any]) -> Rewards:
    draft = await agents["solver"].generate(f"{query.text}=")
    final = await agents["checker"].generate(f"{query.text}?{draft.text}=")
    _trace(asked, query, solver=[draft], checker=[final])
    return Rewards(
        solver=_share(draft, "1"), checker=_share(final, "2"), metrics={"accuracy": _share(final, "2")}
    )


async def _alone(query: Query, agents: Agents, asked: dict[str, Any]) -> Rewards:
    (agent,) = agents
    turn = await agents[agent].generate(f"{query.text}=")
    _trace(asked, query, **{agent: [turn]})
    return Rewards(**{agent: _share(turn, "1")})  # type: ignore[arg-type]  # no agent is named metrics


async def _uneven(query: Query, agents: Agents, asked: dict[str, Any]) -> Rewards:
    """The solver drafts twice at once, the checker sees only every other query, a third agent nothing."""
    drafts = await asyncio.gather(*(agents["solver"].generate(f"{query.text}=") for _ in range(2)))
    rewards = {"solver": _share(drafts[0], "1")}
    if asked["position"] % 2:
        rewards["checker"] = _share(await agents["checker"].generate(f"{drafts[1].text}="), "2")
    return Rewards(**rewards)  # type: ignore[arg-type]  # no agent is named metrics


async def _trio(query: Query, agents: Agents, asked: dict[str, Any]) -> Rewards:
    """As ``_uneven``, with a judge of both drafts."""
    drafts = await asyncio.gather(*(agents["solver"].generate(f"{query.text}=") for _ in range(2)))
    verdict = await agents["judge"].generate(f"{drafts[0].text}?{drafts[1].text}=")
    rewards = {"solver": _share(drafts[0], "1"), "judge": _share(verdict, "0")}
    if asked["position"] % 2:
        rewards["checker"] = _share(await agents["checker"].generate(f"{drafts[1].text}="), "2")
    return Rewards(**rewards)  # type: ignore[arg-type]  # no agent is named metrics


async def _talk(query: Query, agents: Agents, asked: dict[str, Any]) -> Rewards:
    """Three turns of one conversation: each prompt must be the tokens of all that came before."""
    first = await agents["solver"].generate(f"{query.text}=")
    second = await agents["solver"].generate([first, "?"])
    third = await agents["solver"].generate(["0", second, "12", "="])
    assert second.prompt_tokens[:-1] == first.prompt_tokens + first.tokens
    assert third.prompt_tokens[1:-3] == second.prompt_tokens + second.tokens
    _trace(asked, query, solver=[first, second, third])
    return Rewards(solver=_share(third, "1"))


async def _graded(query: Query, agents: Agents, asked: dict[str, Any]) -> Rewards:
    """A pair whose draft has the columns ``difficulty`` (the query's position) and ``plan``."""
    draft = await agents["solver"].generate(f"{query.text}=")
    await agents["checker"].generate(f"{draft.text}=")
    draft.write(difficulty=float(asked["position"]), plan=draft.tokens[:2])
    return Rewards(solver=_share(draft, "1"), checker=1.0)


async def _scored(query: Query, agents: Agents, asked: dict[str, Any]) -> Rewards:
    """As ``_alone``, with a reward that another process computes."""
    (agent,) = agents
    turn = await agents[agent].generate(f"{query.text}=")
    hold = "" if query.id.startswith("e") else asked.get("hold_rewards", "")
    return Rewards(**{agent: await compute_reward(score, turn.text, asked["position"], hold)})  # type: ignore[arg-type]


def score(text: str, position: int, hold: str) -> float:
    while hold and position >= _held_from(Path(hold)):
        Path(f"{hold}.{os.getpid()}").touch()
        time.sleep(0.02)
    return text.count("1") / 3


async def _misbehave(what: str, query: Query, agents: Agents) -> Rewards:
    turn = await agents["solver"].generate(f"{query.text}=")
    match what:
        case "exit":  # its process, the first time
            once = Path(query.data["once"])
            if not once.exists():
                once.touch()
                os._exit(3)
        case "raise":
            raise ValueError(f"no luck with {query.id}")
        case "nan":
            return Rewards(solver=float("nan"))
        case "no reward":
            return Rewards()
        case "unknown reward":
            return Rewards(solver=1.0, judge=1.0)
        case "unknown agent":
            await agents["judge"].generate("1=")
        case "long prompt":
            await agents["solver"].generate("1" * 100)
        case "hang":
            await asyncio.get_running_loop().create_future()
        case "return None":
            return None  # type: ignore[return-value]  # the fault
        case "unknown token":
            await agents["solver"].generate([turn, "", turn])
    return Rewards(solver=0.0)


_SHAPES = {
    "pair": _pair, "alone": _alone, "uneven": _uneven, "trio": _trio, "talk": _talk, "graded": _graded,
    "scored": _scored,
}  # fmt: skip


def _share(turn: Turn, digit: str) -> float:
    return turn.text.count(digit) / 3


def _trace(asked: dict[str, Any], query: Query, **turns: list[Turn]) -> None:
    if "trace" in asked and not query.id.startswith("e"):
        words = [
            f"{agent}=" + ",".join(f"{len(turn.prompt_tokens)}/{len(turn.tokens)}" for turn in taken)
            for agent, taken in turns.items()
        ]
        with Path(asked["trace"]).open("a") as file:
            file.write(f"{query.id} {' '.join(words)}\n")


def train_query(position: int, seed: int, **data: Any) -> Query:
    digits = f"{random.Random(f'{seed} {position}').randrange(1000):03d}"
    if "digits" in data:
        words = Path(data["digits"]).read_text().split()
        digits = words[position % len(words)]
    return Query(f"q{position:03d}", digits, {"position": position, **data})


def eval_queries(seed: int, **data: Any) -> list[Query]:
    return [Query(f"e{number}", f"{number}{seed % 10}", {"position": number, **data}) for number in range(4)]


def sft(agent: str, batch: int, size: int, seed: int, **data: Any) -> list[tuple[str, str]]:
    time.sleep(data.get("warm_up_pause_s", 0.0))
    rng = random.Random(f"{seed} {agent} {batch}")
    digits = [str(rng.randrange(10)) for _ in range(size)]
    return [(f"{digit}=", digit) for digit in digits]
